"""Khisti's importance-weighted selection: a sequence of pairwise tournaments among i.i.d. draws.

It turns k draws into one token Y. A stage chooses between Y ~ a and a new draw X ~ q. Of an
unordered pair {i, j} of mass a_i q_j + a_j q_i, i is chosen with probability w_ij. Any w is
lossless as long as r, the law of Y afterwards, is computed from it; w only decides how much of p
the later acceptance min(1, p / r) can cover.

`play` accepts most on real pairs (benchmarks/results/khisti.md), where p and q are close: the token
of larger p / q wins, and a guard mixes with "keep Y" where the tournament alone would cover less.
`play_program` is the tournament of Khisti et al.: a linear program over the 5 tokens of largest
p - a q shares out their pairs, and in every other pair the token of larger p - a q wins.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise, permutations

import torch
from torch import Tensor

from nde_talf.decoding.rules.ranking import advantage, order_of, rank_key

GRID = 20  # theta in steps of 1 / GRID
CORE = 5  # tokens whose pairs the program shares out
_NOTHING = 1e-15


@dataclass
class Stage:
    """One stage at one node.

    Attributes:
        key: [V], ranks tokens, ties by id.
        theta: probability that the stage takes place, Y is kept otherwise.
        wins: [i, j] is the probability that token i of the program beats j.
    """

    key: Tensor
    theta: float = 1.0
    wins: dict[tuple[int, int], float] = field(default_factory=dict)

    def keeps(self, y: int, x: int) -> float:
        """Return the probability that Y = y survives a draw x."""
        if y == x:
            return 1.0
        win = self.wins.get((y, x))
        if win is None:
            win = float((float(self.key[y]), y) > (float(self.key[x]), x))
        return self.theta * win + 1 - self.theta


Played = tuple[list[Stage], list[Tensor]]
"""The k - 1 stages at a node with k draws from q [V], and the laws r [V] of Y after 0..k - 1."""


def play(p: Tensor, q: Tensor, k: int) -> Played:
    """Rank by p / q, with the guard.

    Stages depend on p and q alone, so fewer draws play the first of these.
    """
    stages, laws = list[Stage](), [q]
    if k > 1:
        key = rank_key(advantage(p, q))
        order = order_of(key)
    for _ in range(k - 1):
        law, _ = stage_law(laws[-1], q, order)
        change = law.sub_(laws[-1])
        theta = best_mix(p, laws[-1], change)
        stages.append(Stage(key, theta))
        laws.append(torch.add(laws[-1], change, alpha=theta))
    return stages, laws


def play_program(p: Tensor, q: Tensor, k: int) -> Played:
    """Rank by p - a q, with the program (Section 4 of Khisti et al.)."""
    stages, laws = list[Stage](), [q]
    for _ in range(k - 1):
        a = laws[-1]
        key = p - a * q
        order = order_of(key)
        law, worse = stage_law(a, q, order)
        core = order[-CORE:].flip(0)
        a_core, q_core, demands = (x[core].double() for x in (a, q, p))
        a_worse, q_worse = worse[:, -len(core)].double()
        alone = a_core * q_core + a_core * q_worse + q_core * a_worse
        masses = a_core[:, None] * q_core + a_core * q_core[:, None]
        unmet = (demands - alone).clamp(min=0)
        shares = masses.new_tensor(share_out(masses.tolist(), unmet.tolist()))
        law[core] = (alone + shares.sum(1)).to(law)
        ids, rates = core.tolist(), (shares / masses).tolist()
        wins = {
            (ids[i], ids[j]): rates[i][j]
            for i, j in permutations(range(len(ids)), 2)
            if masses[i, j] > 0
        }
        stages.append(Stage(key, wins=wins))
        laws.append(law)
    return stages, laws


def stage_law(a: Tensor, b: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return the law [V] of the better of Y ~ a and X ~ b.

    With it the mass of a and of b [2, V] that is ranked strictly worse, by rank.

    order: token ids from the worst.
    """
    pairs = torch.stack([a.index_select(0, order), b.index_select(0, order)])
    worse = pairs.cumsum(-1, dtype=torch.float64).to(pairs) - pairs
    ranked = pairs[0] * (pairs[1] + worse[1]) + pairs[1] * worse[0]
    return torch.empty_like(ranked).scatter_(0, order, ranked), worse


def best_mix(p: Tensor, a: Tensor, change: Tensor) -> float:
    """Return theta on the grid that maximises sum min(p, a + theta change), concave in theta."""

    def covered(step: int) -> float:
        return float(torch.minimum(p, torch.add(a, change, alpha=step / GRID)).sum())

    low, high = 0, GRID
    while low < high:
        middle = (low + high) // 2
        if covered(middle) < covered(middle + 1):
            low = middle + 1
        else:
            high = middle
    return low / GRID


def share_out(masses: list[list[float]], demands: list[float]) -> list[list[float]]:
    """Split every pair's mass between its two tokens so that as much demand as possible is met.

    sum_i min(demand_i, sum_j share_ij) is maximal, share_ij + share_ji = masses_ij. Exact, by
    augmenting paths (the program is a maximum flow).

    Args:
        masses: [s][s], symmetric; the diagonal is not looked at.
        demands: [s].

    Returns:
        The shares [s][s].
    """
    s = len(demands)
    # To begin with, the better wins.
    shares = [[masses[i][j] if i < j else 0.0 for j in range(s)] for i in range(s)]
    spare = [sum(shares[i]) - demands[i] for i in range(s)]
    for _ in range(s * s * s):
        route = _augmenting_route(shares, spare)
        if not route:
            break
        steps = list(pairwise(route))
        amount = min(spare[route[0]], -spare[route[-1]], *(shares[i][j] for i, j in steps))
        for i, j in steps:
            shares[i][j] -= amount
            shares[j][i] += amount
        spare[route[0]] -= amount
        spare[route[-1]] += amount
    return shares


def _augmenting_route(shares: list[list[float]], spare: list[float]) -> list[int]:
    """Return tokens from one with mass to spare to one that lacks it; none if there is no way."""
    came = {i: -1 for i, mass in enumerate(spare) if mass > _NOTHING}
    queue = deque(came)
    while queue:
        i = queue.popleft()
        for j, share in enumerate(shares[i]):
            if j in came or share <= _NOTHING:
                continue
            came[j] = i
            queue.append(j)
            if spare[j] < -_NOTHING:
                route = [j]
                while came[route[0]] >= 0:
                    route.insert(0, came[route[0]])
                return route
    return []
