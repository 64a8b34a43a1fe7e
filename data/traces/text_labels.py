"""Labels from the target's text alone: the draft's draws are taken in expectation.

What a lossless rule commits follows the target's distribution, so a mean over texts of the target
is a mean over what a decoder commits. SpecInfer, at a node with m draws, commits the text's next
token x by accepting draw j with probability min((p - c q)_+, z q)(x), where (c, z) is its state
after j - 1 rejections. A rejected token has no residual mass, so no rejected draw is x, and each of
the m - j draws after it is x with probability q(x). Along a text the number of drafted paths that
pass through it is thus a Markov chain, which gives all trees at every position:

    E[tau + 1] = 1 + sum over depths of E[chance that a path with the text so far is accepted
                                          * acceptance rate of the draws there]

Example: a path of two tokens, with acceptance rates 0.5 at the root and 0.8 after it, where the
text's token has q(x) / p(x) = 0.6: 1 + 0.5 + 0.6 * 0.8 = 1.98.

On a single path Traversal is block verification, whose chance to keep a prefix of the text is the
least of the products q / p on the way, at most 1. Its labels here are SpecInfer's, plus what it
gains over SpecInfer on a path of that depth: unbiased on a path, and up to 4 % off on several, in
either direction (enumerated for chains of two tokens).
"""

from math import comb
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nde_talf.decoding.actions import K_MAX, L1_MAX, L2_MAX, TREES
from nde_talf.decoding.rules.labels.pooling import pooling
from nde_talf.decoding.rules.residual import excess
from nde_talf.decoding.super_tree import super_tree_layout

DEPTH = L1_MAX + L2_MAX


class TextRows(NamedTuple):
    """Numbers of a text's positions, which its labels are made of.

    Attributes:
        rates: [L, K], acceptance rate of 1 .. K draws.
        given: [L, K], chance that draw j is accepted and is the next token, over p(next).
        repeat: [L], q(next).
        ratio: [L], q(next) / p(next).
    """

    rates: Tensor
    given: Tensor
    repeat: Tensor
    ratio: Tensor


def text_rows(p: Tensor, q: Tensor, following: Tensor) -> TextRows:
    """Compute the numbers at positions with p, q [L, V] and their next tokens [L]."""
    at = following[:, None]
    px, qx = (rows.gather(1, at)[:, 0].double() for rows in (p, q))
    px = px.clamp(min=torch.finfo(torch.float32).tiny)
    c, z = torch.zeros_like(px), torch.ones_like(px)
    rates, given = [], []
    for _ in range(K_MAX):
        given.append(torch.minimum(excess(px, qx, c), z * qx) / px)
        c = c + z
        z = excess(p, q, c).sum(-1, dtype=torch.float64)
        rates.append(1 - z)
    return TextRows(torch.stack(rates, -1), torch.stack(given, -1), qx, qx / px)


def text_labels(rows: TextRows, roots: Tensor) -> dict[str, Tensor]:
    """Estimate E[tau + 1] [R, 233] by rule at the positions `roots` [R].

    After the last position of `rows` nothing is accepted.
    """
    window = roots[:, None] + torch.arange(DEPTH, device=roots.device)
    outside = window >= len(rows.repeat)
    window = window.clamp(max=len(rows.repeat) - 1)
    rates, given = (x[window].masked_fill(outside[..., None], 0) for x in (rows.rates, rows.given))
    ratio = rows.ratio[window].masked_fill(outside, 0)
    one_by_one = given[..., 0].cumprod(1)
    reach = pad(one_by_one, (1, 0), value=1.0)
    trunk = pad((reach[:, :-1] * rates[..., 0]).cumsum(1), (1, 0))
    moves, points = _moves(given, rows.repeat[window]), torch.arange(L1_MAX + 1)
    # [R, branch points, K, paths]: chance that so many of K paths pass through the text's token
    passing = reach[:, points, None, None] * torch.eye(K_MAX).to(reach)
    gains = [torch.zeros_like(passing[..., 0])]
    for at in (points + level for level in range(L2_MAX)):
        gains.append((passing * rates[:, at, None]).sum(-1))
        passing = passing @ moves[:, at]
    value = 1 + trunk[:, points, None, None] + torch.stack(gains, -1).cumsum(-1)
    specinfer = value.transpose(1, 2).flatten(1) @ pooling(super_tree_layout()).to(value)
    block = ratio.cumprod(1).clamp(max=1).cummin(1).values
    kept, alone = (pad(1 + x.cumsum(1), (1, 0), value=1.0) for x in (block, one_by_one))
    traversal = specinfer + (kept - alone)[:, [tree.depth for tree in TREES]]
    return {"specinfer": specinfer.float(), "traversal": traversal.float()}


def _moves(given: Tensor, repeat: Tensor) -> Tensor:
    """Return [R, D, K, K]: the chance that m paths continue as n paths through the text's token."""
    moves = given.new_zeros(*given.shape, K_MAX)
    for m in range(1, K_MAX + 1):
        for j in range(1, m + 1):
            for same in range(m - j + 1):
                chance = comb(m - j, same) * repeat**same * (1 - repeat) ** (m - j - same)
                moves[..., m - 1, same] += given[..., j - 1] * chance
    return moves
