"""Khisti: a tournament turns the draws of a node into one token, verified as one draft of law r.

Algorithm 5, NDE paper, with the pair weights of every stage.
"""

from itertools import combinations, product

import torch
from torch import Tensor

from nde_talf.decoding.registry import IID
from nde_talf.decoding.rules.labels.branching import Level
from nde_talf.decoding.rules.naive import Naive
from nde_talf.decoding.rules.residual import Node, ratio
from nde_talf.decoding.rules.tournament import play, play_program
from nde_talf.decoding.rules.walk import rule
from nde_talf.decoding.sampling.rng import Rng


@rule("khisti", IID, labels=True)
class Khisti(Naive):
    """Select one token Y of law r, accept it with min(1, p / r), otherwise draw from (p - r)_+."""

    tabled = False
    play = staticmethod(play)
    """Gives the stages and laws of the tournament among k draws, from p, q [V] and k."""

    def select(self, node: Node, rng: Rng) -> Node:
        """Return the node with the winner as its only draw, from the law r."""
        stages, laws = self.play(node.p, node.q, node.count)
        winner = node.drafted[0]
        for stage, other in zip(stages, node.drafted[1:], strict=True):
            if winner != other and not rng.bernoulli(stage.keeps(winner, other)):
                winner = other
        return Node(node.p, laws[-1], [winner])

    def branching(self, p: Tensor, q: Tensor, draws: Tensor) -> "KhistiBranching":
        """Return the branching probabilities at rows of p, q [R, V] with up to draws [R] draws."""
        return KhistiBranching(self, p, q, draws)


@rule("khisti_lp", IID, labels=True)
class KhistiProgram(Khisti):
    """Khisti with the tournament of Khisti et al."""

    play = staticmethod(play_program)


class KhistiBranching:
    """B(f, X, t) = sum_y pi(y) [a(y) 1{t = y} + (1 - a(y)) p_res(t)], pi the winner's law given X.

    The laws of Y are stored at drafted tokens only; one node's [V] numbers are held at a time.
    """

    def __init__(self, rule: Khisti, p: Tensor, q: Tensor, draws: Tensor):
        self.rule, self.p, self.q = rule, p, q
        self.covered = torch.zeros(
            len(p), int(draws.max()) + 1, dtype=torch.float64, device=p.device
        )

    def parts(self, level: Level) -> tuple[Tensor, Tensor]:
        """Return contributions as sampled, and in expectation over the children; both [B, S, K].

        The second takes sum min(p, r), Algorithm 10's bound, in expectation. What the residual hits
        is left as sampled, since it has no closed form.
        """
        law, keeps = self._play(level)  # [B, K, n], [B, n, K, K]
        at = (level.draws - 1).clamp(min=0)
        r = law[:, None].expand(-1, at.shape[1], -1, -1).gather(-1, at[..., None])[..., 0]
        winner = _winner_law(level, keeps)
        accept = ratio(level.px, r)
        refused = (winner * (1 - accept))[:, :, None, :]
        refused = torch.where(level.same & level.member[None, :, None, :], refused, 0.0).sum(-1)
        left = (1 - level.look_up(self.covered, level.draws)).clamp(min=1e-30)
        residual = ((level.px - r).clamp(min=0) / left).clamp(max=1)
        corrected = refused * residual * level.fresh * level.member
        return winner * accept * level.member + corrected, level.at_first(self.covered) + corrected

    def _play(self, level: Level) -> tuple[Tensor, Tensor]:
        """Return the law of Y at every draw's token after 0.. stages, and who survives whom.

        The second is keeps[b, m, j, k]: the probability that j survives k in stage m.
        """
        bundles, paths = level.node.shape
        law = torch.zeros(bundles, paths, paths, dtype=torch.float64)
        keeps = torch.ones(bundles, paths, paths, paths, dtype=torch.float64)
        nodes, tokens = level.node.tolist(), level.token.tolist()
        for b in range(bundles):
            for node in dict.fromkeys(nodes[b]):
                members = [k for k in range(paths) if nodes[b][k] == node]
                p, q, drawn = self.p[node], self.q[node], [tokens[b][k] for k in members]
                stages, laws = self.rule.play(p, q, len(members))
                for n, r in enumerate(laws):
                    law[b, members, n] = r[drawn].double().cpu()
                    self.covered[node, n + 1] = torch.minimum(p, r).sum()
                for (m, stage), (j, k) in product(enumerate(stages, 1), combinations(members, 2)):
                    keeps[b, m, j, k] = stage.keeps(tokens[b][j], tokens[b][k])
        return law.to(level.px.device), keeps.to(level.px.device)


def _winner_law(level: Level, keeps: Tensor) -> Tensor:
    """Return [B, S, K]: the probability that each draw is the one its node's tournament selects."""
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
