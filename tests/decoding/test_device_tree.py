"""Trees on the device are those of the host; they commit and read the same, and decode the same
text at temperature 0.
"""

import pytest
import torch

from nde_talf import (
    Action,
    DecodingState,
    Delayed,
    LMDrafter,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
)
from nde_talf.decoding.device_tree import DeviceTree
from nde_talf.decoding.setting import RAW
from tests.decoding.pairs import tiny_pair
from tests.decoding.tables import TableDrafter, Tables, context_of, scored


def on_tables(policy, tables: Tables, rng) -> DeviceTree:
    state = DecodingState(0, 1, 1 << 20, RAW, None, None, device=True)
    return policy.draft(state, TableDrafter(tables), rng)


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
            read = ours.read()
            assert (read.tokens, read.nodes) == (theirs.tokens, len(host))
            assert read.rows == ours.nodes[: tau + 1].tolist()
            for room in range(tau + 3):
                cut = ours.within(room)
                assert (cut is None) == (room == 0)
                assert cut is None or int(cut.root) == min(tau, room - 1)


def test_a_distribution_without_mass_is_an_error():
    target, draft = tiny_pair(16)
    decoder = SpeculativeDecoder(
        target, LMDrafter(draft), Delayed(Action(2, 1, 1)), "traversal", device=True
    )
    stream = iter(decoder.blocks([1, 2], 50, SamplingSetting(), Rng.seeded(0)))
    next(stream)
    with torch.no_grad():
        draft.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="positive, finite"):
        for _ in stream:
            pass
