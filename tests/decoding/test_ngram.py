"""Drafting from the text itself: what is looked up, which trees come of it, and the exact law of the loop with it."""

import pytest
import torch

from decoding.actions import Action
from decoding.common.errors import UserError
from decoding.drafter import LMDrafter
from decoding.loop import SpeculativeDecoder
from decoding.mixed import Mixed, MixedDrafter
from decoding.ngram import Match, NgramDrafter, NgramIndex, statistics
from decoding.ngram_settings import LONGEST, NgramConfig
from decoding.policies.base import DecodingState
from decoding.policies.beam import Beam
from decoding.policies.delayed import Autoregressive, Delayed
from decoding.policies.dyspec import DySpec
from decoding.policies.fixed import Shaped
from decoding.policies.ngram import NgramTree
from decoding.sampling import RAW, Rng, SamplingSetting
from decoding.static import StaticShapes
from decoding.testing import exact_law
from decoding.verification import VERIFIERS
from draft_training.head_drafter import EagleDrafter
from tests.decoding.laws import distance
from tests.decoding.pairs import tiny_pair
from tests.decoding.tiny_loop import DRAFT, HEAD, PROMPT, SETTING, TARGET, VOCABULARY, target_law
from tests.draft_training.heads import random_head

CLOSE = 1e-6  # p of the loop is float32, and comes from another pass than the reference's
REPEATS = [1, 3, 2, 3, 2, 0, 1, 3, 2]  # ends with what follows 1 at the start


def begun(text: list[int], config: NgramConfig = NgramConfig(), setting: SamplingSetting = RAW) -> NgramDrafter:
    drafter = NgramDrafter(VOCABULARY, config)
    drafter.start(text[:-1], text[-1], torch.zeros(len(text) - 1, 4), setting)
    return drafter


def tree_of(drafter: NgramDrafter, config: NgramConfig, room: int = 100):
    return NgramTree(config).draft(DecodingState(drafter.index.text[-1], 1, room, RAW, None, None), drafter, None)


def paths(tree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[node] for node in tree.path(leaf)) for leaf in range(1, len(tree)) if not tree.children[leaf]}


def test_the_longest_ending_counts_and_matches_are_those_with_a_token_after_them():
    index = NgramIndex(NgramConfig(max_size=3))
    index.extend(REPEATS)
    assert index.match([]) == Match(3, [3])  # 1 3 2, at the start
    assert index.match([3]) == Match(3, [4])  # 3 2 3
    assert index.match([0, 0]) == Match(1, [6])
    assert NgramIndex(NgramConfig()).match([]) == Match(0, [])
    shorter = NgramIndex(NgramConfig(max_size=2))
    shorter.extend(REPEATS)
    assert shorter.match([]) == Match(2, [3, 5]) and shorter.continuations(Match(2, [3, 5])) == [(0, 0.5), (3, 0.5)]
    assert shorter.follow(Match(2, [3, 5]), 3) == Match(3, [4]) and shorter.follow(Match(2, [3, 5]), 1) is None
    latest = NgramIndex(NgramConfig(max_size=2, matches=1))
    latest.extend(REPEATS)
    assert latest.match([]) == Match(2, [5])


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (2, 3), (5, 5)])
def test_an_index_that_grows_finds_what_a_search_of_the_text_finds(sizes):
    config = NgramConfig(*sizes, matches=10_000)
    index, generator, text = NgramIndex(config), torch.Generator().manual_seed(0), list[int]()
    for _ in range(80):
        new = torch.randint(3, (int(torch.randint(1, 4, (1,), generator=generator)),), generator=generator).tolist()
        index.extend(new)
        text += new
        for path in ([], new[:2]):
            ending = [*text, *path]
            searched = [
                Match(size, after)
                for size in range(sizes[1], sizes[0] - 1, -1)
                if size <= len(ending)
                and (after := [at for at in range(size, len(text)) if text[at - size : at] == ending[-size:]])
            ]
            assert index.match(path) == (searched or [Match(0, [])])[0]


def test_several_matches_are_one_tree_within_its_budget():
    config = NgramConfig(max_size=2, nodes=5, depth=3, threshold=0.0)
    tree = tree_of(begun(REPEATS, config), config)
    assert paths(tree) == {(0, 1, 3), (3, 2)} or paths(tree) == {(0, 1), (3, 2, 0)}  # after 3 2: 3 once, 0 once
    assert len(tree) == 6 and tree.q == [None] * 6
    assert len(tree_of(begun(REPEATS, config), config, room=1)) == 3 and len(tree_of(begun(REPEATS, config), config, room=0)) == 1
    assert len(tree_of(begun([0, 1, 2, 3]), NgramConfig())) == 1  # nothing matches
    unlikely = NgramConfig(max_size=2, threshold=0.4)
    assert len(tree_of(begun(REPEATS, unlikely), unlikely)) == 1  # two matches, each with half of 2 / 3


