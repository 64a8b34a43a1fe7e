"""Acceptance rates and branching probabilities of the solvers at many nodes, and the best rate."""

from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.rules.check import check_rows
from nde_talf.decoding.rules.labels.branching import Bundle, Level, levels
from nde_talf.decoding.rules.ranking import order_of

SOLVERS = ("nss", "naivetree", "spectr", "specinfer", "khisti")


def branching(solver: str, p: Tensor, q: Tensor, drafted: Tensor) -> Tensor:
    """Return [R, k]: what each of `drafted` [R, k] adds to its token's branching probability.

    p, q: [R, V]; drafted: token ids in draft order. Summed over the draws equal to t it is B(f, X,
    t).

    Raises ValueError for rows that are no distributions or tokens that are no draws from q,
    UserError for an unknown solver.
    """
    rule, level = _at_rows(solver, p, q, drafted)
    return rule.parts(level)[0][:, 0]


def acceptance(solver: str, p: Tensor, q: Tensor, k: int) -> Tensor:
    """Return alpha(f_{p,q,k}) [R], the probability that a solver returns one of k i.i.d. draws.

    Algorithms 6 to 9, NDE paper; for Khisti Algorithm 10, sum min(p, r), a lower bound. p, q: [R,
    V]. Errors as for `branching`; k < 1 is a ValueError.
    """
    rule, level = _at_rows(solver, p, q, q.argmax(-1)[:, None].expand(-1, k))
    _, expected = rule.parts(level)
    return rule.covered[:, k] if solver == "khisti" else expected[:, 0].sum(-1)


def optimal_acceptance(p: Tensor, q: Tensor, k: int) -> Tensor:
    """Return alpha* [R]: the highest acceptance rate of any solver with k i.i.d. draws.

    It is 1 + min_H p(H) - q(H)^k over prefixes H of the tokens in increasing order of p / q. p, q:
    [R, V]. Raises ValueError as `acceptance` does.
    """
    _check_pair_of_rows(p, q)
    order = order_of(p / q)
    p_head, q_head = (x.gather(-1, order).double().cumsum(-1).clamp(max=1) for x in (p, q))
    return 1 + (p_head - q_head**k).amin(-1).clamp(max=0)


def _at_rows(solver: str, p: Tensor, q: Tensor, drafted: Tensor) -> tuple[Any, Level]:
    if solver not in SOLVERS:
        raise UserError(
            f"solver={solver}: there is no OTLP solver of that name; choose one of"
            f" {', '.join(SOLVERS)}."
        )
    _check_pair_of_rows(p, q)
    rows, k = drafted.shape
    if k < 1:
        raise ValueError(f"k={k}: a node needs at least one draw.")
    massless = (q.gather(-1, drafted) <= 0).any(-1)
    if bool(massless.any()):
        raise ValueError(
            f"drafted: node {int(massless.nonzero()[0])} has a token that q gives no mass, so it"
            " cannot have been drawn."
        )
    nodes = torch.arange(rows, device=p.device)
    bundle = Bundle(p, q, drafted[..., None], nodes[:, None, None].expand(-1, k, 1))
    rule = VERIFIERS[solver].labels.branching(p, q, torch.full((rows,), k, device=p.device))
    return rule, next(levels(bundle, torch.ones(1, k, dtype=torch.bool, device=p.device)))


def _check_pair_of_rows(p: Tensor, q: Tensor) -> None:
    """Raise ValueError unless p and q are distributions [n, V] of the same shape."""
    if p.shape != q.shape or p.dim() != 2 or not p.shape[1]:
        raise ValueError(
            f"q: its shape is {tuple(q.shape)}, but p has {tuple(p.shape)}; they need the same"
            " nodes and vocabulary."
        )
    check_rows("p", p)
    check_rows("q", q)
