"""Acceptance rates and branching probabilities against enumeration, and the orders and reductions
between the methods.
"""

from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from benchmarks.acceptance import SOLVERS, acceptance, branching, optimal_acceptance
from nde_talf import VERIFIERS, Action, Delayed, DraftTree
from nde_talf.decoding.rules.gbv import TiltedRow
from nde_talf.decoding.rules.khisti import Khisti, KhistiProgram
from nde_talf.decoding.rules.ranking import advantage, order_of, rank_key
from nde_talf.decoding.rules.spectr import k_seqs
from nde_talf.decoding.rules.tournament import play, play_program
from nde_talf.decoding.testing import exact_law, expectation
from tests.decoding.laws import distance, truncated_program
from tests.decoding.tables import KINDS, Tables, one_step, tau

# No draft mass below 1e-9: behind so rare a draw the residual may be rounding, where the walk falls
# back on p.
weights = st.lists(
    st.sampled_from([0.0, 1e-9, 0.01, 0.2, 0.5, 1.0]) | st.floats(1e-6, 1), min_size=4, max_size=4
)


ONE = torch.tensor([[0.0, 0.0, 1.0]]).double()
ALMOST_ONE = torch.tensor([[0.0, 1e-7, 1 - 1e-7]]).double()


@st.composite
def rows(draw, vocabulary=3):
    """p, q [1, V] with zeros, near-ties and everything between."""
    made = []
    for _ in range(2):
        row = torch.tensor(draw(weights)[:vocabulary], dtype=torch.float64)
        if float(row.sum()) < 1e-3:
            row = torch.eye(vocabulary, dtype=torch.float64)[draw(st.integers(0, vocabulary - 1))]
        made.append((row / row.sum())[None])
    return made


def depth_one(p, q, drafted):
    tree = DraftTree.rooted(0, q)
    for token in drafted:
        tree.add(0, token)
    tree.p = [p] * len(tree)
    return tree


def every_draw(q, k):
    """(draws, probability) for all k i.i.d. draws from q."""
    for drafted in product(range(len(q)), repeat=k):
        if (probability := float(q[list(drafted)].prod())) > 0:
            yield list(drafted), probability


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(rows(), st.integers(1, 3), st.sampled_from(SOLVERS))
@example([ONE, ALMOST_ONE], 3, "specinfer")
def test_branching_is_the_law_of_the_walk_and_alpha_its_mean(pair, k, name):
    p, q = pair
    total = 0.0
    for drafted, probability in every_draw(q[0], k):
        tree = depth_one(p[0], q[0], drafted)
        verdicts = exact_law(
            lambda rng, tree=tree: tuple(tree.path(VERIFIERS[name](tree, rng).end))
        )
        parts = branching(name, p, q, torch.tensor([drafted]))[0]
        for token in set(drafted):
            by_formula = sum(
                float(part) for part, drawn in zip(parts, drafted, strict=True) if drawn == token
            )
            by_walk = sum(
                chance
                for path, chance in verdicts.items()
                if path and tree.tokens[path[0]] == token
            )
            rare = probability < 1e-12  # what is left of p behind such draws may be rounding
            assert rare or by_formula == pytest.approx(by_walk, abs=1e-7)
        total += probability * float(parts.sum())
    alpha = float(acceptance(name, p, q, k))
    if name == "khisti":
        assert alpha <= total + 1e-9
    else:
        assert alpha == pytest.approx(total, abs=1e-7)
    assert total <= float(optimal_acceptance(p, q, k)) + 1e-7


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(rows(4), st.integers(1, 5))
def test_orders_of_acceptance_rates(pair, k):
    p, q = pair
    rate = {name: float(acceptance(name, p, q, k)) for name in SOLVERS}
    best, single = float(optimal_acceptance(p, q, k)), float(acceptance("naivetree", p, q, 1))
    assert best + 1e-7 >= rate["spectr"] >= rate["specinfer"] - 1e-7
    assert rate["specinfer"] + 1e-7 >= rate["naivetree"] >= max(rate["nss"], single) - 1e-7
    assert rate["spectr"] >= (1 - 1 / 2.718281828) * best - 1e-7
    if k == 1:
        assert rate["spectr"] == rate["specinfer"] == pytest.approx(rate["khisti"], abs=1e-12)