def test_a_period_goes_on_beyond_the_end_of_the_text():
    config = NgramConfig(threshold=0.0, nodes=7, depth=7)
    assert paths(tree_of(begun([0, 1, 2, 0, 1, 2], config), config)) == {(0, 1, 2, 0, 1, 2, 0)}


def test_statistics_count_by_size_of_the_match_what_was_tested():
    target, _ = tiny_pair(VOCABULARY, scale=30.0)
    config = NgramConfig(threshold=0.0, nodes=4)
    decoder = SpeculativeDecoder(target, NgramDrafter(VOCABULARY, config), NgramTree(config), "greedy")
    generation = decoder.generate(PROMPT, 60, SamplingSetting(0.0), Rng.seeded(0))
    found = statistics(decoder.drafting)
    assert sum(each.drafted for each in found.values()) == sum(step.nodes - 1 for step in generation.steps)
    assert sum(each.accepted for each in found.values()) == sum(step.tau for step in generation.steps) > 0
    assert all(each.accepted <= each.nodes <= each.drafted for each in found.values()) and statistics(None) == {}
    size, tested = max(found.items())
    assert decoder.drafting.rate(size) == (tested.accepted + size) / (tested.nodes + size + 1)


def test_a_node_is_drawn_from_what_followed_its_path_and_elsewhere_from_all_tokens():
    drafter = begun(REPEATS, NgramConfig(max_size=2))
    assert drafter.root.q.tolist() == pytest.approx([0.5, 0, 0, 0.5])
    tree = DecodingState(2, 9, 9, RAW, None, None).rooted(drafter)
    child = tree.add(0, 3)
    drafter.expand(tree, [child])
    assert tree.q_at(child).tolist() == [0, 0, 1, 0]
    unknown = begun([0, 1, 2, 0, 3])
    assert unknown.size == 0 and unknown.root.q.tolist() == pytest.approx([0.4, 0.2, 0.2, 0.2])
    assert begun(REPEATS, setting=SamplingSetting(0.0)).root.q.sum() == 1


PLAIN = NgramConfig(threshold=0.0, nodes=3, depth=2, max_size=2)
LONGER = NgramConfig(threshold=0.0, nodes=3, depth=2, min_size=2)  # so that some roots have no match
DRAWN = {
    "path": (lambda: Delayed(Action(1, 0, 2)), ("naive", "bv", "tv", "nss")),
    "delayed": (lambda: Delayed(Action(2, 0, 1)), ("specinfer", "traversal", "naivetree", "spectr", "khisti", "gbv", "gbv_exact")),
    "iid": (lambda: Shaped((((),), ()), "iid"), ("specinfer", "traversal", "khisti_lp")),
    "distinct": (lambda: Shaped(((), ()), "without_replacement"), ("without_replacement", "traversal_without_replacement")),
    "dyspec": (lambda: DySpec(nodes=3), ("without_replacement",)),
    "beam": (lambda: Beam(k=2, depth=2, nodes=3), ("nss",)),
}
DRAWN_CASES = [(kind, rule) for kind, (_, rules) in DRAWN.items() for rule in rules]


def law_of(decoder: SpeculativeDecoder, tokens: int, prompt: list[int], setting: SamplingSetting = SETTING) -> dict:
    return exact_law(lambda rng: tuple(decoder.generate(prompt, tokens, setting, rng).tokens))


def drawn(kind: str, rule: str, config: NgramConfig, device: bool = False) -> SpeculativeDecoder:
    return SpeculativeDecoder(TARGET, NgramDrafter(VOCABULARY, config), DRAWN[kind][0](), rule, device=device)


def mixed(drafter: str, rule: str, config: NgramConfig, static: StaticShapes | None = None) -> SpeculativeDecoder:
    own = LMDrafter(DRAFT, static) if drafter == "lm" else EagleDrafter(HEAD, static)
    action = Action(2, 0, 1) if rule in ("traversal", "specinfer") else Action(1, 0, 2)
    policy = Mixed(Delayed(action), VERIFIERS[rule], NgramTree(config))
    return SpeculativeDecoder(TARGET, MixedDrafter(NgramDrafter(VOCABULARY, config), own), policy, policy.verifier, static=static)


SHORT = [1, 3]
"""A prompt after which texts of three tokens with and without matches of two tokens come."""
