"""float32 at a vocabulary of 150,000: in bounds, no NaN, and the labels of float64 to 1e-4."""

import pytest
import torch

from benchmarks.acceptance import SOLVERS, acceptance, optimal_acceptance
from nde_talf.decoding.actions import action_space
from nde_talf.decoding.names import LABELLED
from nde_talf.decoding.rules.gbv import TiltedRow
from nde_talf.decoding.rules.sums import positive_sums
from nde_talf.decoding.super_tree import super_tree_layout
from tests.decoding.laws import expected_block_efficiency
from tests.decoding.wide_rows import rows

SIZE = (2, 1, 2)
KINDS = pytest.mark.parametrize("kind", ["flat", "peaked", "one-hot", "equal"])


def doubled(*rows):
    return [x.double() / x.double().sum(-1, keepdim=True) for x in rows]


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("name", LABELLED)
def test_labels_in_float32_are_those_of_float64(name, kind):
    layout = super_tree_layout(*SIZE)
    p, q = rows(kind, layout.inner)
    # Some draws coincide, so that nodes have several children; all have draft mass.
    likely = q.topk(2).indices[layout.parents.clamp(min=0)]
    tokens = likely[torch.arange(len(layout)), torch.arange(len(layout)) % 2][None]
    single = expected_block_efficiency(p[None], q[None], tokens, name, layout)[0]
    exact = expected_block_efficiency(*doubled(p[None], q[None]), tokens, name, layout)[0]
    depth = torch.tensor([tree.depth for tree in action_space(*SIZE)[1]])
    assert (single >= 1 - 1e-6).all()
    if name in SOLVERS:
        assert (single <= depth + 1 + 1e-4).all()
    # GBV and the ratio of near-ties: float32 may rank two tokens of equal p / q the other way
    # round.
    assert ((single - exact).abs() / exact).max() < 1e-4


@pytest.mark.slow
@KINDS
def test_rates_are_probabilities_and_no_more_than_the_optimum(kind):
    p, q = rows(kind, 3)
    for k in (1, 4):
        best = optimal_acceptance(p, q, k)
        assert ((best >= 0) & (best <= 1 + 1e-6)).all()
        for name in SOLVERS:
            rate = acceptance(name, p, q, k)
            assert (rate >= -1e-6).all() and (rate <= best + 1e-5).all(), (name, k)
            assert torch.allclose(rate, acceptance(name, *doubled(p, q), k), atol=1e-5), (name, k)


@KINDS
@pytest.mark.parametrize("behind", [0.0, 1e-7, 0.5, 1 - 1e-7])
def test_the_tilted_law_sums_to_one(kind, behind):
    p, q = (x[0] for x in rows(kind, 1))
    row = TiltedRow(p, q, 4, behind)
    law = row.dense()
    assert (law >= 0).all() and float(law.double().sum()) == pytest.approx(1, abs=1e-5)
    for token in q.topk(8).indices.tolist():  # one at a time, as a walk looks at them
        assert row[token] == pytest.approx(float(law[token]), rel=1e-6)


def test_a_weight_near_zero_leaves_no_residual():
    """c / w0 is then no float32 number."""
    p, q = rows("peaked", 1)
    weight = torch.tensor([1e-300], dtype=torch.float64)
    sums = positive_sums(p, q, torch.tensor([0]), weight, torch.ones_like(weight))
    assert 0 <= float(sums) < 1e-290
