"""Delayed trees (Definition 5.2, NDE paper) of one action."""

from __future__ import annotations

from typing import Any

from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.arguments import checked
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.registry import policy
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.tree import DraftTree


def within(action: Action, room: int) -> Action:
    """Cut a tree to the depth that the context has room for.

    It is a decision that does not look at any draw, so nothing is biased.
    """
    l1 = min(action.l1, room)
    return Action(action.k, l1, min(action.l2, room - l1))


def draft_delayed(action: Action, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
    """Draft a (K, L1, L2)-delayed tree: a trunk of L1 draws from q, then K i.i.d. paths of L2.

    For example (2, 1, 2): one draw after the root, then two paths of two draws each. Paths that
    draw the same tokens share their nodes.
    """
    k, l1, l2 = within(action, state.room)
    tree, ends = DraftTree.rooted(state.root, drafter.root.q), [0]  # the last node of every path
    for level in range(l1 + l2):
        nodes = list(dict.fromkeys(ends))
        if level:
            drafter.expand(tree, nodes)
        if level == l1:
            ends = k * ends
        tokens = rng.categorical(tree.q_rows(nodes), [nodes.index(end) for end in ends])
        ends = [tree.add(end, token) for end, token in zip(ends, tokens, strict=True)]
    return tree


@policy("autoregressive", verifier="naive")
class Autoregressive(TreePolicy):
    """Drafts nothing: every step commits one token of the target. Runs without a drafter."""

    trees = "none"

    def delayed_tree(self, state: Any) -> Action:
        """See `TreePolicy.delayed_tree`: the root alone."""
        return Action(1, 0, 0)

    def draft(self, state: DecodingState, drafter: Drafter | None, rng: Rng) -> DraftTree:
        """Return the root alone."""
        return DraftTree.rooted(state.root)


class Delayed(TreePolicy):
    """Delayed tree of one fixed (K, L1, L2) at every step."""

    @checked
    def __init__(self, action: Action):
        self.action = action
        self.trees = "path" if action.k == 1 or action.l2 == 0 else "delayed"

    def delayed_tree(self, state: Any) -> Action:
        """See `TreePolicy.delayed_tree`."""
        return self.action

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        """Draft the fixed action's tree."""
        return draft_delayed(self.action, state, drafter, rng)


@policy("delayed", verifier="traversal")
def delayed(k: int = 1, l1: int = 0, l2: int = 4) -> Delayed:
    """Draft the same (K, L1, L2) at every step."""
    return Delayed(Action(k, l1, l2))


@policy("gbv", verifier="gbv_exact")
def gbv(k: int = 3, length: int = 8) -> Delayed:
    """Draft k i.i.d. paths from the root, for greedy multi-path block verification.

    Its paper recommends three, of 8 tokens.
    """
    return Delayed(Action(k, 0, length))
