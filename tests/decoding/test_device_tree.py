"""Trees on the device are those of the host; they commit and read the same, and decode the same
text at temperature 0.
"""

from itertools import product

import pytest
import torch

from nde_talf.decoding.actions import Action
from nde_talf.decoding.device_tree import DeviceTree
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.masks import ancestor_mask, grown_mask
from nde_talf.decoding.policies.base import DecodingState
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed, FollowTau
from nde_talf.decoding.policies.fixed import Shaped, fixed_shape
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import RAW, Rng, SamplingSetting
from nde_talf.decoding.session import new_session
from nde_talf.decoding.static import StaticShapes
from nde_talf.decoding.tree import DraftTree
from nde_talf.draft_training.head_drafter import EagleDrafter
from tests.decoding.pairs import tiny_pair
from tests.decoding.tables import TableDrafter, Tables, V, context_of, scored
from tests.draft_training.heads import random_head

TARGET, DRAFT = tiny_pair(64, hidden=32, layers=2)
HEAD = random_head(TARGET)
BEAMS = [
    Beam(3, 3, 9),
    Beam(2, 5, 8),
    Beam(1, 3, 2),
    Beam(4, 1, 3),
    Beam(2, 2, 100),
    Beam(10, 3, 40),
]


def drafter(with_head: bool, static: StaticShapes | None = None):
    return EagleDrafter(HEAD, static) if with_head else LMDrafter(DRAFT, static)


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {context_of(tree, node) for node in range(len(tree))}


def on_tables(policy, tables: Tables, rng=None, room: int = 1 << 20) -> DeviceTree:
    return policy.draft(
        DecodingState(0, 1, room, RAW, None, None, device=True), TableDrafter(tables), rng
    )


def test_ancestor_masks_are_those_written_down():
    parents = [-1, 0, 0, 1, 1, 3]
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 1, 3, 5]]
    expected = torch.zeros(6, 6, dtype=torch.bool)
    for row, path in enumerate(paths):
        expected[row, path] = True
    assert torch.equal(ancestor_mask(torch.tensor(parents)), expected)
    assert torch.equal(ancestor_mask(torch.tensor(parents), depth=3), expected)
    assert torch.equal(grown_mask(expected[:3, :3], torch.tensor([1, 1])), expected[:5, :5])


def test_the_same_seed_drafts_the_same_delayed_tree():
    tables, repeats = Tables("random", seed=1), 0
    for seed in range(60):
        policy = Delayed(Action(1 + seed % 4, seed % 3, seed % 5))
        host = scored(tables, policy, Rng.seeded(seed))
        tree = on_tables(policy, tables, Rng.seeded(seed))
        read = tree.to_host()
        assert (read.tokens, read.parents, read.children) == (
            host.tokens,
            host.parents,
            host.children,
        )
        first = tree.first.unique()
        assert tree.tokens[first].tolist() == host.tokens
        assert tree.commit(torch.tensor([0]), torch.tensor([0])).read().nodes == len(host)
        repeats += len(tree) - len(host)
    assert repeats > 50


def test_draws_on_a_device_are_those_of_the_host():
    rows = torch.rand(200, 50, generator=torch.Generator().manual_seed(0)).square()
    rows[:, 40:] = 0
    rows[::3, :7] = 0
    assert Rng.seeded(3).categorical(rows).tolist() == Rng.seeded(3).categorical(
        rows, range(len(rows))
    )

    class Last(Rng):
        def uniform(self) -> float:
            return 1 - 2**-53

    drawn = Last(torch.Generator()).categorical(rows)
    assert drawn.max() < 40 and bool((rows.gather(1, drawn[:, None]) > 0).all())


@pytest.mark.parametrize("kind", ["random", "sparse", "one-hot q"])
@pytest.mark.parametrize("vocabulary", [2, 7])
@pytest.mark.parametrize("room", [0, 2, 100])
def test_beams_are_those_of_the_host(room, vocabulary, kind):
    """And what comes instead of tokens that the draft gives nothing has no probability either."""
    for policy, seed in product(BEAMS, range(4)):
        tables = Tables(kind, seed, vocabulary)
        host = policy.draft(
            DecodingState(0, 1, room, RAW, None, None), TableDrafter(tables), Rng.seeded(0)
        )
        ours = on_tables(policy, tables, room=room)
        tree = ours.to_host()
        assert paths(host) <= paths(tree) and len(paths(tree)) == len(tree) == len(ours)
        for path in paths(tree) - paths(host):
            assert kind != "random"
            assert min(float(tables(path[:at])[1][token]) for at, token in enumerate(path)) == 0
        for node in range(len(tree)):
            assert ours.sees[node].nonzero().flatten().tolist() == sorted([0, *tree.path(node)])


