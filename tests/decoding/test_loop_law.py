"""The exact law of the decode loop where it could go wrong: peaked drafts, a context or a text that
ends inside a tree, a stream given up half way.

With plain and with static shapes.
"""

from itertools import product

import pytest

from nde_talf import (
    VERIFIERS,
    EagleDrafter,
    LMDrafter,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
    StaticShapes,
)
from nde_talf.decoding.testing import exact_law
from tests.decoding.laws import distance
from tests.decoding.tiny_loop import DRAFT, HEAD, PROMPT, SETTING, SMALL, TARGET, law_of, target_law

CLOSE = 1e-6  # p of the loop is float32, and comes from another pass than the reference's
COLD = SamplingSetting(
    0.03
)  # of the draft: with it, most rows have a token of probability 1, or nearly so
EVERY = [
    (policy, name, static, drafter)
    for policy, make in SMALL.items()
    for name, rule in VERIFIERS.items()
    if make().trees in rule.trees and name != "greedy"
    for static, drafter in product((False, True), ("lm", "head"))
]
BOTH = ("without_replacement", "traversal_without_replacement")
SOME = [
    *(("distinct", name, static, "lm") for name in BOTH for static in (False, True)),
    ("dyspec", BOTH[0], True, "head"),
    ("delayed", "traversal", True, "head"),
    ("delayed", "gbv", False, "head"),
    ("beam", "nss", False, "head"),
]


def plainly(case, draft):
    """Whether the simplest trees are drafted as the setting has it, without static shapes."""
    return case[0] in ("path", "delayed") and not case[2] and draft is None


def decoder_of(policy, name, static, drafter, draft=COLD):
    shapes = StaticShapes(24, rows=8) if static else None
    drafting = LMDrafter(DRAFT, shapes) if drafter == "lm" else EagleDrafter(HEAD, shapes)
    return SpeculativeDecoder(TARGET, drafting, SMALL[policy](), name, draft, static=shapes)


@pytest.mark.parametrize(
    "case,draft",
    [
        *(pytest.param(case, COLD, marks=pytest.mark.slow) for case in SOME),
        *(
            pytest.param(
                case, draft, marks=pytest.mark.long if plainly(case, draft) else pytest.mark.law
            )
            for case in EVERY
            for draft in (COLD, SamplingSetting(0.0), SamplingSetting(2.0, 0.7), None)
        ),
    ],
    ids=str,
)
def test_every_law_of_the_loop_is_the_targets(case, draft):
    assert distance(law_of(decoder_of(*case, draft), 2), target_law(2)) < CLOSE


@pytest.mark.parametrize("case", [SOME[0], SOME[3], SOME[4], SOME[5], SOME[7]], ids=str)
def test_a_context_that_ends_inside_a_tree_keeps_the_law(case):
    decoder = decoder_of(*case)
    decoder.max_context = len(PROMPT) + 1  # one token of room, and the last needs none
    assert distance(law_of(decoder, 10), target_law(2)) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("case", [SOME[1], SOME[4], SOME[6]], ids=str)
def test_an_end_token_inside_a_block_ends_the_text_and_keeps_the_law(case):
    law = law_of(decoder_of(*case), 2, stop=(2,))
    assert any(len(text) == 1 for text in law) and distance(law, target_law(2, stop=2)) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("case", [SOME[2], SOME[5], SOME[7]], ids=str)
def test_a_stream_given_up_half_way_leaves_nothing_behind(case):
    decoder = decoder_of(*case)

    def text(rng):
        given_up = iter(decoder.blocks([2, 2, 1, 0], 50, SETTING, Rng.seeded(0)))
        for _ in range(3):
            next(given_up)
        return tuple(decoder.generate(PROMPT, 2, SETTING, rng).tokens)

    assert distance(exact_law(text), target_law(2)) < CLOSE
