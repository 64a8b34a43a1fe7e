"""A pair knows the models it was made of by what is cheap to read."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nde_talf.data.text.pair import ROLES, Pair
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.text.shipped import SHIPPED
from nde_talf.decoding.common.checksums import CHECKSUMS
from nde_talf.decoding.common.errors import UserError

TINY = Path(__file__).parents[1] / "fixtures/pair"


def test_a_pair_of_the_shipped_models_is_read_in_another_checkout(tmp_path, monkeypatch):
    pair, rows = Pair(tmp_path / "pair"), torch.arange(12).reshape(2, 6)
    prompts = [Prompt("p", "text", "x", [1, 2])]
    pair.write(
        *(str(SHIPPED / "pair" / role) for role in ("target", "draft")), prompts, 1, rows, rows
    )
    assert str(SHIPPED) not in (tmp_path / "pair/pair.json").read_text()
    assert pair.where("target") == str(SHIPPED / "pair/target")
    monkeypatch.setattr("nde_talf.data.text.pair.SHIPPED", tmp_path / "other")
    assert pair.where("draft") == str(tmp_path / "other/pair/draft")


def test_a_pair_refuses_a_model_that_is_not_the_one_it_was_made_of(tmp_path, monkeypatch):
    for role in ROLES:
        shutil.copytree(TINY / role, tmp_path / role)
        (tmp_path / role / CHECKSUMS).unlink()
    pair, rows = Pair(tmp_path / "pair"), torch.arange(12).reshape(2, 6)
    where, prompts = (str(tmp_path / role) for role in ROLES), [Prompt("p", "text", "x", [1])]
    pair.write(*where, prompts, 1, rows, rows)
    pair.models("cpu", "float32")
    weights = tmp_path / "draft/model.safetensors"
    tensors = load_file(weights)
    name = min(tensors)
    save_file({**tensors, name: tensors[name].half()}, weights, metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"model\.draft=.*model\.safetensors has changed since this"
    ):
        pair.models("cpu", "float32")
    save_file(tensors, weights, metadata={"format": "pt"})
    config = tmp_path / "target/config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))
    with pytest.raises(UserError, match=r"model\.target=.*config\.json has changed"):
        pair.target("cpu", "float32")
    shutil.rmtree(tmp_path / "target")
    with pytest.raises(UserError, match=r"model\.target=.*its folder is gone"):
        pair.target("cpu", "float32")
    own = Pair(tmp_path / "own")
    own.write(*ROLES, prompts, 1, rows, rows)
    monkeypatch.chdir(tmp_path)  # where another's target is
    assert own.where("target") == str(tmp_path / "own/target")