@pytest.mark.parametrize(
    "policy",
    [
        *BEAMS,
        Delayed(Action(3, 1, 2)),
        Delayed(Action(1, 0, 3)),
        Shaped((((), ()), ((),)), "without_replacement"),
    ],
)
def test_what_is_committed_is_what_is_read(policy):
    """At every end of every tree, on the device and on the host."""
    for seed in range(3):
        tree = on_tables(
            policy,
            Tables("random", seed, V if isinstance(policy, Delayed) else 4),
            Rng.seeded(seed),
        )
        host, states = tree.to_host(), torch.arange(len(tree))
        tree.p = host.p = 10 + states
        for end in tree.first.unique().tolist():
            context = context_of(tree, end)
            node = next(node for node in range(len(host)) if context_of(host, node) == context)
            ours, theirs = tree.commit(torch.tensor([end]), torch.tensor([2])), host.commit(node, 2)
            tau = len(context)
            assert int(ours.root) == theirs.root == tau and theirs.path == host.path(node)
            assert ours.tokens[: tau + 1].tolist() == theirs.tokens == [*context, 2]
            assert [context_of(tree, row) for row in ours.of(states)[: tau + 1].tolist()] == [
                context[:n] for n in range(tau + 1)
            ]
            assert [*map(int, ours.last(states))] == [10 + end, end] and [
                *map(int, theirs.last(states))
            ] == [10 + node, node]
            assert len(ours.nodes) == len(ours.tokens) == tree.depth + 1
            read, expected = ours.read(), theirs.read()
            assert (read.tokens, read.nodes) == (expected.tokens, expected.nodes)
            assert read.rows == ours.nodes[: tau + 1].tolist() and expected.rows == [
                0,
                *theirs.path,
            ]
            for room in range(tau + 3):
                cut, whole = ours.within(room), theirs.within(room)
                assert (whole is None) == (room <= tau) and (cut is None) == (room == 0)
                assert cut is None or (
                    len(cut.tokens) == min(room, tree.depth + 1)
                    and int(cut.root) == min(tau, room - 1)
                )


METHODS = [
    ("specinfer", Delayed(Action(3, 2, 2))),
    ("traversal", Delayed(Action(2, 1, 3))),
    ("nss", FollowTau(2, 2, 8)),
    ("bv", Delayed(Action(1, 0, 4))),
]

SHAPED = [
    (name, Shaped(fixed_shape(3, 2, 10), trees))
    for trees, name in (
        ("iid", "traversal"),
        ("without_replacement", "without_replacement"),
        ("top_k", "greedy"),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize(
    "name,policy", [*METHODS, *SHAPED], ids=lambda x: x if isinstance(x, str) else type(x).__name__
)
def test_greedy_decoding_is_autoregressive_decoding(name, policy, with_head, static):
    shapes = StaticShapes(60, rows=32) if static else None
    plain = SpeculativeDecoder(TARGET, None, Autoregressive(), VERIFIERS["specinfer"])
    warm = SamplingSetting(0.7)  # the draft's, so that branches differ
    fast = SpeculativeDecoder(
        TARGET,
        drafter(with_head, shapes),
        policy,
        VERIFIERS[name],
        warm,
        static=shapes,
        device=True,
    )
    generator = torch.Generator().manual_seed(0)
    for seed in range(2):
        prompt = torch.randint(64, (5 + seed,), generator=generator).tolist()
        asked = prompt, 1000 if static else 50, SamplingSetting(0.0), Rng.seeded(seed)
        generation = fast.generate(*asked)
        assert (
            generation.tokens == plain.generate(prompt, len(generation.tokens), *asked[2:]).tokens
        )
    assert with_head or generation.block_efficiency > 1.1


def test_a_distribution_without_mass_is_an_error():
    target, draft = tiny_pair(16)
    decoder = SpeculativeDecoder(
        target, LMDrafter(draft), Delayed(Action(2, 1, 1)), VERIFIERS["traversal"], device=True
    )
    stream = iter(decoder.blocks([1, 2], 50, SamplingSetting(), Rng.seeded(0)))
    next(stream)
    with torch.no_grad():
        draft.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="positive, finite"):
        for _ in stream:
            pass


@torch.inference_mode()
@pytest.mark.parametrize("static", [False, True])
def test_rows_that_are_told_what_they_see_run_as_those_with_parents(static):
    """In two passes, the second of rows below both; then a path is committed."""
    shapes, generator = (
        StaticShapes(60, rows=12) if static else None,
        torch.Generator().manual_seed(0),
    )
    told, known = (
        new_session(forward, TARGET.device, TARGET.dtype, TARGET.layers, shapes)
        for forward in (TARGET.hidden, lambda *inputs: TARGET.hidden(*inputs))
    )
    for own in (told, known):
        own.reset()
        own.append([1, 2, 3])
    for _ in range(4):
        tokens = torch.randint(64, (9,), generator=generator)
        parents = [
            int(torch.randint(-1, row, (), generator=generator)) if row else -1 for row in range(9)
        ]
        sees = torch.eye(9, dtype=torch.bool)
        for row, parent in enumerate(parents):
            if parent >= 0:
                sees[row] |= sees[parent]
        for a, b in ((0, 5), (5, 9)):
            ours = told.grow(tokens[a:b], sees[a:b, :b])
            torch.testing.assert_close(
                ours, known.grow(tokens[a:b].tolist(), parents[a:b]), atol=1e-5, rtol=1e-4
            )
        path = sees[8].nonzero().flatten().tolist()
        for own in (told, known):
            own.commit(path)
    assert told.length == known.length > 7


@torch.inference_mode()
@pytest.mark.parametrize("static", [False, True])
def test_tokens_of_the_device_are_appended_as_those_of_the_host(static):
    """How many of them count is said afterwards."""
    found = []
    for device in (False, True):
        shapes = StaticShapes(60, rows=12) if static else None
        own = new_session(TARGET.hidden, TARGET.device, TARGET.dtype, TARGET.layers, shapes)
        own.append([1, 2, 3])
        states = own.append(torch.tensor([4, 5, 6, 7]) if device else [4, 5, 6])[:3]
        assert own.length == (3 if device else 6)
        if device:
            own.commit([0, 1, 2])
        found += [states, own.append([8])]
        assert own.length == 7
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
