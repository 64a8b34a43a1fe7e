"""Beam search on the device: the host's trees, the target's exact law, and passes over rows whose parents it does not know."""

from itertools import product

import pytest
import torch

from decoding.drafter import LMDrafter
from decoding.loop import SpeculativeDecoder
from decoding.policies.base import DecodingState
from decoding.policies.beam import Beam
from decoding.policies.delayed import Autoregressive
from decoding.ranked import RankedTree
from decoding.sampling import RAW, Rng, SamplingSetting, warp
from decoding.static import StaticShapes, session
from decoding.testing import exact_law
from decoding.tree import DraftTree
from decoding.verification import VERIFIERS
from draft_training.head_drafter import EagleDrafter
from tests.decoding.laws import distance, emitted_law, target_law
from tests.decoding.pairs import tiny_pair
from tests.decoding.remembered import remembered, remembering
from tests.decoding.tables import KINDS, TableDrafter, Tables, context_of
from tests.draft_training.heads import random_head

TARGET, DRAFT = tiny_pair(64, hidden=32, layers=2)
HEAD = random_head(TARGET)
BEAMS = [Beam(3, 3, 9), Beam(2, 5, 8), Beam(1, 3, 2), Beam(4, 1, 3), Beam(2, 2, 100), Beam(10, 3, 40)]


class ReadingDrafter(TableDrafter):
    """Tables know contexts by their tokens, so this one reads them."""

    def __init__(self, tables: Tables):
        super().__init__(tables)
        self.level, self.given = [()], []

    def expand_unread(self, tokens, above, sees):
        lines = zip(above.tolist(), tokens.tolist(), strict=True)
        self.level = [(*self.level[parent], token) for parent, token in lines]
        self.given += self.level
        for line, own in zip(sees.tolist(), self.level, strict=True):
            seen = [context for context, shown in zip(self.given, line, strict=True) if shown]
            assert seen == [own[:length] for length in range(1, len(own) + 1)]
        return torch.stack([self.tables(context)[1] for context in self.level])


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {context_of(tree, node) for node in range(len(tree))}


def read(tree: RankedTree) -> DraftTree:
    tree.p = torch.zeros(len(tree), 1)
    return tree.read(torch.tensor([0]), torch.tensor([0]))[0]


def on_tables(policy: Beam, tables: Tables, rng=None, room: int = 1 << 20) -> RankedTree:
    return policy.draft(DecodingState(0, 1, room, RAW, None, None, unread=True), ReadingDrafter(tables), rng)


@pytest.mark.parametrize("kind", ["random", "sparse", "one-hot q"])
@pytest.mark.parametrize("vocabulary", [2, 7])
@pytest.mark.parametrize("room", [0, 2, 100])
def test_trees_are_those_of_the_host(room, vocabulary, kind):
    """And what comes instead of tokens that the draft gives nothing has no probability either."""
    for policy, seed in product(BEAMS, range(4)):
        tables = Tables(kind, seed, vocabulary)
        host = policy.draft(DecodingState(0, 1, room, RAW, None, None), Unlabelled(tables), Rng.seeded(0))
        ours = on_tables(policy, tables, room=room)
        tree = read(ours)
        assert paths(host) <= paths(tree) and len(paths(tree)) == len(tree) == len(ours)
        for path in paths(tree) - paths(host):
            assert kind != "random"
            assert min(float(tables(path[:at])[1][token]) for at, token in enumerate(path)) == 0
        for node in range(len(tree)):
            seen = ours.sees[node].nonzero().flatten().tolist()
            assert seen == sorted([0, *tree.way(node)])


class Unlabelled(TableDrafter):
    def relabel(self, nodes):
        pass


@torch.inference_mode()
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("with_head", [False, True])
def test_models_draft_the_trees_of_the_host(with_head, static):
    shapes, generator, setting = StaticShapes(60, rows=32) if static else None, torch.Generator().manual_seed(0), RAW
    drafter, trees = EagleDrafter(HEAD, shapes) if with_head else LMDrafter(DRAFT, shapes), set()
    for policy in (Beam(3, 4, 12), Beam(2, 5, 8), Beam(4, 3, 20)):
        prompt = torch.randint(64, (1, 6), generator=generator)
        features, found = TARGET.hidden(prompt, torch.arange(6)[None], None, None)[0], []
        for unread in (False, True):
            drafter.start(prompt[0].tolist(), 7, features, setting)
            tree = policy.draft(DecodingState(7, 7, 50, setting, None, None, unread=unread), drafter, Rng.seeded(0))
            found.append(paths(read(tree) if unread else tree))
        assert found[0] == found[1]
        trees.add(frozenset(found[0]))
    assert len(trees) == 3 and max(map(len, found[0])) == 3


def test_a_draft_that_is_no_distribution_makes_no_broken_tree():
    """NSS does not look at it, so the law is the target's all the same."""
    tables = Tables("random", 0, 5)
    for context in product(range(5), repeat=1):
        tables(context)[1][context[0]] = float("nan")
    tree = read(on_tables(Beam(3, 3, 12), tables))
    assert len(paths(tree)) == len(tree) == 13


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy,vocabulary", [(Beam(2, 2, 3), 3), (Beam(3, 3, 5), 2)], ids=["wide", "deep"])
def test_output_law_is_the_targets(policy, vocabulary, kind):
    tables = Tables(kind, seed=3, vocabulary=vocabulary)

    def step(rng):
        tree = scored(on_tables(policy, tables, rng), tables)
        found, _, verdict, _ = tree.read(*VERIFIERS["nss"].unread(tree, rng))
        return found, verdict

    length = policy.depth + 1
    assert distance(emitted_law(tables, step, length), target_law(tables, length)) < 1e-9


