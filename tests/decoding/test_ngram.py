"""Drafting from the text itself: what is looked up, which trees come of it, and the exact law of
the loop with it.
"""

import pytest
import torch

from nde_talf import (
    Action,
    Beam,
    DecodingState,
    Delayed,
    LMDrafter,
    NgramConfig,
    NgramDrafter,
    NgramTree,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
)
from nde_talf.decoding.drafters.ngram import Match, NgramIndex
from nde_talf.decoding.sampling.sampling_setting import RAW
from tests.decoding.laws import distance
from tests.decoding.pairs import tiny_pair
from tests.decoding.tiny_loop import DRAFT, PROMPT, TARGET, VOCABULARY, law_of, target_law
from tests.refusal import refusal

CLOSE = 1e-6  # p of the loop is float32, and comes from another pass than the reference's
REPEATS = [1, 3, 2, 3, 2, 0, 1, 3, 2]  # ends with what follows 1 at the start


def begun(text, config=NgramConfig(), setting=RAW):
    drafter = NgramDrafter(VOCABULARY, config)
    drafter.start(text[:-1], text[-1], torch.zeros(len(text) - 1, 4), setting)
    return drafter


def tree_of(drafter, config, room=100):
    return NgramTree(config).draft(
        DecodingState(drafter.index.text[-1], 1, room, RAW, None, None), drafter, None
    )


def paths(tree):
    return {
        tuple(tree.tokens[node] for node in tree.path(leaf))
        for leaf in range(1, len(tree))
        if not tree.children[leaf]
    }


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (2, 3), (5, 5)])
def test_an_index_that_grows_finds_what_a_search_of_the_text_finds(sizes):
    config = NgramConfig(*sizes, matches=10_000)
    index, generator, text = NgramIndex(config), torch.Generator().manual_seed(0), list[int]()
    for _ in range(80):
        new = torch.randint(
            3, (int(torch.randint(1, 4, (1,), generator=generator)),), generator=generator
        ).tolist()
        index.extend(new)
        text += new
        for path in ([], new[:2]):
            ending = [*text, *path]
            searched = [
                Match(size, after)
                for size in range(sizes[1], sizes[0] - 1, -1)
                if size <= len(ending)
                and (
                    after := [
                        at
                        for at in range(len(text) - 1, size - 1, -1)
                        if text[at - size : at] == ending[-size:]
                    ]
                )
            ]
            assert index.match(path) == (searched or [Match(0, [])])[0]


def test_several_matches_are_one_tree_within_its_budget():
    config = NgramConfig(max_size=2, nodes=5, depth=3, threshold=0.0)
    tree = tree_of(begun(REPEATS, config), config)
    assert paths(tree) == {(0, 1, 3), (3, 2)}  # after 3 2: 3 once, 0 once
    assert len(tree) == 6 and tree.q == [None] * 6
    for room, size in ((1, 3), (0, 1)):
        assert len(tree_of(begun(REPEATS, config), config, room)) == size
    assert len(tree_of(begun([0, 1, 2, 3]), NgramConfig())) == 1  # nothing matches
    unlikely = NgramConfig(max_size=2, threshold=0.4)
    assert (
        len(tree_of(begun(REPEATS, unlikely), unlikely)) == 1
    )  # two matches, each with half of 2 / 3


def test_a_period_goes_on_beyond_the_end_of_the_text():
    config = NgramConfig(threshold=0.0, nodes=7, depth=7)
    assert paths(tree_of(begun([0, 1, 2, 0, 1, 2], config), config)) == {(0, 1, 2, 0, 1, 2, 0)}


def test_counts_are_by_size_of_the_match():
    target, _ = tiny_pair(VOCABULARY, scale=30.0)
    config = NgramConfig(threshold=0.0, nodes=4)
    decoder = SpeculativeDecoder(
        target, NgramDrafter(VOCABULARY, config), NgramTree(config), "greedy"
    )
    generation = decoder.generate(PROMPT, 60, SamplingSetting(0.0), Rng.seeded(0))
    counts = decoder.drafting.tested
    assert (
        sum(each.accepted for each in counts.values())
        == sum(step.tau for step in generation.steps)
        > 0
    )
    assert all(each.accepted <= each.nodes for each in counts.values())
    size, tested = max(counts.items())
    assert decoder.drafting.rate(size) == (tested.accepted + size) / (tested.nodes + size + 1)


PLAIN = NgramConfig(threshold=0.0, nodes=3, depth=2, max_size=2)
LONGER = NgramConfig(
    threshold=0.0, nodes=3, depth=2, min_size=2
)  # so that some roots have no match


@pytest.mark.law
@pytest.mark.parametrize("config", [PLAIN, LONGER, NgramConfig(matches=1)])
def test_every_law_of_drafts_from_the_text_is_the_targets(config):
    ngram = NgramDrafter(VOCABULARY, config)
    decoder = SpeculativeDecoder(TARGET, ngram, NgramTree(config), "nss")
    assert distance(law_of(decoder, 3), target_law(3)) < CLOSE


def test_a_policy_with_another_drafter_is_refused():
    ngram, draft = NgramDrafter(VOCABULARY), LMDrafter(DRAFT)
    with refusal("config=8: it should be"):
        NgramTree(8)
    with refusal("give the decoder an NgramDrafter"):
        SpeculativeDecoder(TARGET, draft, NgramTree(), "nss")
    with refusal("verifier=specinfer takes"):
        SpeculativeDecoder(TARGET, ngram, NgramTree(), "specinfer")
    for other, rule in ((Delayed(Action(2, 0, 1)), "specinfer"), (Beam(2, 2, 3), "nss")):
        with refusal("Take the policy NgramTree"):
            SpeculativeDecoder(TARGET, ngram, other, rule).generate(
                PROMPT, 4, SamplingSetting(1.0), Rng.seeded(0)
            )
