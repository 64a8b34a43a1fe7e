"""Throughput, the objective's gradient, static choices and the latency table."""

import pytest
import torch

from decoding.actions import TREE_INDEX, TREES, Action
from decoding.errors import UserError
from selector.latency import LatencyTable, bilinear
from selector.objective import best_static, policy_throughput, selector_loss, split_half_choice


def table(draft: float = 1.0, target: float = 10.0, node: float = 0.0) -> LatencyTable:
    return LatencyTable([1, 100], [1, 41], [1, 4], [[target, target + 40 * node]] * 2, [[draft, draft]] * 2, {})


def test_throughput_is_a_ratio_of_expectations():
    policy, efficiency, seconds = torch.tensor([[0.5, 0.5]]), torch.tensor([[2.0, 4.0]]), torch.tensor([[1.0, 3.0]])
    assert float(policy_throughput(policy, efficiency, seconds)) == pytest.approx(1.5)


def test_loss_of_the_baseline_is_zero_and_a_better_action_lowers_it():
    efficiency, seconds = torch.tensor([[2.0, 4.0, 1.0]]), torch.ones(1, 3)
    base = torch.tensor([0])

    def loss(action: int) -> float:
        logits = torch.full((1, 3), -50.0)
        logits[0, action] = 50.0
        return float(selector_loss(logits, efficiency, seconds, base, 1.0, 1.0))

    assert loss(0) == pytest.approx(0, abs=1e-6)
    assert loss(1) == pytest.approx(-torch.tensor(2.0).log().item(), abs=1e-6)
    assert loss(2) == pytest.approx(torch.tensor(2.0).log().item() + 0.25, abs=1e-6)


def test_tail_counts_the_worst_fraction_only():
    efficiency = torch.ones(10, 2)
    efficiency[0, 1] = 0.5
    logits = torch.tensor([[-50.0, 50.0]]).expand(10, -1)
    base = torch.zeros(10, dtype=torch.long)
    plain, tailed = (float(selector_loss(logits, efficiency, torch.ones(10, 2), base, w, 0.1)) for w in (0.0, 1.0))
    assert tailed - plain == pytest.approx(0.25)


def test_choosing_root_by_root_on_noise_wins_nothing():
    generator = torch.Generator().manual_seed(0)
    samples = 3 + torch.randn(4000, 4, 5, generator=generator)
    tokens, seconds = split_half_choice(samples, torch.ones(4000, 5))
    assert float(tokens.sum() / seconds.sum()) == pytest.approx(3.0, abs=0.05)
    chosen_and_scored_on_the_same = samples.mean(1).max(-1).values.mean()
    assert float(chosen_and_scored_on_the_same) > 3.4


def test_best_static_keeps_to_what_is_allowed():
    efficiency, seconds = torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1, 3)
    assert best_static(efficiency, seconds) == 2
    assert best_static(efficiency, seconds, torch.tensor([True, True, False])) == 1


def test_a_step_costs_its_draft_passes_and_one_target_pass():
    seconds = table().actions(torch.tensor([10.0]))[0]
    for action, expected in (
        (Action(1, 0, 0), 11),
        (Action(1, 0, 4), 14),
        (Action(4, 3, 2), 15),
        (Action(2, 0, 8), 18),
    ):
        assert float(seconds[TREE_INDEX[action]]) == pytest.approx(expected)
    assert len(seconds) == len(TREES)


def test_wider_trees_cost_more_where_nodes_do():
    seconds = table(node=1.0).actions(torch.tensor([10.0]))[0]
    by_k = [float(seconds[TREE_INDEX[Action(k, 0, 2)]]) for k in (1, 2, 3, 4)]
    assert by_k == sorted(by_k) and by_k[3] - by_k[0] == pytest.approx(6.0)  # 2 nodes for each branch


def test_bilinear_is_exact_on_planes_and_keeps_to_the_grid():
    x, y = torch.tensor([2.0, 2.5, 5.0]), torch.tensor([3.0, 1.0, 4.0])
    values = [[1 + 2 * r + 3 * c for c in (1, 4)] for r in (2, 5)]
    assert torch.allclose(bilinear([2, 5], [1, 4], values, x, y).float(), 1 + 2 * x + 3 * y)
    outside = bilinear([2, 5], [1, 4], values, torch.tensor([0.0, 9.0]), torch.tensor([0.0, 9.0]))
    assert outside.tolist() == [values[0][0], values[1][1]]


def test_latency_table_round_trip_and_a_foreign_file(tmp_path):
    table().save(tmp_path / "latency.json")
    assert LatencyTable.load(tmp_path / "latency.json") == table()
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UserError, match="latency table"):
        LatencyTable.load(tmp_path / "other.json")
