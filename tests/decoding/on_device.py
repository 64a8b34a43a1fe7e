"""One step with a tree on the device, and the exact distance of its law to the target's."""

import torch

from decoding.actions import Action
from decoding.policies.base import DecodingState
from decoding.policies.delayed import Delayed, FollowTau, draft_delayed
from decoding.sampling import RAW
from decoding.verification import VERIFIERS
from tests.decoding.laws import distance, emitted_law, target_law
from tests.decoding.tables import TableDrafter, Tables, context_of


class ReadingDrafter(TableDrafter):
    """Tables know contexts by their tokens, so this one reads them."""

    def expand(self, tree, nodes):
        for node in nodes:
            tree.q[node] = self.tables(tuple(map(int, context_of(tree, node))))[1]


def one_step(tables: Tables, action: Action, rule, rng):
    state = DecodingState(0, 1, 1 << 20, RAW, None, None, unread=True)
    tree = draft_delayed(action, state, ReadingDrafter(tables), rng)
    tree.p = torch.stack([tables(tuple(map(int, context_of(tree, node))))[0] for node in range(len(tree))])
    return tree.read(*rule(tree, rng))[:3]


def distance_to_target(name: str, action: Action, tables: Tables) -> float:
    def step(rng):
        tree, _, verdict = one_step(tables, action, VERIFIERS[name].unread, rng)
        return tree, verdict

    length = action.depth + 1
    return distance(emitted_law(tables, step, length), target_law(tables, length))


METHODS = [
    ("specinfer", Delayed(Action(3, 2, 2))),
    ("traversal", Delayed(Action(2, 1, 3))),
    ("nss", FollowTau(2, 2, 8)),
    ("bv", Delayed(Action(1, 0, 4))),
]
