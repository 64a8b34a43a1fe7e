"""Files are whole or absent, readable by others, and known again by their checksums."""

import os
import subprocess
import sys
import time

import pytest

from nde_talf.decoding.common.files import remove_temporaries, write_atomically


def write_folder(path, text):
    path.mkdir()
    (path / "inside").write_text(text)
    (path / "inside").chmod(0o600)  # as safetensors leaves its files


def test_what_was_there_stays_until_its_successor_is_whole(tmp_path):
    inside = tmp_path / "folder/inside"
    write_atomically(inside.parent, lambda path: write_folder(path, "first"))

    def fail(path):
        write_folder(path, "second")
        raise ValueError

    with pytest.raises(ValueError):
        write_atomically(inside.parent, fail)
    assert inside.read_text() == "first"
    write_atomically(inside.parent, lambda path: write_folder(path, "second"))
    assert inside.read_text() == "second" and os.listdir(tmp_path) == ["folder"]


WRITER = """
import sys, time
from pathlib import Path
from nde_talf.decoding.common.files import write_atomically
def write(path):
    path.write_text(sys.argv[2])
    Path(sys.argv[1]).with_name("begun-" + sys.argv[2]).touch()
    time.sleep(float(sys.argv[3]))
write_atomically(Path(sys.argv[1]), write)
"""


def start(path, word, seconds):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path), word, str(seconds)])
    deadline = time.monotonic() + 60
    while not path.with_name(f"begun-{word}").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return process


@pytest.mark.slow
def test_two_writers_do_not_share_a_temporary_name_and_a_killed_ones_is_removed(tmp_path):
    path = tmp_path / "file"
    killed, slow = start(path, "killed", 60), start(path, "slow", 1.0)
    write_atomically(path, lambda temporary: temporary.write_text("ours"))
    assert path.read_text() == "ours"
    assert slow.wait(30) == 0 and path.read_text() == "slow"
    killed.kill()
    killed.wait()
    assert len(list(tmp_path.glob(".*.tmp"))) == 1
    remove_temporaries(tmp_path)
    assert not list(tmp_path.glob(".*")) and path.read_text() == "slow"


def test_a_folder_whose_replacement_was_killed_half_way_comes_back(tmp_path):
    write_folder(
        tmp_path / ".folder.1-0badcafe.tmp.old", "first"
    )  # moved away, its successor not there
    write_folder(tmp_path / ".folder.1-0badcaff.tmp", "second")
    remove_temporaries(tmp_path)
    assert os.listdir(tmp_path) == ["folder"]
    assert (tmp_path / "folder/inside").read_text() == "first"
