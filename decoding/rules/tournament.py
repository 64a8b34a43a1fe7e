"""Khisti's importance-weighted selection: a sequence of pairwise tournaments turns k i.i.d. draws
into one token Y.

A stage chooses between Y ~ a and a new draw X ~ q. Of an unordered pair {i, j} of mass a_i q_j +
a_j q_i, i is chosen with probability w_ij. Any w is lossless as long as r, the law of Y afterwards,
is computed from it; w only decides how much of p the later acceptance min(1, p / r) can cover. Here
an optimal program divides the pairs of a few core tokens, and in every other pair the token of
better rank wins.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.rules.ranking import advantage, order_by, order_of, place, rank_key
from nde_talf.decoding.rules.rules import where
from nde_talf.decoding.sampling import Rng

GRID = 20  # theta in steps of 1 / GRID


@dataclass(frozen=True)
class Tournament:
    """How a stage chooses. core: tokens whose pairs are shared out by the program (0: none). order:
    what the rest is ranked by, "score" (p - a q, what a token still needs) or "ratio" (p / q).
    guard: mix with "keep Y" where the tournament alone would cover less. exact: rank by the full
    float32 of that number, not by its upper half.

    The default accepts most on real pairs (benchmarks/results/khisti.md), where p and q are close
    and an unguarded tournament skews a good draft. `PAPER` is that of Khisti et al.: the truncated
    linear program over 5 tokens.
    """

    core: int = 0
    order: str = "ratio"
    guard: bool = True
    exact: bool = False

    def __post_init__(self) -> None:
        if self.order not in ("score", "ratio") or self.core < 0:
            raise ValueError(
                f"order={self.order}, core={self.core}: order is score or ratio, core 0 or more"
                " tokens."
            )


DEFAULT, PAPER = Tournament(), Tournament(5, "score", guard=False, exact=True)


@dataclass
class Stage:
    """One stage at one node. key [V] ranks tokens (ties by id); wins[i, j]: probability that core
    token i beats j; theta: probability that the stage takes place, Y is kept otherwise.
    """

    key: Tensor
    wins: dict[tuple[int, int], float]
    theta: float = 1.0

    def keeps(self, y: int, x: int) -> float:
        """Probability that Y = y survives a draw x."""
        if y == x:
            return 1.0
        win = self.wins.get((y, x))
        if win is None:
            win = float((float(self.key[y]), y) > (float(self.key[x]), x))
        return self.theta * win + 1 - self.theta


def play(p: Tensor, q: Tensor, k: int, how: Tournament) -> tuple[list[Stage], list[Tensor]]:
    """The k - 1 stages at a node with k draws from q [V], and the laws r [V] of Y after 0..k - 1 of
    them.

    They depend on p and q alone, so stages of fewer draws are the first of these.
    """
    stages, laws, ranks = [], [q], None
    for _ in range(k - 1):
        if ranks is None or how.order == "score":
            ranks = _ranks(p, laws[-1], q, how)
        stage, law = _stage(p, laws[-1], q, how, *ranks)
        stages.append(stage)
        laws.append(law)
    return stages, laws


def _ranks(p: Tensor, a: Tensor, b: Tensor, how: Tournament) -> tuple[Tensor, Tensor]:
    """Keys [V], and token ids from the worst to the best."""
    if how.order == "ratio":
        score = advantage(p, b)
        return rank_key(score, how.exact), order_by(score, how.exact)
    key = rank_key((p - a * b).float(), how.exact)
    return key, order_of(key)


def _stage(
    p: Tensor, a: Tensor, b: Tensor, how: Tournament, key: Tensor, order: Tensor
) -> tuple[Stage, Tensor]:
    pairs = torch.stack([a.index_select(0, order), b.index_select(0, order)])
    ranked, worse = stage_law(*pairs)
    wins: dict[tuple[int, int], float] = {}
    if how.core > 1:
        s = min(how.core, len(order))
        core, (a_core, b_core), (a_out, b_out) = (
            order[-s:].flip(0),
            pairs[:, -s:].flip(1).tolist(),
            worse[:, -s].tolist(),
        )
        alone = [x * y + x * b_out + y * a_out for x, y in zip(a_core, b_core, strict=True)]
        demands = [
            max(target - own, 0.0) for target, own in zip(p[core].tolist(), alone, strict=True)
        ]
        masses = [
            [a_core[i] * b_core[j] + a_core[j] * b_core[i] for j in range(s)] for i in range(s)
        ]
        shares = share_out(masses, demands)
        ranked[-s:] = ranked.new_tensor(
            [own + sum(row) for own, row in zip(alone, shares, strict=True)]
        ).flip(0)
        ids = core.tolist()
        for i in range(s):
            for j in range(s):
                if i != j and masses[i][j] > 0:
                    wins[ids[i], ids[j]] = shares[i][j] / masses[i][j]
    law = torch.empty_like(ranked).scatter_(0, order, ranked)
    if not how.guard:
        return Stage(key, wins), law
    change = law.sub_(a)
    theta = best_mix(p, a, change)
    return Stage(key, wins, theta), torch.add(a, change, alpha=theta)


def play_rows(
    p: Tensor, q: Tensor, draws: Tensor, count: Tensor, rng: Rng
) -> tuple[Tensor, Tensor]:
    """The default tournament at B nodes at once: the winner [B, 1] among the first `count` [B] of
    `draws` [B, n], and its law [B, V].

    Tokens stay in the order of their rank, which is the same at every stage.
    """
    winner, law = draws[:, :1], q
    if draws.shape[1] < 2:
        return winner, law
    key = rank_key(advantage(p, q))
    order = key.argsort(dim=-1, stable=True)
    ranked_p, other_law = (rows.gather(-1, order) for rows in (p, q))
    own = other_law
    for stage in range(1, draws.shape[1]):
        change = stage_law(own, other_law)[0] - own
        theta = torch.where(count > stage, best_mix(ranked_p, own, change), 0.0)
        own = own + theta.to(own)[:, None] * change
        other = draws[:, stage, None]
        better = place(key, winner) >= place(key, other)
        keeps = torch.where(better[:, 0], 1.0, 1 - theta)
        winner = torch.where(rng.bernoulli(keeps)[:, None], winner, other)
    return winner, torch.empty_like(own).scatter_(-1, order, own)


def stage_law(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The law [..., V] of the better of Y ~ a and X ~ b, tokens ranked from the worst; and the mass
    of a and of b [2, ..., V] that is ranked strictly worse.
    """
    pairs = torch.stack([a, b])
    worse = pairs.cumsum(-1, dtype=torch.float64).to(pairs) - pairs
    return a * (b + worse[1]) + b * worse[0], worse


