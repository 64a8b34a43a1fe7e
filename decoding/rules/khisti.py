"""Khisti: a tournament turns the draws of a node into one token, which is then verified as a single
draft of law r (Algorithm 5, NDE paper, with the pair weights of every stage).
"""

from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.rules.bundles import Level, by_count
from nde_talf.decoding.rules.rules import Naive, Node, Nodes, ratio
from nde_talf.decoding.rules.tournament import DEFAULT, Tournament, play, play_rows
from nde_talf.decoding.sampling import Rng


class Khisti(Naive):
    """Select one token Y of law r by a tournament, accept it with min(1, p / r), otherwise draw
    from (p - r)_+.

    how: how stages are chosen; on a device always the default.
    """

    def __init__(self, how: Tournament = DEFAULT):
        self.how = how

    def select(self, node: Any, rng: Rng) -> Any:
        """The same node with the winner as its only draw, from the law r."""
        if isinstance(node, Nodes):
            winner, law = play_rows(node.p, node.q, node.draws, node.count, rng)
            return Nodes(node.p, law, winner, node.count.clamp(max=1))
        stages, laws = play(node.p, node.q, node.count, self.how)
        winner = node.drafted[0]
        for stage, other in zip(stages, node.drafted[1:], strict=True):
            if winner != other and not rng.bernoulli(stage.keeps(winner, other)):
                winner = other
        return Node(node.p, laws[-1], [winner])


class KhistiBranching:
    """B(f, X, t) = sum_y pi(y) [a(y) 1{t = y} + (1 - a(y)) p_res(t)] over all winners y, pi the law
    of the winner given X.

    The laws of Y are stored at drafted tokens only; one node's [V] numbers are held at a time.
    """

    def __init__(self, p: Tensor, q: Tensor, draws: Tensor, how: Tournament = DEFAULT):
        self.p, self.q, self.how = p, q, how
        self.covered = torch.zeros(
            len(p), int(draws.max()) + 1, dtype=torch.float64, device=p.device
        )
        self._level: Level | None = None

    def contributions(self, level: Level) -> Tensor:
        kept, corrected = self._parts(level)
        return kept + corrected

    def last(self, level: Level) -> Tensor:
        """Sum min(p, r), Algorithm 10's bound, in expectation; what the residual hits is left as
        sampled, since it has no closed form.
        """
        _, corrected = self._parts(level)
        first = level.member & (level.earlier == 0)
        return by_count(self.covered, level, level.draws) * first + corrected

    def _parts(self, level: Level) -> tuple[Tensor, Tensor]:
        """What draws gain as accepted winners, and as tokens that the residual lands on; both [B,
        S, K].
        """
        if self._level is not level:
            self._level, self._found = level, self._compute(level)
        return self._found

    def _compute(self, level: Level) -> tuple[Tensor, Tensor]:
        law, keeps = self._play(level)  # [B, K, n], [B, n, K, K]
        at = (level.draws - 1).clamp(min=0)
        r = law[:, None].expand(-1, at.shape[1], -1, -1).gather(-1, at[..., None])[..., 0]
        winner = self._winner_law(level, keeps)
        accept = ratio(level.px, r)
        refused = (winner * (1 - accept))[:, :, None, :]
        refused = torch.where(level.same & level.member[None, :, None, :], refused, 0.0).sum(-1)
        left = (1 - by_count(self.covered, level, level.draws)).clamp(min=1e-30)
        residual = ((level.px - r).clamp(min=0) / left).clamp(max=1)
        return winner * accept * level.member, refused * residual * level.fresh * level.member

    def _play(self, level: Level) -> tuple[Tensor, Tensor]:
        """The law of Y at every draw's token after 0.. stages, and keeps[b, m, j, k]: whether j
        survives k in stage m.
        """
        bundles, paths = level.node.shape
        law = torch.zeros(bundles, paths, paths, dtype=torch.float64)
        keeps = torch.ones(bundles, paths, paths, paths, dtype=torch.float64)
        nodes, tokens = level.node.tolist(), level.token.tolist()
        for b in range(bundles):
            groups: dict[int, list[int]] = {}
            for k, node in enumerate(nodes[b]):
                groups.setdefault(node, []).append(k)
            for node, members in groups.items():
                p, q = self.p[node], self.q[node]
                stages, laws = play(p, q, len(members), self.how)
                for n, r in enumerate(laws):
                    law[b, members, n] = r[[tokens[b][k] for k in members]].double().cpu()
                    self.covered[node, n + 1] = torch.minimum(p, r).sum()
                for m, stage in enumerate(stages, start=1):
                    for k in members[m:]:
                        for j in members[: members.index(k)]:
                            keeps[b, m, j, k] = stage.keeps(tokens[b][j], tokens[b][k])
        return law.to(level.px.device), keeps.to(level.px.device)

    @staticmethod
    def _winner_law(level: Level, keeps: Tensor) -> Tensor:
        """[B, S, K]: probability that each draw is the one its node's tournament selects."""
        earlier, paths = level.earlier, level.member.shape[1]
        winner = torch.zeros(earlier.shape, dtype=torch.float64, device=earlier.device)
        for k in range(paths):
            stage = keeps[:, None, :, :, k].expand(-1, earlier.shape[1], -1, -1)  # [B, S, m, j]
            index = earlier[..., k, None, None].expand(-1, -1, 1, paths)
            stage = stage.gather(2, index)[:, :, 0]
            before = torch.where(level.siblings[..., k, :], winner, 0.0)
            lost = before * (1 - stage)
            winner = winner - lost
            here = torch.where(earlier[..., k] == 0, 1.0, lost.sum(-1)) * level.member[:, k]
            winner[..., k] = winner[..., k] + here
        return winner
