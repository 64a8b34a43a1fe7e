"""Throughput, the objective's gradient, static choices and the latency table."""

import math

import pytest
import torch

from nde_talf.decoding.actions import TREE_INDEX, TREES, Action
from nde_talf.selector.objective import (
    best_static,
    deviance,
    mean_tokens,
    policy_throughput,
    selector_loss,
    visits,
)
from nde_talf.selector.prices import LatencyTable


def table(draft=1.0, target=10.0, node=0.0):
    return LatencyTable(
        [1, 100], [1, 41], [1, 4], [[target, target + 40 * node]] * 2, [[draft, draft]] * 2
    )


def test_throughput_is_a_ratio_of_expectations():
    policy, efficiency, seconds = torch.tensor([[[0.5, 0.5]], [[2.0, 4.0]], [[1.0, 3.0]]])
    assert float(policy_throughput(policy, efficiency, seconds)) == pytest.approx(1.5)


def test_loss_of_the_baseline_is_zero_and_a_better_action_lowers_it():
    efficiency, seconds = torch.tensor([[2.0, 4.0, 1.0]]), torch.ones(1, 3)
    base = torch.tensor([0])

    def loss(action):
        logits = torch.full((1, 3), -50.0)
        logits[0, action] = 50.0
        return float(selector_loss(logits, efficiency, seconds, base, 1.0, 1.0))

    assert loss(0) == pytest.approx(0, abs=1e-6)
    assert loss(1) == pytest.approx(-math.log(2), abs=1e-6)
    assert loss(2) == pytest.approx(math.log(2) + 0.25, abs=1e-6)


def test_tail_counts_the_worst_fraction_only():
    efficiency = torch.ones(10, 2)
    efficiency[0, 1] = 0.5
    logits, base = torch.tensor([[-50.0, 50.0]]).expand(10, -1), torch.zeros(10, dtype=torch.long)
    plain, tailed = (
        float(selector_loss(logits, efficiency, torch.ones(10, 2), base, weight, 0.1))
        for weight in (0.0, 1.0)
    )
    assert tailed - plain == pytest.approx(0.25)


def test_the_mean_over_a_text_is_that_of_its_steps():
    """A text of 9,000 tokens in two halves: steps of one tree commit 1 token in the first and 9 in
    the other, in 1 s each; steps of the other tree commit 2 everywhere.

    Counted step by step.
    """
    efficiency, seconds = torch.tensor([[1.0, 2.0], [9.0, 2.0]]), torch.ones(2, 2)
    steps = [sum(4500 / float(half) for half in tree) for tree in efficiency.T]
    for tree, count in enumerate(steps):
        assert abs(mean_tokens(efficiency[:, tree]) - 9000 / count) < 1e-9
    assert best_static(efficiency, seconds) == 1 and efficiency.mean(0).argmax() == 0
    assert torch.allclose(
        visits(efficiency[:, 0]) / 2, torch.tensor([4500 / 1, 4500 / 9]) / steps[0]
    )


def test_a_step_costs_its_draft_passes_and_one_target_pass():
    seconds = table().steps(torch.tensor([10.0]))[0]
    for action, expected in (
        (Action(1, 0, 0), 11),
        (Action(1, 0, 4), 14),
        (Action(4, 3, 2), 15),
        (Action(2, 0, 8), 18),
    ):
        assert float(seconds[TREE_INDEX[action]]) == pytest.approx(expected)
    assert len(seconds) == len(TREES)


def test_eq11_prices_every_pass_by_its_context_alone():
    sloped = LatencyTable(
        [0, 1000], [1, 41], [1, 4], [[10.0, 99.0], [1010.0, 1099.0]], [[0.0, 9.0], [1000.0, 1009.0]]
    )
    seconds = sloped.steps_eq11(torch.tensor([100.0]))[0]
    for k, l1, l2 in ((3, 2, 2), (1, 0, 4), (4, 8, 8), (1, 0, 0)):
        l = 100
        trunk, branches = sum(l + j for j in range(l1)), sum(l + l1 + j * k for j in range(l2))
        assert float(seconds[TREE_INDEX[Action(k, l1, l2)]]) == pytest.approx(
            trunk + branches + 10 + l + l1 + k * l2
        )


def test_deviance_is_least_at_the_mean_of_noisy_labels_where_a_logarithm_is_not():
    labels = torch.tensor([[1.0], [5.0]])
    grid = torch.linspace(0.5, 2.0, 301)
    best = min(grid.tolist(), key=lambda u: float(deviance(torch.full((2, 1), u), labels)))
    assert best == pytest.approx(math.log(3), abs=0.01)
