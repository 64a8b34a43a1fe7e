"""What a measurement was made with, and a text with its drafts."""

import subprocess
import sys

from nde_talf.decoding.streams import Block
from nde_talf.evaluation.environment import code, conditions, environment
from nde_talf.evaluation.sample import coloured


def test_the_code_is_a_commit_where_there_is_one_and_else_a_version(tmp_path):
    assert code(tmp_path).startswith("version ")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("one")
    for asked in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *asked], check=True)
    first = code(tmp_path)
    assert first.startswith("commit ") and "changes" not in first
    (tmp_path / "file").write_text("two")
    assert code(tmp_path) == f"{first}, with changes"


def test_command_and_machine(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py", "data=[text,file]"])
    found = environment("cpu", "float32", 1)
    assert found["command"].endswith("'data=[text,file]'") and found["torch"][0].isdigit()
    assert found["conditions"].startswith("batch size 1, float32, ")
    assert found["conditions"].endswith(", 1 thread")
    assert conditions("cpu", "x", 2).endswith("2 threads")


class Letters:
    """A tokenizer whose token n is the n-th letter, but for 26 and 27, two halves of one character."""

    def decode(self, ids: list[int]) -> str:
        return "".join(
            chr(97 + i) if i < 26 else "\ufffd" if i == 26 else "é" for i in ids
        ).replace("\ufffdé", "é")


def test_every_piece_of_a_text_says_where_it_came_from():
    blocks = [Block([3], 0), Block([4, 5, 6], 2), Block([26, 27, 7], 3)]
    assert coloured(Letters(), [0, 1, 2], blocks) == [
        ["abc", "prompt"],
        ["d", "corrected"],
        ["ef", "drafted"],
        ["g", "corrected"],
        ["éh", "drafted"],
    ]
