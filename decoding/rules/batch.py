"""A draft tree on a device, walked without a look at the numbers by the host.

Node 0 is the root, and parents precede their children. The host does not know where a walk ends, so
it goes down all levels with a pointer [1] to the current node: depth + 1 nodes are solved.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.device_tree import DeviceTree
from nde_talf.decoding.rules.residual import EMPTY, excess, where
from nde_talf.decoding.rules.walk import Rule
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.tree import Verdict


@dataclass
class RowTree:
    """A draft tree of N nodes, looked up by tensors of node numbers.

    Attributes:
        tokens: [N] token ids.
        parents: [N]. The first node of the parent's token; -1 for the root, -2 for padding.
        first: [N]. The first node that is the same draw under the same parent.
        sees: [N, N], bool. Row n is True at the nodes from the root to n, n included.
        p: [N, V]. Rows of the target.
        q: [M, V]. Rows of the draft at the first M nodes; the others have no children.
        depth: the largest depth that a node can have.
        max_draws: the largest number of draws that a node can have.
    """

    tokens: Tensor
    parents: Tensor
    first: Tensor
    sees: Tensor
    p: Tensor
    q: Tensor
    depth: int
    max_draws: int

    def q_at(self, nodes: Tensor) -> Tensor:
        """Return rows [n, V] of the draft, which mean nothing at nodes without children."""
        return self.q[nodes.clamp(max=len(self.q) - 1)]

    def children(self, node: Tensor) -> tuple[Tensor, Tensor]:
        """Return the draws at `node` [1]: tokens [1, n] in draft order, and their count.

        The first count [1] of the n are the node's own.
        """
        under = self.parents == node
        order = under.to(torch.uint8).argsort(descending=True, stable=True)
        return self.tokens[order[: self.max_draws]][None], under.sum(0, keepdim=True)

    def before(self) -> Tensor:
        """Return [N, N]: whether node m comes before node n, at [n, m].

        Children come before their parent, and siblings in draft order.
        """
        sees, nodes = self.sees.float(), torch.arange(len(self.parents), device=self.parents.device)
        siblings = self.parents[:, None] == self.parents
        siblings = siblings & (nodes[:, None] > nodes)  # [later, earlier]
        apart = sees @ siblings.float() @ sees.T > 0  # below the later one, below the earlier one
        return apart | (self.sees.T & (nodes != nodes[:, None]))


def rows_of(tree: DeviceTree) -> RowTree:
    """Return the rows of a tree."""
    q = torch.stack([row for row in tree.q if row is not None])
    topology = tree.tokens, tree.parents, tree.first, tree.sees
    return RowTree(*topology, tree.p, q, tree.depth, tree.max_draws)


@dataclass
class Nodes:
    """B nodes at once.

    Attributes:
        p, q: [B, V]; for labels numbers p(x), q(x) of single tokens.
        draws: [B, n] token ids in draft order, of which the first `count` [B] are the node's own.
    """

    p: Tensor
    q: Tensor
    draws: Any = None
    count: Any = None

    def px(self, draw: int) -> Tensor:
        """Return p [B] of a draw."""
        return self.p.gather(-1, self.draws[:, draw, None])[:, 0].double()

    def qx(self, draw: int) -> Tensor:
        """Return q [B] of a draw."""
        return self.q.gather(-1, self.draws[:, draw, None])[:, 0].double()

    def mass(self, c: Any, w0: Any = 1.0) -> Tensor:
        """Return sum_t (w0 p(t) - c q(t))_+, [B]."""
        return excess(self.p, self.q, c, w0).sum(-1, dtype=torch.float64)

    def rest(self, c: Any) -> Tensor:
        """Return (p - c q)_+, [B, V]."""
        return excess(self.p, self.q, c)


def walk_rows(rule: Rule, tree: RowTree, rng: Rng) -> Verdict:
    """Walk a tree as `walk.walk` does one on the host: end, token [1]."""
    end = torch.zeros_like(tree.tokens[:1])
    alive = torch.ones_like(end, dtype=torch.bool)
    token = torch.full_like(end, -1)
    for level in range(tree.depth + 1):
        p = tree.p[end]
        if level == tree.depth:
            drawn = correction(rule.target(p), alive, rng)
        else:
            drawn = solve_rows(rule, Nodes(p, tree.q_at(end), *tree.children(end)), alive, rng)
        token = torch.where(alive, drawn, token)
        match = (tree.parents == end) & (tree.tokens == drawn) & alive
        alive = match.any(0, keepdim=True)
        end = torch.where(alive, match.to(torch.uint8).argmax(0, keepdim=True), end)
    return Verdict(end, token)


def solve_rows(rule: Rule, node: Nodes, alive: Tensor, rng: Rng) -> Tensor:
    """Return a token [B] for every node that is `alive` [B]; its law is that of `walk.solve`.

    -1 where a row had no positive, finite sum.
    """
    node = rule.select(node, rng)
    law, state = accept_law(rule, node)
    most = law.shape[1] - 1
    first = rng.categorical(only(law, alive)) if most else torch.zeros_like(node.count)
    accepted = first < most
    weights = rule.residual(node, state)
    if rule.offered != 0:
        weights = or_target(weights, node.p, node.count == 0)
    token = correction(weights, alive & ~accepted, rng)
    if most:
        chosen = node.draws.gather(-1, first.clamp(max=most - 1)[:, None])[:, 0]
        token = torch.where(accepted, chosen, token)
    return torch.where(law.isfinite().all(-1), token, -1)


def accept_law(rule: Rule, node: Nodes) -> tuple[Tensor, Any]:
    """Return how probable each draw is to be accepted first, and none to be, [B, n + 1].

    With it the state after all of a node's draws.
    """
    most, count = node.draws.shape[1], node.count
    if rule.offered is not None:
        most, count = min(rule.offered, most), count.clamp(max=rule.offered)
    state, laws = rule.start(node), []
    missed = torch.ones(len(node.p), dtype=torch.float64, device=node.p.device)
    for draw in range(most):
        real = draw < count
        chance = rule.chance(node.px(draw), node.qx(draw), state) * real
        laws.append(chance * missed)
        missed = missed * (1 - chance)
        after = rule.reject(node, state)
        state = type(state)(*(where(real, new, old) for new, old in zip(after, state, strict=True)))
    return torch.stack([*laws, missed], -1), state


def or_target(residual: Tensor, p: Tensor, leaf: Tensor) -> Tensor:
    """Return `residual` [B, V], but p at a `leaf` [B], or where rounding left no mass."""
    empty = residual.sum(-1, dtype=torch.float64) <= EMPTY
    return torch.where((leaf | empty)[:, None], p, residual)


def only(weights: Tensor, rows: Tensor) -> Tensor:
    """Return `weights` [B, n] where `rows` [B]; elsewhere all is on the first."""
    certain = torch.zeros_like(weights)
    certain[:, 0] = 1
    return torch.where(rows[:, None], weights, certain)


def correction(weights: Tensor, rows: Tensor, rng: Rng) -> Tensor:
    """Draw a token [B] from each row of `weights` [B, V] where `rows` [B].

    -1 where it has no positive, finite sum.
    """
    total = weights.sum(-1)
    sound = (total > 0) & torch.isfinite(total)
    return torch.where(sound | ~rows, rng.categorical(only(weights, rows & sound)), -1)
