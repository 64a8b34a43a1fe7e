"""Actions of delayed trees (Definition 5.2 and Eq. 8, NDE paper), and which of them are equal.

An action (K, L1, L2) drafts a trunk of L1 tokens, then K branches of L2. Any K at L2 = 0 is the
bare trunk, and K = 1 is a single path of L1 + L2, however it is split: 4 x 9 x 9 = 324 actions are
233 distinct trees. Policies and labels are indexed by distinct tree, so that equals share their
estimates and never split a policy's mass.
"""

from itertools import product
from typing import NamedTuple

from nde_talf.decoding.common.arguments import Natural, Positive

K_MAX, L1_MAX, L2_MAX = 4, 8, 8


class Action(NamedTuple):
    """A delayed tree: `k` branches of length `l2` after a trunk of length `l1` (tokens)."""

    k: Positive
    l1: Natural
    l2: Natural

    @property
    def depth(self) -> int:
        """Longest path in drafted tokens."""
        return self.l1 + self.l2

    @property
    def nodes(self) -> int:
        """Return the tokens of a target pass, root included, if no two draws coincide.

        Eq. 11 of the NDE paper: 1 + L1 + K L2.
        """
        return 1 + self.l1 + self.k * self.l2

    @property
    def widths(self) -> list[int]:
        """Return the number of draws of each level."""
        return [1] * self.l1 + [self.k] * self.l2


def canonical(action: Action) -> Action:
    """Return the representative of all actions that draft one tree: single paths are (1, 0, L)."""
    k, l1, l2 = action
    return Action(1, 0, l1 + l2) if k == 1 or l2 == 0 else Action(k, l1, l2)


def action_space(k: int, l1: int, l2: int) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """List all actions up to (k, l1, l2), and the distinct trees among them (canonical, sorted)."""
    actions = tuple(Action(*a) for a in product(range(1, k + 1), range(l1 + 1), range(l2 + 1)))
    return actions, tuple(sorted({canonical(a) for a in actions}))


ACTIONS, TREES = action_space(K_MAX, L1_MAX, L2_MAX)
TREE_INDEX: dict[Action, int] = {tree: i for i, tree in enumerate(TREES)}
