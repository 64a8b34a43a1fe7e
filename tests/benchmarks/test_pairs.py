"""The ceiling of a pair is what choosing wins, and not the noise of its labels."""

import json

import pytest
import torch

from benchmarks import pairs, timing
from nde_talf.data.text.pair import Pair
from nde_talf.data.text.prompts import Prompt
from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.errors import UserError
from nde_talf.pipelines.manifest import write_manifest
from tests.decoding.pairs import tiny_pair

R, S, V = 200, 8, 40


@pytest.fixture
def seconds():
    return torch.full((R, 2), 0.01)


def test_the_ceiling_of_two_kinds_of_roots(seconds):
    """Half of the roots get 4 tokens from tree 0 and 1 from tree 1, the others 1 and 3.

    Over a text tree 0 takes 1 / mean(1/4, 1) = 1.6 tokens a step, and choosing 1 / mean(1/4, 1/3) =
    24/7.
    """
    labels = torch.tensor([[4.0, 1.0], [1.0, 3.0]]).repeat(R // 2, 1)[:, None].expand(-1, S, -1)
    found = pairs.ceiling(labels, seconds, torch.arange(R), ["easy", "hard"] * (R // 2))
    assert found["static"] == 0 and found["block_efficiency"] == pytest.approx(1.6)
    assert found["ceiling"][0] == pytest.approx(15 / 7) == found["by_domain"][0]
    assert found["ceiling"][1] < 15 / 7 < found["ceiling"][2]


def test_noise_is_no_ceiling(seconds):
    """Both trees get 3 tokens at every root; the labels are noisy.

    Choosing on the labels that value would win 18 %.
    """
    labels = 3 + 2 * torch.randn(R, S, 2, generator=torch.Generator().manual_seed(0))
    same = labels.mean(1).max(-1).values.sum() / labels.mean(1)[:, 0].sum()
    value, low, high = pairs.ceiling(labels, seconds, torch.arange(R), ["one"] * R)["ceiling"]
    assert same > 1.1 and low < 1 < high + 0.02 and value < 1.03


@pytest.mark.slow
def test_the_tables_of_a_random_pair(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "RESULTS", tmp_path / "results")
    target, draft = tiny_pair(V, hidden=32, layers=2)
    for role, model in (("target", target), ("draft", draft)):
        model.module.save_pretrained(tmp_path / "run" / "pair" / role)
    prompts = [
        Prompt(str(i), kind, "", [(7 * i + j) % V for j in range(6)])
        for i, kind in enumerate(["code", "tables"] * 4)
    ]
    rows = torch.zeros(2, 8, dtype=torch.long)
    Pair(tmp_path / "run" / "pair").write("target", "draft", prompts, 2, rows, rows)
    one = {"target_nats": 2.0, "draft_nats": 3.0, "greedy_agreement": 0.5}
    wanted = {"settings": {}, "inputs": {}}
    write_manifest(tmp_path / "run" / "pair", wanted, one | {"domains": {"code": one}}, 1.0)
    options = [
        "--prompts",
        "4",
        "--samples",
        "2",
        "--new-tokens",
        "20",
        "--settings",
        "t1.0",
        "--tables",
        "a100_70b_8b",
    ]
    pairs.main(["--run", str(tmp_path / "run"), *options])
    figures, ceilings = (
        json.loads((tmp_path / "results" / f"{name}.json").read_text())
        for name in ("pairs", "pairs_ceiling")
    )
    assert [row[2] for row in figures["rows"]] == ["all", "code", "tables"]
    assert all(
        0 < float(overlap) < 1 for row in figures["rows"] for overlap in row[-pairs.DEPTHS :]
    )
    assert [row[2] for row in ceilings["rows"]] == ["traversal", "specinfer"]
    assert all(row[4] in map(str, map(tuple, TREES)) for row in ceilings["rows"])


def test_an_odd_number_of_super_trees_has_no_halves():
    with pytest.raises(UserError, match="--samples 3"):
        pairs.main(["--samples", "3"])
