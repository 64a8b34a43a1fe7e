"""An exported head comes back as it was, and only next to its own target."""

import json

import pytest
import torch

from nde_talf.draft_training.export.head_format import fingerprint, load_head, save_head
from tests.draft_training.heads import random_head, tiny_target
from tests.refusal import refusal


@pytest.fixture
def folder(target, tmp_path):
    return save_head(random_head(target), tmp_path / "head")


@pytest.mark.parametrize(
    "other,words",
    [
        ({"seed": 3}, "another set of weights"),
        ({"hidden": 32}, "hidden_size"),
        ({"vocabulary": 31}, "vocab"),
    ],
)
def test_another_target_is_refused(folder, other, words):
    with refusal(words):
        load_head(folder, tiny_target(**other))


def test_a_target_that_was_trained_further_is_another_one_even_with_the_same_lm_head(
    target, folder
):
    further = tiny_target()
    with torch.no_grad():
        further.module.model.layers[1].mlp.up_proj.weight.mul_(-1)
    with refusal("set of weights"):
        load_head(folder, further)
    further.module.model.layers[1].mlp.up_proj.weight.data.mul_(-1)
    load_head(folder, further)


def test_a_head_that_ships_drafts_for_other_weights_of_its_shapes_and_says_so(folder, capsys):
    assert load_head(folder, tiny_target(seed=3), any_weights=True).kind == "eagle"
    assert "trained for other weights" in capsys.readouterr().out
    with refusal("hidden_size"):
        load_head(folder, tiny_target(hidden=32), any_weights=True)


def test_an_export_without_its_note_is_refused(target, folder):
    config = json.loads((folder / "config.json").read_text())
    del config["draft_head"]
    (folder / "config.json").write_text(json.dumps(config))
    with refusal("draft_head"):
        load_head(folder, target)


def test_the_same_target_in_another_precision_is_recognised():
    target = tiny_target()
    before = fingerprint(target)
    target.module.to(torch.bfloat16)
    assert fingerprint(target) == before
