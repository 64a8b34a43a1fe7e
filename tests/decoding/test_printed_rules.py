"""Rules and labels held against plain transcriptions of what the papers print."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch

from nde_talf import VERIFIERS, Action, Delayed
from nde_talf.decoding.rules.gbv import TiltedRow
from nde_talf.decoding.rules.tournament import CORE, play_program
from nde_talf.decoding.testing import exact_law
from tests.decoding.laws import distance, truncated_program
from tests.decoding.tables import KINDS, Tables, one_step


def norm(row):
    """`row` itself where it has no mass: then it is not reached."""
    return [x / sum(row) for x in row] if sum(row) > 0 else row


def tree_verification(tables, drafted):
    """Tree verification (TV; Hu & Huang, 2024, whose algorithm is called accelerated speculative
    sampling) of a drafted path: the law of (accepted tokens, token after them).

    `law` is a distribution over what may be emitted, given the draft so far. Each drafted token a
    spreads the mass of the prefix, w, over its children: what w p exceeds q by is emitted in place
    of a draft. That and all earlier outcomes are scaled by how much of the children that w p does
    not cover is a, and a itself gets min(1, w p(a) / q(a)).
    """
    law = {}
    w = 1.0
    for depth, a in enumerate(drafted):
        p, q = (row.tolist() for row in tables(drafted[:depth]))
        uncovered = norm([max(y - w * x, 0.0) for x, y in zip(p, q, strict=True)])
        scale = uncovered[a] / q[a]
        law |= {(depth, t): max(w * x - y, 0.0) for t, (x, y) in enumerate(zip(p, q, strict=True))}
        law = {outcome: scale * mass for outcome, mass in law.items()}
        w = min(1.0, w * p[a] / q[a])
    return law | {(len(drafted), t): w * x for t, x in enumerate(tables(drafted)[0].tolist())}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "sparse", "one-hot p", "one-hot q"])
@pytest.mark.parametrize("name", ["tv", "bv"])
def test_tree_verification_and_block_verification_have_one_law_on_every_path(name, kind):
    for seed in range(3):
        tables = Tables(kind, seed=seed)

        def step(rng, tables=tables):
            tree, verdict = one_step(tables, Delayed(Action(1, 0, 3)), VERIFIERS[name], rng)
            return (*tree.tokens[1:],), (tree.depth[verdict.end], verdict.token)

        law, expected = exact_law(step), {}
        for drafted in product(range(3), repeat=3):
            chance = np.prod(
                [float(tables(drafted[:depth])[1][t]) for depth, t in enumerate(drafted)]
            )
            if chance > 0:
                expected |= {
                    (drafted, outcome): chance * x
                    for outcome, x in tree_verification(tables, drafted).items()
                }
        assert sum(expected.values()) == pytest.approx(1) and distance(law, expected) < 1e-12


@pytest.mark.parametrize("kind", ["random", "close", "sparse"])
def test_every_stage_of_khisti_lp_covers_as_much_as_the_truncated_program(kind):
    for seed in range(5):
        p, q = Tables(kind, seed=seed, vocabulary=8)(())
        _, laws = play_program(p, q, 4)
        for before, after in pairwise(laws):
            best = truncated_program(p.tolist(), before.tolist(), q.tolist(), CORE)
            assert float(torch.minimum(p, after).sum()) == pytest.approx(best, abs=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [2, 3])
def test_gbv_with_exact_ranks_tilts_by_the_order_of_p_over_q(kind, k):
    """Eq. 25 and 29, GBV paper: q~(t) = G^k - F^k, with the mass of q ranked up to t, and strictly
    below it.
    """
    p, q = Tables(kind, seed=5, vocabulary=6)(())
    order = sorted(
        range(6), key=lambda t: (float((p[t] / q[t]).float()) if q[t] > 0 else np.inf, t)
    )
    tilted, below = TiltedRow(p, q, k, 0.0, exact=True), 0.0
    for t in order:
        upto = below + float(q[t])
        assert float(tilted.dense()[t]) == pytest.approx(upto**k - below**k, abs=1e-12)
        if q[t] > 0:
            assert tilted[t] == pytest.approx(upto**k - below**k, abs=1e-12)
        below = upto


@pytest.mark.parametrize("exact,law", [(True, [0.75, 0.25]), (False, [0.25, 0.75])])
def test_ranks_that_the_upper_half_of_a_float32_cannot_tell_apart_are_told_apart(exact, law):
    """P / q is largest at token 0, by a tenth of a percent: the exact order prefers it, the coarse
    one the larger id.
    """
    q = torch.tensor([0.5, 0.5], dtype=torch.float64)
    row = TiltedRow(q * torch.tensor([1.005, 1.004], dtype=torch.float64), q, 2, 0.0, exact)
    assert row.dense().tolist() == pytest.approx(law)
    assert [row[0], row[1]] == pytest.approx(law)
    assert ((row.place(0), 0) > (row.place(1), 1)) == exact
