"""Traces of a trajectory: the same however the work is cut, one set of super-trees for all settings
of a raw draft.
"""

from dataclasses import replace

import pytest
import torch

from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.settings import SETTINGS, TracesConfig
from nde_talf.data.traces.trace import trace_trajectories
from nde_talf.decoding.actions import TREE_INDEX, Action, canonical
from nde_talf.decoding.common.micro_batch import MicroBatch
from nde_talf.decoding.sampling import RAW, warp
from tests.decoding.pairs import tiny_pair

CONFIG = TracesConfig(
    samples=3, stride=8, verifiers=["specinfer", "traversal"], draft_temperature="raw"
)
PROMPTS = [
    Prompt("a", "code", "", [1, 2, 3], "train"),
    Prompt("b", "prose", "", [4, 5], "validation"),
]
TRAJECTORIES = [
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 9, 8, 7],
    [4, 5],
]  # behind b the target wrote nothing


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(11, noise=0.06)


def trace(pair, names, micro_batch=4, **changes):
    settings = [SETTINGS[name] for name in names]
    batch = MicroBatch(micro_batch, pytest.fail)
    return trace_trajectories(
        *pair, PROMPTS, TRAJECTORIES, settings, replace(CONFIG, **changes), batch, 7
    )


def test_a_raw_draft_has_one_set_of_super_trees_for_all_settings(pair):
    together = trace(pair, ["t0.6", "t1.0", "p0.9"])
    assert together["context"].tolist() == [4, 12] * 3
    assert together["temperature"].tolist() == pytest.approx([0.6] * 2 + [1.0] * 4)
    for i, name in enumerate(["t0.6", "t1.0", "p0.9"]):
        alone = trace(pair, [name])
        for column in (
            "specinfer",
            "traversal",
            "h_q_root",
            "entropy_p_previous",
            "entropy_q_root",
        ):
            assert torch.allclose(together[column][2 * i : 2 * i + 2], alone[column], atol=1e-6), (
                name,
                column,
            )
    # The draft's entropy is that of its raw distribution, the target's of the setting's.
    target, draft = pair
    hidden = together["h_q_previous"][0]
    q = warp(draft.logits(hidden), RAW)
    assert float(together["entropy_q_previous"][0]) == pytest.approx(
        float(-(q * q.log()).sum()), abs=1e-5
    )
    p = warp(target.logits(together["h_p_previous"][0]), SETTINGS["t0.6"])
    assert float(together["entropy_p_previous"][0]) == pytest.approx(
        float(-(p * p.log()).sum()), abs=1e-5
    )


def test_rules_of_one_path_have_the_labels_of_that_path(pair):
    traced = trace(pair, ["t0.6"], verifiers=["bv", "traversal", "naive"])
    alone = trace(pair, ["t0.6"], verifiers=["naivetree"])
    for name, rule in (("bv", traced["traversal"]), ("naive", alone["naivetree"])):
        for tree in (Action(1, 0, 4), Action(3, 1, 3), Action(4, 4, 0)):
            path = TREE_INDEX[Action(1, 0, 4)]
            assert torch.equal(traced[name][..., TREE_INDEX[canonical(tree)]], rule[..., path])


def test_texts_that_end_at_once_give_no_rows(pair):
    assert (
        trace_trajectories(*pair, PROMPTS[1:], TRAJECTORIES[1:], [RAW], CONFIG, MicroBatch(1), 0)
        == {}
    )
