"""Drivers of the top-down rules: on the host, and for B trees on a device (section 3.2, NDE paper).

Both start at the root, ask the rule for a token, and follow it while it was drafted. The host stops
at the first rejection. A device goes down all levels with a pointer to the current node of each
tree, so that the host does not wait for it: depth + 1 nodes of a tree are solved.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.rules.reduce import total
from nde_talf.decoding.rules.rules import EMPTY, Node, Nodes, Rule
from nde_talf.decoding.rules.trees import Trees
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.tree import DraftTree, Verdict


def solve(rule: Rule, node: Node, rng: Rng) -> int:
    """One token of law p, given draws from q. Stops at the first draw that is accepted."""
    node = rule.select(node, rng)
    state = rule.start(node)
    offered = node.drafted[: rule.offered]
    for draw, token in enumerate(offered):
        left = node.left[draw] if node.left else None
        if rng.bernoulli(rule.chance(node.px(draw), node.qx(draw), state, left)):
            return token
        state = rule.reject(node, state, left, draw + 1 == len(offered))
    weights = rule.residual(node, state)
    if node.is_p(weights) or total(weights) > EMPTY:
        return rng.categorical(weights)
    return rng.categorical(node.p)


def walk(rule: Rule, tree: DraftTree, rng: Rng, without_replacement: bool = False) -> Verdict:
    """The last accepted node of `tree`, 0 for the root, and the token after it."""
    end = 0
    while children := tree.children[end]:
        drafted = [tree.tokens[child] for child in children]
        left = tree.masses(end) if without_replacement else None
        token = solve(rule, Node(tree.p_at(end), tree.q[end], drafted, left), rng)
        if token not in drafted:
            return Verdict(end, token)
        end = children[drafted.index(token)]
    return Verdict(end, rng.categorical(rule.target(tree.p[end])))


def accept_law(rule: Rule, node: Nodes) -> tuple[Tensor, Any]:
    """Probabilities [B, n + 1] that each draw is the first to be accepted, and that none is; and
    the state after all of a node's draws.
    """
    count = node.count if rule.offered is None else node.count.clamp(max=rule.offered)
    state = rule.start(node)
    states, chances = [state], []
    for draw in range(
        node.draws.shape[1] if rule.offered is None else min(rule.offered, node.draws.shape[1])
    ):
        left = None if node.left is None else node.left[:, draw]
        chances.append(rule.chance(node.px(draw), node.qx(draw), state, left) * (draw < count))
        state = rule.reject(node, state, left)
        states.append(state)
    none = torch.ones(len(node.p), 1, dtype=torch.float64, device=node.p.device)
    if not chances:
        return none, state
    accept = torch.stack(chances, -1)
    missed = torch.cat([none, (1 - accept).cumprod(-1)], -1)
    one = none[:, 0]
    columns = (
        [x if isinstance(x, Tensor) else torch.full_like(one, x) for x in field]
        for field in zip(*states, strict=True)
    )
    fields = [torch.stack(column, -1) for column in columns]
    after = type(state)(*(field.gather(-1, count[:, None])[:, 0] for field in fields))
    return torch.cat([accept * missed[:, :-1], missed[:, -1:]], -1), after


def solve_rows(rule: Rule, node: Nodes, alive: Tensor, rng: Rng) -> Tensor:
    """A token [B] for every node that is `alive` [B]; the same law as `solve`. -1 where a row had
    no positive, finite sum.
    """
    node = rule.select(node, rng)
    law, state = accept_law(rule, node)
    first = rng.categorical(only(law, alive)) if law.shape[1] > 1 else torch.zeros_like(node.count)
    accepted = first < law.shape[1] - 1
    weights = rule.residual(node, state)
    if rule.offered != 0:
        weights = or_target(weights, node.p, node.count == 0)
    other = correction(weights, alive & ~accepted, rng)
    if law.shape[1] == 1:
        return other
    token = torch.where(
        accepted, node.draws.gather(-1, first.clamp(max=law.shape[1] - 2)[:, None])[:, 0], other
    )
    return torch.where(law.isfinite().all(-1), token, -1)


def or_target(residual: Tensor, p: Tensor, leaf: Tensor) -> Tensor:
    """`residual` [B, V], but p at a leaf [B], or where rounding left no mass."""
    return torch.where(
        (leaf | (residual.sum(-1, dtype=torch.float64) <= EMPTY))[:, None], p, residual
    )


def only(weights: Tensor, wanted: Tensor) -> Tensor:
    """`weights` [B, n] where `wanted` [B]; elsewhere all on the first, so that nothing is decided
    there.
    """
    certain = torch.zeros_like(weights)
    certain[:, 0] = 1
    return torch.where(wanted[:, None], weights, certain)


def correction(weights: Tensor, wanted: Tensor, rng: Rng) -> Tensor:
    """A token [B] of each row of `weights` [B, V] that is `wanted` [B]; -1 where it has no
    positive, finite sum.
    """
    total = weights.sum(-1)
    sound = (total > 0) & torch.isfinite(total)
    return torch.where(sound | ~wanted, rng.categorical(only(weights, wanted & sound)), -1)


def walk_trees(rule: Rule, trees: Trees, rng: Rng) -> Verdict:
    """The same for B trees on a device: end, token [B]. Reads nothing back."""
    end = torch.zeros_like(trees.tokens[:, 0])
    alive = torch.ones_like(end, dtype=torch.bool)
    token = torch.full_like(end, -1)
    for level in range(trees.depth + 1):
        p = trees.p(end)
        if level < trees.depth:
            node = Nodes(p, partial(trees.q, end), *trees.children(end, rule.offered != 0))
            drawn = solve_rows(rule, node, alive, rng)
        else:
            drawn = correction(rule.target(p), alive, rng)
        token = torch.where(alive, drawn, token)
        match = (trees.parents == end[:, None]) & (trees.tokens == drawn[:, None]) & alive[:, None]
        alive = match.any(1)
        end = torch.where(alive, match.to(torch.uint8).argmax(1), end)
    return Verdict(end, token)