def scored(tree: RankedTree, tables: Tables) -> RankedTree:
    host = read(tree)
    tree.p = torch.stack([tables(context_of(host, node))[0] for node in range(len(host))])
    return tree


def test_what_is_committed_is_what_is_read():
    """At every end of every tree."""
    for policy, seed in product(BEAMS, range(3)):
        tree = on_tables(policy, Tables("random", seed, 4))
        for node in range(len(tree)):
            tree.p = torch.zeros(len(tree), 1)
            end, token = torch.tensor([node]), torch.tensor([3])
            committed, (found, rows, verdict, _) = tree.committed(end, token), tree.read(end, token)
            tau = int(committed.root)
            assert tau == len(verdict.path) and verdict.token == 3
            assert committed.nodes[: tau + 1].tolist() == [rows[each] for each in (0, *verdict.path)]
            assert committed.tokens[: tau + 1].tolist() == [*(found.tokens[each] for each in verdict.path), 3]
            assert len(committed.nodes) == len(committed.tokens) == len(tree.levels)


@pytest.mark.slow
@pytest.mark.parametrize(
    "with_head,static,name", [(False, False, "greedy"), (False, True, "nss"), (True, False, "nss"), (True, True, "greedy")]
)
def test_greedy_decoding_is_that_of_the_host_step_by_step(with_head, static, name):
    shapes, greedy, warm = StaticShapes(60, rows=32) if static else None, SamplingSetting(0.0), SamplingSetting(0.7)
    drafter = EagleDrafter(HEAD, shapes) if with_head else LMDrafter(DRAFT, shapes)
    plain = SpeculativeDecoder(TARGET, None, Autoregressive(), VERIFIERS["nss"])
    ours, host = (
        SpeculativeDecoder(TARGET, drafter, Beam(3, 4, 12), VERIFIERS[name], warm, static=shapes, unread=unread)
        for unread in (True, False)
    )
    asked = [1, 2, 3], 1000 if static else 40, greedy  # with static shapes to the end of the context
    found = ours.generate(*asked, Rng.seeded(0))
    assert found.tokens == plain.generate([1, 2, 3], len(found.tokens), greedy, Rng.seeded(0)).tokens
    expected = host.generate(*asked, Rng.seeded(0))
    assert [(step.tokens, step.nodes) for step in found.steps] == [(step.tokens, step.nodes) for step in expected.steps]
    assert with_head or found.block_efficiency > 1.1


@pytest.mark.parametrize("with_head,static", [(False, False), (False, True), (True, False)])
def test_the_loop_writes_the_targets_law(with_head, static):
    target, draft = map(remembering, tiny_pair(2, noise=0.5))
    prompt, setting, shapes = [1, 0, 1], SamplingSetting(0.9), StaticShapes(20, rows=8) if static else None
    if with_head:
        head = random_head(target)
        head.forward = remembered(head.forward)
    drafter = EagleDrafter(head) if with_head else LMDrafter(draft, shapes)
    decoder = SpeculativeDecoder(target, drafter, Beam(2, 2, 3), VERIFIERS["nss"], static=shapes, unread=True)
    law = exact_law(lambda rng: tuple(decoder.generate(prompt, 3, setting, rng).tokens))
    for tokens in product(range(2), repeat=3):
        rows = warp(target.module(torch.tensor([[*prompt, *tokens]])).logits[0], setting)
        chance = rows[torch.arange(2, 5), torch.tensor(tokens)].prod()
        assert law[tokens] == pytest.approx(float(chance), abs=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("static", [False, True])
def test_rows_that_are_told_what_they_see_run_as_those_with_parents(static):
    """In two passes, the second of rows below both; then a path is kept."""
    shapes, generator = StaticShapes(60, rows=12) if static else None, torch.Generator().manual_seed(0)
    told, known = (
        session(forward, TARGET.device, TARGET.dtype, TARGET.layers, shapes)
        for forward in (TARGET.hidden, lambda *inputs: TARGET.hidden(*inputs))
    )
    for own in (told, known):
        own.reset()
        own.append([1, 2, 3])
    for _ in range(4):
        tokens = torch.randint(64, (9,), generator=generator)
        parents = [int(torch.randint(-1, row, (), generator=generator)) if row else -1 for row in range(9)]
        sees = torch.eye(9, dtype=torch.bool)
        for row, parent in enumerate(parents):
            if parent >= 0:
                sees[row] |= sees[parent]
        for a, b in ((0, 5), (5, 9)):
            ours = told.grow(list(tokens[a:b].unbind()), sees[a:b, :b])
            torch.testing.assert_close(ours, known.grow(tokens[a:b].tolist(), parents[a:b]), atol=1e-5, rtol=1e-4)
        way = sees[8].nonzero().flatten().tolist()
        for own in (told, known):
            own.keep(way)
    assert told.length == known.length > 7


def test_rows_with_parents_cannot_follow_those_that_are_told_what_they_see():
    own = session(TARGET.hidden, TARGET.device, TARGET.dtype, TARGET.layers, None)
    own.append([1, 2])
    own.grow([torch.tensor(3)], torch.ones(1, 1, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="keep"):
        own.grow([4], [0])
