"""The exact law of what one step emits, and the target's, over tables of distributions."""

from collections.abc import Callable
from itertools import product

import pytest

from nde_talf.decoding.testing import EnumeratedRng, exact_law
from nde_talf.decoding.tree import DraftTree, Verdict
from tests.decoding.tables import Tables, context_of

Law = dict[tuple[int, ...], float]


def emitted_law(
    tables: Tables, step: Callable[[EnumeratedRng], tuple[DraftTree, Verdict]], length: int
) -> Law:
    """Law of the first `length` tokens: one step's output, continued by samples of p."""

    def tokens(rng):
        tree, verdict = step(rng)
        return *context_of(tree, verdict.end), verdict.token

    return tokens_law(tables, tokens, length)


def tokens_law(
    tables: Tables, step: Callable[[EnumeratedRng], tuple[int, ...]], length: int
) -> Law:
    """The same of a step that returns its tokens."""

    def experiment(rng):
        tokens = step(rng)
        while len(tokens) < length:
            tokens = (*tokens, rng.categorical(tables(tokens)[0]))
        return tokens

    law = exact_law(experiment)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    return law


def target_law(tables: Tables, length: int) -> Law:
    law = {}
    for tokens in product(range(tables.vocabulary), repeat=length):
        probability = 1.0
        for i, token in enumerate(tokens):
            probability *= float(tables(tokens[:i])[0][token])
        law[tokens] = probability
    return law


def distance(law: dict, other: dict) -> float:
    return max(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in law.keys() | other.keys())
