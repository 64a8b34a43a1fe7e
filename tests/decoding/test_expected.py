"""Labels: the super-tree's estimates are unbiased for the enumerated block efficiency of every
action.
"""

from functools import cache

import pytest
import torch

from nde_talf import VERIFIERS, Action, Delayed
from nde_talf.decoding.actions import ACTIONS, TREES, action_space, canonical
from nde_talf.decoding.names import LABELLED
from nde_talf.decoding.super_tree import super_tree_layout
from nde_talf.decoding.testing import expectation
from tests.decoding.laws import expected_block_efficiency
from tests.decoding.tables import KINDS, Tables, one_step, tau


def draw_super_tree(tables, layout, rng):
    """Tokens [1, N], p and q [1, N_inner, V] of one super-tree drawn from q."""
    contexts, tokens, p, q = [()], [0], [], []
    for row in range(len(layout)):
        if row:
            parent = contexts[layout.parents[row]]
            tokens.append(rng.categorical(tables(parent)[1]))
            contexts.append((*parent, tokens[-1]))
        if row < layout.inner:
            for rows, distribution in zip((p, q), tables(contexts[row]), strict=True):
                rows.append(distribution)
    return torch.tensor([tokens]), torch.stack(p)[None], torch.stack(q)[None]


@cache
def every_super_tree(kind, size, seed, vocabulary):
    """Tokens [n, N], p and q [n, N_inner, V] of all that can be drawn, and their probabilities [n]."""
    tables, layout, drawn = Tables(kind, seed, vocabulary), super_tree_layout(*size), []

    def draw(rng):
        drawn.append(
            (
                *draw_super_tree(tables, layout, rng),
                torch.tensor([rng.probability], dtype=torch.float64),
            )
        )
        return 1.0

    assert expectation(draw) == pytest.approx(1)
    return tuple(torch.cat(parts) for parts in zip(*drawn, strict=True))


@cache
def block_efficiency(kind, tree, name, seed, vocabulary):
    """Of one step, enumerated."""
    tables = Tables(kind, seed, vocabulary)
    return expectation(lambda rng: 1 + tau(*one_step(tables, Delayed(tree), VERIFIERS[name], rng)))


@pytest.mark.slow
@pytest.mark.parametrize("name", LABELLED)
@pytest.mark.parametrize(
    "kind,size,seed,vocabulary",
    [
        *((kind, size, 5, 2) for kind in KINDS for size in [(2, 1, 1), (1, 2, 1), (3, 0, 2)]),
        # Unlikely nodes with two children: there a bottom-up rule arrives with a weight below 1,
        # rejects a child, and still has a residual.
        *(("random", (2, 0, 2), *tables) for tables in [(10, 2), (0, 3), (1, 3)]),
    ],
    ids=str,
)
def test_super_tree_estimates_are_unbiased(name, kind, size, seed, vocabulary):
    tokens, p, q, chances = every_super_tree(kind, size, seed, vocabulary)
    values = expected_block_efficiency(p, q, tokens, name, super_tree_layout(*size))
    for tree, value in zip(action_space(*size)[1], (chances @ values).tolist(), strict=True):
        exact = block_efficiency(kind, tree, name, seed, vocabulary)
        assert value == pytest.approx(exact, abs=1e-8), tree


def test_default_columns_are_the_233_trees():
    assert (len(ACTIONS), len(TREES)) == (324, 233)
    assert canonical(Action(4, 5, 0)) == canonical(Action(1, 2, 3)) == Action(1, 0, 5)
