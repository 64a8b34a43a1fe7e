"""Top-down rules: walk from the root, ask an OTLP solver for a token at every node, follow it while it was drafted.

The solver f(p, q, X, rng) returns a token distributed as p when the draws X are i.i.d. from q. Its branching
probabilities decide the expected block efficiency given a tree (Eq. 1 to 3, NDE paper).
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from decoding.sampling import Rng
from decoding.tree import DraftTree, Verdict
from decoding.verification.bundles import Level, joined

Solver = Callable[..., int]  # (p, q, X, rng), and for children drawn without replacement also `DraftTree.masses`


def walk(tree: DraftTree, rng: Rng, solve: Solver, distinct: bool = False) -> Verdict:
    """Verify `tree` top-down (section 3.2, NDE paper). distinct: children were drawn without replacement."""
    node, path = 0, []
    while children := tree.children[node]:
        drafted = [tree.tokens[child] for child in children]
        masses = [tree.masses(node)] if distinct else []
        token = solve(tree.p[node], tree.q[node], drafted, rng, *masses)
        if token not in drafted:
            return Verdict(path, token)
        node = children[drafted.index(token)]
        path.append(node)
    return Verdict(path, rng.categorical(tree.p[node]))


class Branching(Protocol):
    """Branching probabilities of one solver at rows of p, q [R, V], of which row r has up to draws[r] children."""

    def __init__(self, p: Tensor, q: Tensor, draws: Tensor): ...

    def contributions(self, level: Level) -> Tensor:
        """[B, S, K]: what each draw adds to B(f, X, its token); summing over equal tokens gives B. Nought for draws outside
        the subset."""

    def last(self, level: Level) -> Tensor:
        """[B, S, K]: the same in expectation over the children, given only how many a node has: as far as the solver has a
        closed form for it (its acceptance rate, at the first draw of the node)."""


def top_down_gains(rule: Branching, levels: list[Level], start: Tensor) -> tuple[Tensor, Tensor]:
    """Cumulative gains [B, S, L + 1] in E[tau + 1] over the first 0..L levels, from reach probability `start` [B]: as sampled,
    and with the last level counted taken in expectation over its children.

    Summing contributions draw by draw equals summing branching probabilities over distinct children. The second is unbiased
    too, with less noise: E[reach of level d] = E[sum over nodes of level d - 1 of reach * alpha].
    """
    member = levels[0].member
    reach = start.double()[:, None, None].expand(-1, len(member), member.shape[1])
    before = torch.zeros_like(reach[..., 0])
    sampled, expected = [before], [before]
    whole = joined(levels)
    each, last = (x.view(len(levels), -1, *x.shape[1:]) for x in (rule.contributions(whole), rule.last(whole)))
    for level, contributions, rates in zip(levels, each, last, strict=True):
        expected.append(before + (reach * rates).sum(-1))
        before = before + (reach * contributions).sum(-1)
        sampled.append(before)
        reach = reach * (contributions[:, :, None, :] * level.same_next).sum(-1)
    return torch.stack(sampled, -1), torch.stack(expected, -1)


def at_first(alpha: Tensor, level: Level) -> Tensor:
    """Acceptance rates alpha [R, draws + 1] by row and number of children -> [B, S, K] at each node's first member draw."""
    first = level.member & (level.earlier == 0)
    return by_draws(alpha, level, level.draws) * first


def by_draws(table: Tensor, level: Level, draws: Tensor) -> Tensor:
    """table [R, n] looked up at each draw's node and `draws` [B, S, K] -> [B, S, K]."""
    rows = table[level.node].unsqueeze(1).expand(-1, draws.shape[1], -1, -1)
    return rows.gather(-1, draws[..., None])[..., 0]
