"""Acceptance rates and branching probabilities of the solvers at many nodes, and the best rate.

p, q: distributions [R, V] of target and draft at R nodes.
"""

import torch
from torch import Tensor

from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.rules.labels.branching import Bundle, levels
from nde_talf.decoding.rules.ranking import order_of

SOLVERS = ("nss", "naivetree", "spectr", "specinfer", "khisti")


def branching(solver: str, p: Tensor, q: Tensor, drafted: Tensor) -> Tensor:
    """Return [R, k]: what each of `drafted` [R, k] adds to its token's branching probability.

    drafted: token ids in draft order. Summed over the draws equal to t it is B(f, X, t).
    """
    rows, k = drafted.shape
    nodes = torch.arange(rows, device=p.device)[:, None, None].expand(-1, k, 1)
    bundle = Bundle(p, q, drafted[..., None], nodes)
    level = next(levels(bundle, torch.ones(1, k, dtype=torch.bool, device=p.device)))
    rule = VERIFIERS[solver].labels.branching(p, q, torch.full((rows,), k, device=p.device))
    added: Tensor = rule.parts(level)[0]
    return added[:, 0]


def acceptance(solver: str, p: Tensor, q: Tensor, k: int) -> Tensor:
    """Return alpha(f_{p,q,k}) [R], the probability that a solver returns one of k i.i.d. draws.

    Algorithms 6 to 9, NDE paper; for Khisti Algorithm 10, sum min(p, r), a lower bound.
    """
    counts = torch.full((len(p),), k, device=p.device)
    rule = VERIFIERS[solver].labels
    if solver != "khisti":
        alpha: Tensor = rule.branching(p, q, counts).alpha
        return alpha[:, k]
    laws = [rule.play(*rows, k)[1][-1] for rows in zip(p, q, strict=True)]
    return torch.minimum(p, torch.stack(laws)).sum(-1).double()


def optimal_acceptance(p: Tensor, q: Tensor, k: int) -> Tensor:
    """Return alpha* [R]: the highest acceptance rate of any solver with k i.i.d. draws.

    It is 1 + min_H p(H) - q(H)^k over prefixes H of the tokens in increasing order of p / q.
    """
    order = order_of(p / q)
    p_head, q_head = (x.gather(-1, order).double().cumsum(-1).clamp(max=1) for x in (p, q))
    return 1 + (p_head - q_head**k).amin(-1).clamp(max=0)
