"""Traces of a trajectory: one set of super-trees for all settings of a raw draft, and labels of
rules that verify one path.
"""

from dataclasses import replace

import pytest
import torch

from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.settings import SETTINGS, TracesConfig
from nde_talf.data.traces.trace import trace_trajectories
from nde_talf.decoding.actions import TREE_INDEX, Action, canonical
from nde_talf.decoding.common.micro_batch import MicroBatch
from nde_talf.decoding.sampling.rng import warp
from nde_talf.decoding.sampling.sampling_setting import RAW
from tests.decoding.pairs import tiny_pair

CONFIG = TracesConfig(
    samples=3, stride=8, verifiers=["specinfer", "traversal"], draft_temperature="raw"
)
TRACED = Prompt("a", "code", "", [1, 2, 3], "train"), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 9, 8, 7]
ENDED = Prompt("b", "prose", "", [4, 5], "validation"), [4, 5]  # the target wrote nothing after it


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(11, noise=0.06)


def trace(pair, names, texts=(TRACED, ENDED), **changes):
    settings, batch = [SETTINGS[name] for name in names], MicroBatch(4)
    prompts, trajectories = map(list, zip(*texts, strict=True))
    config = replace(CONFIG, **changes)
    return trace_trajectories(*pair, prompts, trajectories, settings, config, batch, 7)


@pytest.mark.slow
def test_a_raw_draft_has_one_set_of_super_trees_for_all_settings(pair):
    names = ["t0.6", "t1.0", "p0.9"]
    together = trace(pair, names)
    assert together["context"].tolist() == [4, 12] * 3
    assert together["temperature"].tolist() == pytest.approx([0.6] * 2 + [1.0] * 4)
    same = "specinfer", "traversal", "h_q_root", "entropy_p_previous", "entropy_q_root"
    for i, name in enumerate(names):
        alone = trace(pair, [name])
        for column in same:
            part = together[column][2 * i : 2 * i + 2]
            assert torch.allclose(part, alone[column], atol=1e-6), (name, column)
    # The draft's entropy is that of its raw distribution, the target's of the setting's.
    for which, model, setting in (("p", pair[0], SETTINGS["t0.6"]), ("q", pair[1], RAW)):
        law = warp(model.logits(together[f"h_{which}_previous"][0]), setting)
        expected = float(torch.special.entr(law).sum())
        assert float(together[f"entropy_{which}_previous"][0]) == pytest.approx(expected, abs=1e-5)


def test_nothing_is_accepted_below_a_drafted_end():
    pair = tiny_pair(200, noise=0.0)  # every draft is accepted
    paths = [TREE_INDEX[Action(1, 0, depth)] for depth in range(1, 9)]

    def path_labels():
        traced = trace(pair, ["t1.0"], verifiers=["specinfer", "traversal"])
        return torch.stack([traced[name][..., paths] for name in ("specinfer", "traversal")])

    assert torch.allclose(path_labels(), torch.arange(2.0, 10).expand(2, 2, 3, 8), atol=1e-3)
    pair[0].chat_ends = frozenset(range(200))  # the first draft, and one token after it
    assert torch.allclose(path_labels(), torch.tensor(2.0).expand(2, 2, 3, 8), atol=1e-2)


def test_texts_that_end_at_once_give_no_rows(pair):
    assert trace(pair, ["t1.0"], [ENDED]) == {}


def test_rules_of_one_path_have_the_labels_of_that_path(pair):
    traced = trace(pair, ["t0.6"], verifiers=["bv", "traversal", "naive"])
    alone = trace(pair, ["t0.6"], verifiers=["naivetree"])
    path = TREE_INDEX[Action(1, 0, 4)]
    for name, rule in (("bv", traced["traversal"]), ("naive", alone["naivetree"])):
        for tree in (Action(1, 0, 4), Action(3, 1, 3), Action(4, 4, 0)):
            assert torch.equal(traced[name][..., TREE_INDEX[canonical(tree)]], rule[..., path])
