"""Traces of a trajectory: their features, and labels below an end of the text."""

from dataclasses import replace

import pytest
import torch

from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.settings import SETTINGS, TracesConfig
from nde_talf.data.traces.trace import trace_trajectories
from nde_talf.decoding.actions import TREE_INDEX, Action
from nde_talf.decoding.common.micro_batch import MicroBatch
from nde_talf.decoding.sampling.rng import warp
from tests.decoding.pairs import tiny_pair

CONFIG = TracesConfig(samples=3, stride=8, verifiers=["specinfer", "traversal"])
TRACED = Prompt("a", "code", "", [1, 2, 3], "train"), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 9, 8, 7]
ENDED = Prompt("b", "prose", "", [4, 5], "validation"), [4, 5]  # the target wrote nothing after it


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(11, noise=0.06)


def trace(pair, name, texts=(TRACED, ENDED), **changes):
    prompts, trajectories = map(list, zip(*texts, strict=True))
    config, setting = replace(CONFIG, **changes), SETTINGS[name]
    return trace_trajectories(*pair, prompts, trajectories, setting, config, MicroBatch(4), 7)


@pytest.mark.parametrize("name", ["t0.6", "p0.9"])
def test_features_are_of_both_models_under_the_setting(pair, name):
    traced, setting = trace(pair, name), SETTINGS[name]
    assert traced["context"].tolist() == [4, 12]
    assert traced["temperature"].tolist() == pytest.approx([setting.temperature] * 2)
    for which, model in zip("pq", pair, strict=True):
        law = warp(model.logits(traced[f"h_{which}_previous"][0]), setting)
        expected = float(torch.special.entr(law).sum())
        assert float(traced[f"entropy_{which}_previous"][0]) == pytest.approx(expected, abs=1e-5)


def test_nothing_is_accepted_below_a_drafted_end():
    pair = tiny_pair(200, noise=0.0)  # every draft is accepted
    paths = [TREE_INDEX[Action(1, 0, depth)] for depth in range(1, 9)]

    def path_labels():
        traced = trace(pair, "t1.0", verifiers=["specinfer", "traversal"])
        return torch.stack([traced[name][..., paths] for name in ("specinfer", "traversal")])

    assert torch.allclose(path_labels(), torch.arange(2.0, 10).expand(2, 2, 3, 8), atol=1e-3)
    pair[0].chat_ends = frozenset(range(200))  # the first draft, and one token after it
    assert torch.allclose(path_labels(), torch.tensor(2.0).expand(2, 2, 3, 8), atol=1e-2)


def test_texts_that_end_at_once_give_no_rows(pair):
    assert trace(pair, "t1.0", [ENDED]) == {}
