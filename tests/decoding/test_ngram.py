"""Drafting from the text itself: what is looked up, which trees come of it, and the exact law of
the loop with it.
"""

from itertools import pairwise

import pytest
import torch

from nde_talf import (
    VERIFIERS,
    Action,
    Autoregressive,
    Beam,
    DecodingState,
    Delayed,
    DySpec,
    EagleDrafter,
    LMDrafter,
    Mixed,
    MixedDrafter,
    NgramConfig,
    NgramDrafter,
    NgramTree,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
    StaticShapes,
    UserError,
)
from nde_talf.decoding.ngram import Match, NgramIndex, statistics
from nde_talf.decoding.setting import RAW
from tests.decoding.laws import distance
from tests.decoding.pairs import tiny_pair
from tests.decoding.tiny_loop import DRAFT, HEAD, PROMPT, TARGET, VOCABULARY, law_of, target_law
from tests.draft_training.heads import random_head

CLOSE = 1e-6  # p of the loop is float32, and comes from another pass than the reference's
REPEATS = [1, 3, 2, 3, 2, 0, 1, 3, 2]  # ends with what follows 1 at the start


def begun(
    text: list[int], config: NgramConfig = NgramConfig(), setting: SamplingSetting = RAW
) -> NgramDrafter:
    drafter = NgramDrafter(VOCABULARY, config)
    drafter.start(text[:-1], text[-1], torch.zeros(len(text) - 1, 4), setting)
    return drafter


def tree_of(drafter: NgramDrafter, config: NgramConfig, room: int = 100):
    return NgramTree(config).draft(
        DecodingState(drafter.index.text[-1], 1, room, RAW, None, None), drafter, None
    )


def paths(tree) -> set[tuple[int, ...]]:
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
    assert paths(tree) == {(0, 1, 3), (3, 2)} or paths(tree) == {
        (0, 1),
        (3, 2, 0),
    }  # after 3 2: 3 once, 0 once
    assert len(tree) == 6 and tree.q == [None] * 6
    assert (
        len(tree_of(begun(REPEATS, config), config, room=1)) == 3
        and len(tree_of(begun(REPEATS, config), config, room=0)) == 1
    )
    assert len(tree_of(begun([0, 1, 2, 3]), NgramConfig())) == 1  # nothing matches
    unlikely = NgramConfig(max_size=2, threshold=0.4)
    assert (
        len(tree_of(begun(REPEATS, unlikely), unlikely)) == 1
    )  # two matches, each with half of 2 / 3


def test_a_period_goes_on_beyond_the_end_of_the_text():
    config = NgramConfig(threshold=0.0, nodes=7, depth=7)
    assert paths(tree_of(begun([0, 1, 2, 0, 1, 2], config), config)) == {(0, 1, 2, 0, 1, 2, 0)}


def test_statistics_count_by_size_of_the_match_what_was_tested():
    target, _ = tiny_pair(VOCABULARY, scale=30.0)
    config = NgramConfig(threshold=0.0, nodes=4)
    decoder = SpeculativeDecoder(
        target, NgramDrafter(VOCABULARY, config), NgramTree(config), "greedy"
    )
    generation = decoder.generate(PROMPT, 60, SamplingSetting(0.0), Rng.seeded(0))
    counts = statistics(decoder.drafting)
    assert sum(each.drafted for each in counts.values()) == sum(
        step.nodes - 1 for step in generation.steps
    )
    assert (
        sum(each.accepted for each in counts.values())
        == sum(step.tau for step in generation.steps)
        > 0
    )
    assert (
        all(each.accepted <= each.nodes <= each.drafted for each in counts.values())
        and statistics(None) == {}
    )
    size, tested = max(counts.items())
    assert decoder.drafting.rate(size) == (tested.accepted + size) / (tested.nodes + size + 1)


PLAIN = NgramConfig(threshold=0.0, nodes=3, depth=2, max_size=2)
LONGER = NgramConfig(
    threshold=0.0, nodes=3, depth=2, min_size=2
)  # so that some roots have no match


def mixed(
    drafter: str, rule: str, config: NgramConfig, static: StaticShapes | None = None
) -> SpeculativeDecoder:
    beside = LMDrafter(DRAFT, static) if drafter == "lm" else EagleDrafter(HEAD, static)
    action = Action(2, 0, 1) if rule in ("traversal", "specinfer") else Action(1, 0, 2)
    policy = Mixed(Delayed(action), VERIFIERS[rule], NgramTree(config))
    return SpeculativeDecoder(
        TARGET,
        MixedDrafter(NgramDrafter(VOCABULARY, config), beside),
        policy,
        policy.verifier,
        static=static,
    )


LAWS = [
    (rule, drafter)
    for rule in ("traversal", "specinfer", "bv", "naive", "gbv", "nss")
    for drafter in ("lm", "head")
]


@pytest.mark.law
@pytest.mark.parametrize(
    "config", [PLAIN, LONGER, NgramConfig(matches=1, min_rate=0.6)], ids=["any", "two", "latest"]
)
@pytest.mark.parametrize("rule,drafter", [("nss", None), *LAWS])
def test_every_law_of_drafts_from_the_text_is_the_targets(rule, drafter, config):
    ngram = NgramDrafter(VOCABULARY, config)
    alone = SpeculativeDecoder(TARGET, ngram, NgramTree(config), "nss")
    decoder = mixed(drafter, rule, config) if drafter else alone
    assert distance(law_of(decoder, 3), target_law(3)) < CLOSE


