"""Trees on the device are those of the host; they commit and read the same, and decode the same
text at temperature 0.
"""

import pytest
import torch

from nde_talf.decoding.actions import Action
from nde_talf.decoding.device_tree import DeviceTree
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.masks import ancestor_mask, grown_mask
from nde_talf.decoding.policies.base import DecodingState
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.policies.stopping import FollowTau
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import RAW, Rng, SamplingSetting
from nde_talf.decoding.static import StaticShapes
from nde_talf.draft_training.head_drafter import EagleDrafter
from tests.decoding.pairs import tiny_pair
from tests.decoding.tables import TableDrafter, Tables, context_of, scored
from tests.draft_training.heads import random_head

TARGET, DRAFT = tiny_pair(64, hidden=32, layers=2)
HEAD = random_head(TARGET)


def drafter(with_head: bool, static: StaticShapes | None = None):
    return EagleDrafter(HEAD, static) if with_head else LMDrafter(DRAFT, static)


def on_tables(policy, tables: Tables, rng) -> DeviceTree:
    state = DecodingState(0, 1, 1 << 20, RAW, None, None, device=True)
    return policy.draft(state, TableDrafter(tables), rng)


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


@pytest.mark.parametrize("policy", [Delayed(Action(3, 1, 2)), Delayed(Action(1, 0, 3))])
def test_what_is_committed_is_what_is_read(policy):
    """At every end of every tree, on the device and on the host."""
    for seed in range(3):
        tree = on_tables(policy, Tables("random", seed), Rng.seeded(seed))
        host, states = tree.to_host(), torch.arange(len(tree))
        tree.p = host.p = 10 + states
        for end in tree.first.unique().tolist():
            context = context_of(tree, end)
            node = next(node for node in range(len(host)) if context_of(host, node) == context)
            ours, theirs = tree.commit(torch.tensor([end]), torch.tensor([2])), host.commit(node, 2)
            tau = len(context)
            assert theirs.tokens == [*context, 2] and theirs.path == host.path(node)
            assert [context_of(tree, row) for row in ours.of(states)[: tau + 1].tolist()] == [
                context[:n] for n in range(tau + 1)
            ]
            assert [*map(int, ours.last(states))] == [10 + end, end]
            assert [*map(int, theirs.last(states))] == [10 + node, node]
            read, expected = ours.read(), theirs.read()
            assert (read.tokens, read.nodes) == (expected.tokens, expected.nodes)
            assert read.rows == ours.nodes[: tau + 1].tolist()
            for room in range(tau + 3):
                cut = ours.within(room)
                assert (theirs.within(room) is None) == (room <= tau)
                assert (cut is None) == (room == 0)
                assert cut is None or int(cut.root) == min(tau, room - 1)


METHODS = [
    ("specinfer", Delayed(Action(3, 2, 2))),
    ("traversal", Delayed(Action(2, 1, 3))),
    ("nss", FollowTau(2, 2, 8)),
    ("bv", Delayed(Action(1, 0, 4))),
]


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize(
    "name,policy", METHODS, ids=lambda x: x if isinstance(x, str) else type(x).__name__
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
