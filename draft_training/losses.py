"""The tree-aware loss (TALF): cross-entropy from the target's to the head's next-token distribution at every node.

Pure functions of features and the frozen lm_head. Distributions exist only for a chunk of rows at a time: the fused
form computes a chunk's loss and its gradient together and keeps the gradient, [rows, H]. `reference_cross_entropy` is
the same thing written out, to test against.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class RowMetrics(NamedTuple):
    """One value a row [R]: the loss -sum_v p log q; KL(p || q), nats; whether p and q have the same most likely token;
    the overlap sum_v min(p, q), the acceptance rate of one speculative draw."""

    loss: Tensor
    kl: Tensor
    agree: Tensor
    overlap: Tensor


def reference_cross_entropy(draft: Tensor, target: Tensor, lm_head: Tensor) -> Tensor:
    """Losses [R] of rows of features: draft, target [R, H]; lm_head [V, H]. Slow and plain: holds [R, V]."""
    p = (target @ lm_head.T).softmax(-1)
    log_q = (draft @ lm_head.T).log_softmax(-1)
    return -(p * log_q).sum(-1)


class _FusedCrossEntropy(torch.autograd.Function):
    """`reference_cross_entropy` with d loss / d draft = (q - p) @ lm_head, chunk by chunk."""

    @staticmethod
    def forward(ctx, draft: Tensor, target: Tensor, lm_head: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        losses, agrees = draft.new_empty(len(draft), dtype=torch.float32), []
        slope = torch.empty_like(draft) if ctx.needs_input_grad[0] else None
        weight = lm_head.T
        for rows in torch.arange(len(draft)).split(chunk):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            p = (target[part].to(lm_head.dtype) @ weight).float()
            logits = (draft[part].to(lm_head.dtype) @ weight).float()
            agrees.append(p.argmax(-1) == logits.argmax(-1))
            p = p.softmax(-1)
            normaliser = logits.logsumexp(-1)
            losses[part] = normaliser - (p * logits).sum(-1)
            if slope is not None:
                q = logits.sub_(normaliser[:, None]).exp_()
                slope[part] = (q.sub_(p).to(lm_head.dtype) @ lm_head).to(slope.dtype)
        ctx.save_for_backward(slope)
        agree = torch.cat(agrees)
        ctx.mark_non_differentiable(agree)
        return losses, agree

    @staticmethod
    def backward(ctx, upstream: Tensor, _agree):
        (slope,) = ctx.saved_tensors
        return slope * upstream[:, None].to(slope.dtype), None, None, None


def fused_cross_entropy(draft: Tensor, target: Tensor, lm_head: Tensor, chunk: int = 512) -> tuple[Tensor, Tensor]:
    """Losses [R], differentiable in `draft` only, and top-1 agreement [R] (bool) of rows of features.

    draft, target [R, H]; lm_head [V, H], in whose dtype the products are taken. At most `chunk` rows of [V] exist at
    once.
    """
    with torch.autocast(draft.device.type, enabled=False):
        return _FusedCrossEntropy.apply(draft, target, lm_head, chunk)


def talf_loss(
    draft: Sequence[Tensor], target: Sequence[Tensor], lm_head: Tensor, chunk: int = 512
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The loss of Algorithm 1, paper 003: summed over a tree's nodes, averaged over roots.

    draft, target: for each depth, features [B, R_d, k_d, H] (k_0 = 1) of the head and of the target at the same nodes.
    Roots may be fewer at larger depths (R_d): each depth is averaged over its own, so a uniform choice of roots
    leaves the expectation as it is. Returns the loss, and for each depth the mean loss and the top-1 agreement of a
    node, without gradient.
    """
    total, losses, agreements = 0.0, [], []
    for guess, truth in zip(draft, target, strict=True):
        rows, agree = fused_cross_entropy(guess.flatten(0, -2), truth.flatten(0, -2), lm_head, chunk)
        mean = rows.mean()
        total = total + mean * guess.shape[2]
        losses.append(mean.detach())
        agreements.append(agree.float().mean())
    return total, losses, agreements


@torch.no_grad()
def row_metrics(draft: Tensor, target: Tensor, lm_head: Tensor, chunk: int = 512) -> RowMetrics:
    """`RowMetrics` of rows of features draft, target [R, H] under lm_head [V, H]; float32, a chunk at a time."""
    parts = []
    for guess, truth in zip(draft.split(chunk), target.split(chunk), strict=True):
        log_p = F.linear(truth, lm_head).float().log_softmax(-1)
        log_q = F.linear(guess, lm_head).float().log_softmax(-1)
        p = log_p.exp()
        loss = -(p * log_q).sum(-1)
        kl = loss + (p * log_p).sum(-1)
        agree = log_p.argmax(-1) == log_q.argmax(-1)
        parts.append(RowMetrics(loss, kl, agree, torch.minimum(p, log_q.exp()).sum(-1)))
    return RowMetrics(*(torch.cat(column) for column in zip(*parts, strict=True)))
