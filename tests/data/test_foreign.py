"""Models of others are known again: by what is cheap to read, and by all of their bytes where that
is asked.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nde_talf.data.text.pair import Pair
from nde_talf.data.text.prompts import Prompt
from nde_talf.decoding.common.checksums import CHECKSUMS
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.foreign import changed, recorded

TINY = Path(__file__).parents[1] / "fixtures/pair"


def test_models_of_others_are_known_by_json_headers_and_sizes_and_whole_where_asked(tmp_path):
    weights = {"a": torch.randn(4, 5), "b": torch.randn(3)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4}))
    (tmp_path / "generation_config.json").write_text("{}")
    record = json.loads(json.dumps(recorded(str(tmp_path))))
    (tmp_path / "generation_config.json").write_text('{"top_k": 3}')
    assert (
        changed(str(tmp_path), record) is None
        and changed(str(tmp_path), record, whole=True) is None
    )
    save_file({**weights, "a": torch.randn(4, 5)}, tmp_path / "model.safetensors")
    assert (
        changed(str(tmp_path), record) is None
    )  # other numbers in the same tensors: not without reading them
    assert "model.safetensors has changed" in changed(str(tmp_path), record, whole=True)
    save_file({**weights, "a": torch.randn(5, 4)}, tmp_path / "model.safetensors")
    assert "header" in changed(str(tmp_path), record)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 5}))
    assert "config.json has changed" in changed(str(tmp_path), record)


def test_a_pair_refuses_a_model_that_is_not_the_one_it_was_made_of(tmp_path):
    for role in ("target", "draft"):
        shutil.copytree(TINY / role, tmp_path / role)
        (tmp_path / role / CHECKSUMS).unlink()
    pair, rows = Pair(tmp_path / "pair"), torch.arange(12).reshape(2, 6)
    pair.write(
        *(str(tmp_path / role) for role in ("target", "draft")),
        [Prompt("p", "text", "x", [1, 2])],
        1,
        rows,
        rows,
    )
    pair.models("cpu", "float32")
    pair.check_models(whole=True)
    weights = tmp_path / "draft/model.safetensors"
    save_file(
        {name: weight + 1 for name, weight in load_file(weights).items()},
        weights,
        metadata={"format": "pt"},
    )
    pair.models("cpu", "float32")
    with pytest.raises(
        UserError,
        match=r"model\.draft=.*model\.safetensors has changed since this run's pair was made",
    ):
        pair.check_models(whole=True)
    config = tmp_path / "target/config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))
    for load in (pair.models, pair.target):
        with pytest.raises(UserError, match=r"model\.target=.*config\.json has changed"):
            load("cpu", "float32")