def best_mix(p: Tensor, a: Tensor, change: Tensor) -> Any:
    """Theta on the grid that maximises sum min(p, a + theta change), which is concave in theta.

    A number for rows [V], float64 [B] for [B, V].
    """
    mixed, many = torch.empty_like(a), p.dim() > 1

    def covered(step: Any) -> Any:
        if many:
            return torch.minimum(p, a + (step / GRID).to(a)[:, None] * change).sum(
                -1, dtype=torch.float64
            )
        return float(
            torch.minimum(p, torch.add(a, change, alpha=step / GRID, out=mixed), out=mixed).sum()
        )

    low: Any = torch.zeros(len(p), dtype=torch.float64, device=p.device) if many else 0
    high: Any = torch.full_like(low, GRID) if many else GRID
    for _ in range(GRID.bit_length()):
        if not many and low == high:
            break
        middle = (low + high) // 2
        rises = (covered(middle) < covered(middle + 1)) & (low < high)
        low, high = where(rises, middle + 1, low), where(rises, high, middle)
    return low / GRID


def share_out(masses: list[list[float]], demands: list[float]) -> list[list[float]]:
    """Split every pair's mass between its two tokens so that as much demand as possible is met:
    sum_i min(demand_i, sum_j share_ij) is maximal, share_ij + share_ji = masses_ij.

    Exact, by augmenting paths (the program is a maximum flow).

    masses [s][s] symmetric, the diagonal is not looked at. Returns the shares [s][s].
    """
    s = len(demands)
    shares = [
        [masses[i][j] if i < j else 0.0 for j in range(s)] for i in range(s)
    ]  # to begin with, the better wins
    spare = [sum(shares[i][j] for j in range(s) if j != i) - demands[i] for i in range(s)]
    for i in range(s):
        shares[i][i] = 0.0
    for _ in range(s * s * s):
        came: dict[int, int] = {i: -1 for i in range(s) if spare[i] > 1e-15}
        queue, end = deque(came), -1
        while queue and end < 0:
            i = queue.popleft()
            for j in range(s):
                if j not in came and shares[i][j] > 1e-15:
                    came[j] = i
                    queue.append(j)
                    if spare[j] < -1e-15:
                        end = j
                        break
        if end < 0:
            break
        route = [end]
        while came[route[-1]] >= 0:
            route.append(came[route[-1]])
        steps = list(zip(route[1:], route, strict=False))  # (from, to)
        amount = min(spare[route[-1]], -spare[end], *(shares[i][j] for i, j in steps))
        for i, j in steps:
            shares[i][j] -= amount
            shares[j][i] += amount
        spare[route[-1]] -= amount
        spare[end] += amount
    return shares
