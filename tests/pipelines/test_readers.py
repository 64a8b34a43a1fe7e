"""What is well formed and wrong all the same is refused by name, before a size that a file claims
is allocated.
"""

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nde_talf.decoding.common.errors import memory_is_short
from nde_talf.decoding.common.files import read_json, unreadable
from nde_talf.decoding.common.tensors import read_tensors
from nde_talf.draft_training.training.checkpoint import CHECKPOINT, resumable
from nde_talf.evaluation.benchmark import Record, read_records
from nde_talf.pipelines.commands.quiet import quiet
from tests.refusal import refusal

HERE = Path(__file__).parents[1] / "fixtures"


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "[" * 100_000, "\udcff", '{"a": 1' + "0" * 5000 + "}"]
)
def test_a_json_file_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "content.json"
    with refusal(r"content\.json: it is missing.*or make it"):
        read_json(path, again="make it")
    path.write_text(content, errors="surrogateescape")
    with refusal(r"content\.json: it cannot be read"):
        read_json(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "content.json")
    with refusal(r"content\.json: it is no regular file"):
        read_json(tmp_path / "content.json")


def test_tensors_are_finite_and_no_larger_than_the_file(tmp_path):
    path = tmp_path / "some.safetensors"
    save_file({"a": torch.tensor([1.0, torch.nan])}, path)
    with refusal("a holds NaN"):
        read_tensors(path, "make it")
    claim = json.dumps(
        {"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}
    ).encode()
    path.write_bytes(len(claim).to_bytes(8, "little") + claim + b"0000")
    with refusal(r"some\.safetensors"):
        read_tensors(path, "make it")


def test_short_memory_is_called_that():
    switched = "mkldnn_matmul failed, switching to baddbmm:could not create a primitive (Triggered"
    for error in (
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
        UserWarning(switched),
    ):
        assert memory_is_short(error)
    for other in (OSError("nothing"), RuntimeError("could not create a primitive descriptor for")):
        assert not memory_is_short(other)
    quiet()
    with pytest.raises(UserWarning):  # no other kernel in silence
        warnings.warn(switched, stacklevel=1)
    told = str(unreadable("file", MemoryError(), "delete it"))
    assert "not enough memory" in told and "delete" not in told


def test_a_damaged_record_is_left_out_and_reported_unless_it_is_the_last(tmp_path, capsys):
    path, line = tmp_path / "records.jsonl", Record("t1", "nss", "p", "code", 4, 2, 9, 0.5).line()
    path.write_bytes("\n".join([line, '{"tokens": "4"}', line, line[:30]]).encode() + b"\xff")
    assert [record.tokens for record in read_records(path)] == [4, 4]
    said = capsys.readouterr().out
    assert "line 2 is damaged" in said and "line 4" not in said


def test_what_is_no_checkpoint_is_refused_and_stays(tmp_path):
    path = tmp_path / CHECKPOINT
    torch.save([1], path)
    with refusal("no checkpoint of a training"):
        resumable(tmp_path)
    assert path.exists()