def features(target, text: list[int]) -> torch.Tensor:
    return target.hidden(torch.tensor([text]), torch.arange(len(text))[None], None, None)[0]


@pytest.mark.parametrize("drafter", ["lm", "head"])
def test_a_draft_that_catches_up_is_where_it_would_be_had_it_seen_every_step(drafter):
    """At every root of the other draft's own, its q is that of a draft that has just read all of
    the text.
    """
    target, draft = tiny_pair(VOCABULARY, scale=3.0)
    head, setting, seen = random_head(target), SamplingSetting(1.0), []

    def other():
        return LMDrafter(draft) if drafter == "lm" else EagleDrafter(head)

    class Watched(Mixed):
        def draft(self, state, drafter, rng):
            text = drafter.ngram.index.text
            if not drafter.matched and len(text) > 1:
                fresh = other()
                fresh.start(text[:-1], text[-1], features(target, text[:-1]), setting)
                seen.append(
                    (
                        (drafter.root.q - fresh.root.q).abs().max(),
                        (drafter.previous.q - fresh.previous.q).abs().max(),
                    )
                )
            else:
                seen.append(None)
            return super().draft(state, drafter, rng)

    policy = Watched(
        Delayed(Action(2, 1, 2)), VERIFIERS["traversal"], NgramTree(NgramConfig(min_size=3))
    )
    ngram = NgramDrafter(VOCABULARY, NgramConfig(min_size=3))
    decoder = SpeculativeDecoder(target, MixedDrafter(ngram, other()), policy, policy.verifier)
    decoder.generate(PROMPT, 150, setting, Rng.seeded(1))
    late = [errors for before, errors in pairwise(seen) if before is None and errors]
    assert len(late) > 3 and all(max(errors) < 1e-5 for errors in seen if errors)


@pytest.mark.parametrize("static", ["", "lm", "head"])
def test_a_draft_that_never_gets_its_turn_catches_up_before_it_is_far_behind(static):
    """n-grams match at nearly every root of a text that repeats itself; passes of static shapes
    hold 16 rows.
    """
    target, draft = tiny_pair(VOCABULARY, scale=30.0)
    shapes = StaticShapes(400, rows=16) if static else None
    policy = Mixed(Delayed(Action(1, 0, 2)), VERIFIERS["bv"])
    head = static == "head"
    beside = EagleDrafter(random_head(target), shapes) if head else LMDrafter(draft, shapes)
    drafter = MixedDrafter(NgramDrafter(VOCABULARY), beside)
    decoder = SpeculativeDecoder(target, drafter, policy, policy.verifier, static=shapes)
    plain = SpeculativeDecoder(target, None, Autoregressive(), "nss")
    texts = [
        each.generate(PROMPT, 300, SamplingSetting(0.0), Rng.seeded(0)).tokens
        for each in (decoder, plain)
    ]
    assert texts[0] == texts[1] and decoder.drafting.draft.session.length > 200


def test_a_policy_with_another_drafter_is_refused():
    ngram, draft = NgramDrafter(VOCABULARY), LMDrafter(DRAFT)
    with pytest.raises(UserError, match="give the decoder an NgramDrafter"):
        SpeculativeDecoder(TARGET, draft, NgramTree(), "nss")
    policy = Mixed(Delayed(Action(1, 0, 2)), VERIFIERS["bv"])
    for drafter in (ngram, draft, None):
        with pytest.raises(UserError, match="give the decoder a MixedDrafter"):
            SpeculativeDecoder(TARGET, drafter, policy, policy.verifier)
    with pytest.raises(UserError, match="they need the same"):
        MixedDrafter(NgramDrafter(VOCABULARY + 1), draft)
    with pytest.raises(UserError, match="DySpec drafts trees of kind 'without_replacement'"):
        Mixed(DySpec(3), VERIFIERS["without_replacement"])
    with pytest.raises(UserError, match="verifier=bv takes trees of kind"):
        Mixed(Delayed(Action(2, 0, 1)), VERIFIERS["bv"])
    (liar := Delayed(Action(2, 0, 1))).trees = "path"
    policy = Mixed(liar, VERIFIERS["bv"])
    decoder = SpeculativeDecoder(TARGET, MixedDrafter(ngram, draft), policy, policy.verifier)
    with pytest.raises(UserError, match="of kind 'path' has at most 1"):
        decoder.generate([0], 9, SamplingSetting(1.0), Rng.seeded(0))
    with pytest.raises(UserError, match="verifier=specinfer takes"):
        SpeculativeDecoder(TARGET, ngram, NgramTree(), "specinfer")
    for other, rule in ((Delayed(Action(2, 0, 1)), "specinfer"), (Beam(2, 2, 3), "nss")):
        with pytest.raises(UserError, match="Take the policy NgramTree"):
            SpeculativeDecoder(TARGET, ngram, other, rule).generate(
                PROMPT, 4, SamplingSetting(1.0), Rng.seeded(0)
            )
