"""The one-parameter residual family that all sequential rules share.

Every residual target met while children of a node are rejected one by one is (w0 p - c q)_+ / Z with a scalar c, so a
node's state is (c, Z, D) and one fused reduction a rejection; no residual vector is kept.

With i.i.d. children and m of them rejected: c_0 = 0, Z_0 = w0, D_0 = 1; c_{m+1} = c_m + D_m;
Z_{m+1} = sum_t (w0 p(t) - c_{m+1} q(t))_+; D_{m+1} = Z_{m+1} + 1 - w0. The next child x has weight
min(1, (w0 p(x) - c_m q(x))_+ / (D_m q(x))). SpecInfer is w0 = 1; block and traversal verification carry w0 down.
Children drawn without replacement: q(x) / l_m in place of q(x) in the weight and c_{m+1} = c_m + D_m / l_m, where l_m is the
q-mass that the child was drawn from; the residual keeps the original q (DySpec, DySpec paper). l_m comes with the tree
(`DraftTree.masses`), since 1 minus the mass of the rejected ones has no correct digit once they have nearly all of it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from decoding.sampling import LEAST_MASS

_CACHED = 1 << 18  # numbers of a chunk that stay in a CPU's cache
_WHOLE = 1 << 26  # numbers of a chunk on a GPU


class Residual:
    """State of one node as its children are rejected. p, q: [V]; w0 in [0, 1]: the weight the node arrived with.

    left, of a child: the mass of q that it was drawn from, 1 where draws are i.i.d. Below `LEAST_MASS` there was nothing to
    draw it from, so the child is passed over: it is never accepted, and its rejection tells nothing.
    """

    def __init__(self, p: Tensor, q: Tensor | None, w0: float = 1.0):
        self.p, self.q, self.w0 = p, q, w0
        self.c, self.z, self.d = 0.0, w0, 1.0

    def weight(self, token: int, left: float = 1.0) -> float:
        """Weight in [0, 1] of a next child drawn as `token`."""
        q = float(self.q[token])
        mass = self.w0 * float(self.p[token]) - self.c * q
        if mass <= 0 or left < LEAST_MASS:
            return 0.0
        scale = self.d * q / left
        return 1.0 if mass >= scale else mass / scale

    def reject(self, left: float = 1.0) -> None:
        """Account for one more rejected child, a repeated one too."""
        if left < LEAST_MASS:
            return
        self.c += self.d / left
        self.z = float(self.positive_part().sum(dtype=torch.float64))
        self.d = self.z + 1 - self.w0

    def positive_part(self) -> Tensor:
        """(w0 p - c q)_+, [V]: the residual target up to its normalisation."""
        if self.c == 0:
            return self.p
        q = self.q if isinstance(self.q, Tensor) else self.q.dense()
        if self.w0 == 1:
            return torch.sub(self.p, q, alpha=self.c).clamp_(min=0)
        return (self.w0 * self.p).sub_(q, alpha=self.c).clamp_(min=0)

    def target(self) -> Tensor:
        """Weights [V] to draw the correction token from: the positive part, or p itself where rounding (p = q) left
        no mass, a case of probability zero."""
        if self.c == 0:
            return self.p
        residual = self.positive_part()
        return residual if float(residual.sum(dtype=torch.float64)) > 1e-12 else self.p


def positive_sums(p: Tensor, q: Tensor, rows: Tensor, w0: Tensor, c: Tensor) -> Tensor:
    """Z = sum_t (w0 p(t) - c q(t))_+ for rows [M] of p, q [R, V] with scalars w0, c [M]; float64 [M].

    Only a chunk of rows is materialised. On a CPU large rows are read where they lie, without a copy.
    """
    if not len(rows):
        return torch.zeros(0, dtype=torch.float64, device=p.device)
    if in_place(p):
        scales = torch.where(w0 > 0, c / w0, 0.0).tolist()
        part = p.new_empty(rows_at_once(p), p.shape[-1])
        parts = [part[:size] for size in range(len(part) + 1)]
        sums = [
            torch.sub(p[run], q[run], alpha=scales[at.start], out=parts[run.stop - run.start]).clamp_(min=0).sum(-1)
            for at, run in runs(rows.tolist(), rows_at_once(p), scales)
        ]
        return torch.cat(sums).double() * w0
    w0, c = w0.to(p), c.to(p)
    sums = [
        p[row].mul_(w0[at, None]).addcmul_(q[row], c[at, None], value=-1).clamp_(min=0).sum(-1)
        for at, row in row_chunks(p, rows)
    ]
    return torch.cat(sums).double()


def in_place(p: Tensor) -> bool:
    """Whether rows of [V] numbers are so long that reductions read them where they lie, a few neighbours at a time."""
    return p.device.type == "cpu" and rows_at_once(p) <= 16


def runs(rows: list[int], most: int, also: list) -> Iterator[tuple[slice, slice]]:
    """Pairs (where in `rows`, rows of p) of at most `most` neighbouring rows in a row that share what `also` [M] gives."""
    start = 0
    for stop in range(1, len(rows) + 1):
        if stop == len(rows) or stop - start == most or rows[stop] != rows[stop - 1] + 1 or also[stop] != also[start]:
            yield slice(start, stop), slice(rows[start], rows[stop - 1] + 1)
            start = stop


def row_chunks(p: Tensor, rows: Tensor) -> Iterator[tuple[slice, slice | Tensor]]:
    """Pairs (where in `rows` [M], rows of p): neighbours as a view where `in_place`, else as many as fit."""
    if in_place(p):
        yield from runs(rows.tolist(), rows_at_once(p), rows.new_zeros(len(rows)).tolist())
    else:
        for start in range(0, len(rows), rows_at_once(p)):
            yield (chunk := slice(start, start + rows_at_once(p))), rows[chunk]


def rows_at_once(p: Tensor) -> int:
    """How many rows of [V] numbers a reduction should materialise at a time."""
    return max(1, (_CACHED if p.device.type == "cpu" else _WHOLE) // p.shape[-1])