def test_spectr_has_a_threshold_where_p_and_q_hardly_meet():
    q = torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    for small in (1.3333e-9, 1e-12, 1e-15, 1e-17, 0.0):
        p = torch.tensor([[0.0, small, 1.0 - small, 0.0]], dtype=torch.float64)
        for k in range(1, 6):
            assert float(acceptance("spectr", p, q, k)) == pytest.approx(
                small, rel=1e-6, abs=1e-15
            )  # of 1 - Z


@pytest.mark.parametrize("kind", KINDS)
def test_spectr_searches_many_rows_at_once_as_one_by_one(kind):
    """As labels are made on a GPU, and on a CPU."""
    tables = Tables(kind, seed=4, vocabulary=6)
    p, q = (torch.stack(rows) for rows in zip(*(tables((n,)) for n in range(20)), strict=True))
    one_by_one = VERIFIERS["spectr"].labels.table(p, q, torch.full((20,), 4))
    for k in range(1, 5):
        for many, one in zip(k_seqs(p, q, k), one_by_one, strict=True):
            torch.testing.assert_close(many, one[:, k], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(rows(4))
def test_optimal_acceptance_is_the_linear_programs_and_khistis_at_k_2(pair):
    p, q = pair
    best = truncated_program(*(row[0].tolist() for row in (p, q, q)), 4)  # of all pairs
    assert float(optimal_acceptance(p, q, 2)) == pytest.approx(best, abs=1e-7)
    _, laws = play_program(p[0], q[0], 2)  # four tokens: the program has them all
    assert float(torch.minimum(p[0], laws[-1]).sum()) == pytest.approx(best, abs=1e-7)


TOURNAMENTS = (Khisti(), KhistiProgram())


@pytest.mark.parametrize("rule", TOURNAMENTS, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [4, 6])
def test_law_of_a_tournaments_winner(vocabulary, kind, rule):
    p, q = Tables(kind, seed=2, vocabulary=vocabulary)(())
    draws = 3 if vocabulary == 4 else 2
    stages, laws = rule.play(p, q, draws)

    def winner(rng):
        token = rng.categorical(q)
        for stage in stages:
            rival = rng.categorical(q)
            token = token if token == rival or rng.bernoulli(stage.keeps(token, rival)) else rival
        return token

    assert distance(exact_law(winner), dict(enumerate(laws[-1].tolist()))) < 1e-12


def test_the_guard_never_covers_less_than_a_single_draft():
    """p and q are close: the tournament alone covers less than one draft does, ours does not."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(40, generator=generator, dtype=torch.float64)
    q = p * (1 + 0.1 * torch.rand(40, generator=generator, dtype=torch.float64))
    p, q = p / p.sum(), q / q.sum()
    single, guarded, program = (
        float(torch.minimum(p, law).sum())
        for law in (q, play(p, q, 2)[1][-1], play_program(p, q, 2)[1][-1])
    )
    assert guarded >= single - 1e-12 and program < single - 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_gbv_selects_with_its_tilted_law(kind):
    """Depth 1: the selected branch is distributed as q~, and E[tau] = sum min(p, G^K - F^K)."""
    tables, k = Tables(kind, seed=4), 3
    p, q = tables(())
    tilted = TiltedRow(p, q, k, 0.0)
    order = order_of(rank_key(advantage(p, q))).tolist()
    law = torch.zeros_like(q)
    for drafted, chance in every_draw(q, k):
        law[max(drafted, key=order.index)] += chance
    assert torch.allclose(tilted.dense(), law, atol=1e-12)
    assert all(tilted[t] == pytest.approx(float(law[t]), abs=1e-12) for t in range(3) if q[t] > 0)
    accepted = expectation(
        lambda rng: tau(*one_step(tables, Delayed(Action(k, 0, 1)), VERIFIERS["gbv"], rng))
    )
    assert accepted == pytest.approx(float(torch.minimum(p, law).sum()), abs=1e-9)
