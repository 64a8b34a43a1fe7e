"""Test vectors of heads: a head gives them again, another one does not; heads by a hub's name."""

import json

import pytest
import torch

from nde_talf.decoding.common.checksums import write_checksums
from nde_talf.draft_training.export.head_format import load_head, save_head
from nde_talf.draft_training.export.vectors import VECTORS
from tests.draft_training.heads import random_eagle3, random_head, same, tiny_target
from tests.local_hub import local_hub
from tests.refusal import refusal


@pytest.mark.parametrize("make", [random_head, random_eagle3])
def test_a_head_gives_its_vectors_again_and_another_one_is_refused(make, tmp_path):
    target = tiny_target(layers=6)
    folder = save_head(make(target), tmp_path / "head")
    assert load_head(folder, target).kind
    vectors = json.loads((folder / VECTORS).read_text())
    assert len(vectors["tokens"]) == 1 + len(vectors["features"]) == 1 + len(vectors["best"])
    vectors["logits"][1][0] += 1.0
    (folder / VECTORS).write_text(json.dumps(vectors))
    write_checksums(folder)
    with refusal("other logits than it was exported with"):
        load_head(folder, target)


def test_another_reader_needs_the_file_and_the_weights_alone(tmp_path):
    """A head of EAGLE's wiring by its formula: one layer over fc([embedding; feature])."""
    target = tiny_target()
    head = random_head(target)
    vectors = json.loads((save_head(head, tmp_path / "head") / VECTORS).read_text())
    tokens, features = (torch.tensor(vectors[name]) for name in ("tokens", "features"))
    with torch.inference_mode():
        entries = head.fc(torch.cat([head.embed(tokens[1:]), features], -1))[None]
        positions = torch.arange(len(features))[None]
        mask = torch.full((len(features), len(features)), -torch.inf).triu(1)[None, None]
        attended, _ = head.layers[0].self_attn(
            entries, head.angles(entries, positions), mask, None, position_ids=positions
        )
        logits = target.logits(head.finish(entries, attended)[0])
    known = torch.tensor(vectors["logits"])
    torch.testing.assert_close(logits.gather(-1, torch.tensor(vectors["best"])), known)


@pytest.mark.slow
def test_a_head_loads_by_its_name_on_a_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = tiny_target()
    head = random_head(target)
    save_head(head, tmp_path / "hub/me/head")
    with local_hub(tmp_path):
        loaded = load_head("me/head", target)
        with refusal("me/none: there is no such folder, and the hub gives none"):
            load_head("me/none", target)
    assert same(loaded, head)
