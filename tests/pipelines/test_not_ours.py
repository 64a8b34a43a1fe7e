"""A run harms nothing that it did not make: links, folders of others, other names."""

import os
import shutil
from pathlib import Path

import pytest

from nde_talf.decoding.common.checksums import check_checksums, write_export
from nde_talf.decoding.common.files import write_json
from nde_talf.pipelines.runs.finished import COMMAND
from nde_talf.pipelines.runs.lock import LOCK, locked
from nde_talf.pipelines.runs.record import completed
from tests.pipelines.chain import Chain
from tests.refusal import refusal


@pytest.fixture
def theirs(tmp_path):
    """A folder of somebody else, and what it holds."""
    folder = tmp_path / "weights"
    (folder / "target").mkdir(parents=True)
    for name in ("target/model.safetensors", "made.txt", ".made.txt.1-0badcafe.tmp", "table.json"):
        (folder / name).write_text("theirs")
    before = contents(folder)
    yield folder
    assert contents(folder) == before


def contents(folder):
    return {str(file): file.read_text() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def chain(tmp_path):
    return Chain(tmp_path / "checkpoints")


LINKS = ("", "pair", "pair/made.txt", "pair/inner", "pair/manifest.json", "replaced")


@pytest.mark.parametrize(
    ("name", "force"), [(name, force) for name in LINKS for force in (True, False)][:-1]
)
def test_a_link_where_something_of_ours_belongs_is_refused_by_name(chain, theirs, name, force):
    if name not in ("", "pair"):
        chain.run()
    link = chain.path(name)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(theirs / "made.txt" if link.suffix in (".txt", ".json") else theirs)
    chain.text = "again"  # so that what follows is made again, and what it replaces set aside
    with refusal(rf"{link}.* is a link"):
        chain.run("pair", force=force)
        chain.run()


def test_a_link_of_the_users_in_a_runs_folder_is_left_alone(chain, theirs):
    chain.run()
    chain.path("notes").symlink_to(theirs)
    assert chain.run("pair", force=True) == ["pair"] and chain.path("notes").is_symlink()


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_no_run_made_is_refused(chain, theirs, force):
    shutil.copytree(theirs, chain.path("pair"))
    before = contents(chain.path("pair"))
    with refusal(rf"{chain.path('pair')}: no run made it"):
        chain.run("pair", force=force)
    assert contents(chain.path("pair")).items() >= before.items()


@pytest.mark.parametrize("how", [os.link, os.symlink, shutil.copy])
def test_a_lock_that_is_another_file_keeps_its_content(tmp_path, theirs, how):
    run = tmp_path / "run"
    run.mkdir()
    how(theirs / "made.txt", run / LOCK)
    with refusal(r"\.lock"), locked(run):
        pass
    assert (run / LOCK).read_text() == "theirs"


def test_a_command_says_what_a_killed_one_left_and_that_it_removed_it(chain, capsys):
    chain.run()
    chain.path("pair", ".made.txt.12-0badcafe.tmp").write_text("half")
    assert chain.run() == []
    assert "pair/.made.txt.12-0badcafe.tmp" in "".join(capsys.readouterr().out.split())


def test_an_export_takes_the_place_of_an_export_alone(tmp_path, theirs):
    def write(folder):
        (folder / "config.json").write_text("{}")

    for _ in range(2):
        write_export(tmp_path / "export", write)
    (tmp_path / "export/README.md").write_text("of the hub")
    assert check_checksums(tmp_path / "export")
    (tmp_path / "export/chat_template.jinja").write_text("{{ x }}")
    with refusal(r"chat_template\.jinja .*not there when"):
        check_checksums(tmp_path / "export")
    (tmp_path / "page").mkdir()
    (tmp_path / "page/README.md").write_text("of the user")
    for folder in (tmp_path / "export", tmp_path / "page", theirs):
        with refusal("which no export wrote"):
            write_export(folder, write)
    assert (tmp_path / "export/chat_template.jinja").exists()


def test_a_run_whose_name_differs_in_capitals_alone_is_refused_where_both_are_one(
    tmp_path, monkeypatch
):
    """As a file system does that keeps capitals and does not tell them apart."""
    (tmp_path / "Mine").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "Mine")
    monkeypatch.setattr("nde_talf.pipelines.runs.lock.refuse_link", lambda path: None)
    monkeypatch.setattr(Path, "resolve", lambda path: path)
    monkeypatch.setattr(os, "listdir", lambda path: ["Mine"])
    with refusal("in other letters"), locked(tmp_path / "mine"):
        pass


def test_a_record_gives_no_folder_no_option_and_no_secret(tmp_path):
    run = tmp_path / "mine"
    (run / "pair").mkdir(parents=True)
    (run / "pair/pair.json").touch()
    theirs = [
        "paths.checkpoints=/x",
        "force=true",
        "+hydra.run.dir=/x",
        "--config-dir=/x",
        "seed=3",
    ]
    write_json(run / COMMAND, {"arguments": theirs})
    asked = ["run=mine", f"paths.checkpoints={tmp_path}"]
    assert sorted(completed(asked)) == sorted([*asked, "seed=3"])
