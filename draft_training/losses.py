"""What a draft head is trained to make small: TALF, HASS and EAGLE as weights of three terms a node.

Classification: cross-entropy from the target's to the head's next-token distribution, -sum_v p log q. Distillation: the same
sum over the target's top-10 tokens only (HASS). Regression: smooth L1 between the head's and the target's feature, a mean over
its H numbers. Pure functions of features and the frozen lm_head. Distributions exist only for a chunk of rows at a time: the
fused form computes a chunk's loss and its gradient together and keeps the gradient, [rows, H]. `reference_cross_entropy` is the
same thing written out, to test against.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from draft_training.settings import Terms


@dataclass
class TopLabels:
    """Soft labels cut to the target's m most likely tokens: ids [..., m] (descending), probabilities [..., m] (their sum is
    below 1; what is missing carries no loss)."""

    ids: Tensor
    probabilities: Tensor

    def __getitem__(self, rows) -> "TopLabels":
        return TopLabels(self.ids[rows], self.probabilities[rows])

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def shape(self) -> torch.Size:
        return self.ids.shape

    def flatten(self, first: int, last: int) -> "TopLabels":
        return TopLabels(self.ids.flatten(first, last), self.probabilities.flatten(first, last))


Labels = Tensor | TopLabels
"""Soft labels of rows: the target's features [R, H], of which p = softmax(lm_head h), or its most likely tokens."""


class RowMetrics(NamedTuple):
    """One value a row [R]: the loss -sum_v p log q; KL(p || q), nats; whether p and q have the same most likely token;
    the overlap sum_v min(p, q), the acceptance rate of one speculative draw."""

    loss: Tensor
    kl: Tensor
    agree: Tensor
    overlap: Tensor


def reference_cross_entropy(draft: Tensor, target: Tensor, lm_head: Tensor, terms: Terms = Terms()) -> Tensor:
    """Losses [R] of rows of features: draft, target [R, H]; lm_head [V, H]. Slow and plain: holds [R, V]."""
    p = (target @ lm_head.T).softmax(-1)
    log_q = (draft @ lm_head.T).log_softmax(-1)
    top = p.topk(min(terms.top, p.shape[-1]), -1)
    distilled = -(top.values * log_q.gather(-1, top.indices)).sum(-1)
    return terms.classification * -(p * log_q).sum(-1) + terms.distillation * distilled


def regression(draft: Tensor, target: Tensor) -> Tensor:
    """Smooth L1 (beta 1) between features [..., H], a mean over H: [...]. EAGLE's code; its paper and 003 write an L1 norm."""
    return F.smooth_l1_loss(draft, target.to(draft.dtype), reduction="none").mean(-1)


def _label_weights(labels: Labels, lm_head: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """y [n, V] with loss = -sum_v y(v) log q(v), and the target's most likely tokens [n]."""
    if isinstance(labels, TopLabels):
        probabilities = labels.probabilities.float()
        weight = terms.classification + terms.distillation * (
            torch.arange(labels.ids.shape[-1], device=lm_head.device) < terms.top
        )
        y = probabilities.new_zeros(len(labels), len(lm_head)).scatter_(1, labels.ids.long(), weight * probabilities)
        return y, labels.ids[:, 0].long()
    p = (labels.to(lm_head.dtype) @ lm_head.T).float().softmax(-1)
    best = p.argmax(-1)
    if terms.distillation:
        top = p.topk(min(terms.top, p.shape[-1]), -1)
        p = (p * terms.classification).scatter_add_(1, top.indices, terms.distillation * top.values)
    elif terms.classification != 1:
        p = p * terms.classification
    return p, best


def _restricted_labels(labels: Tensor, lm_head: Tensor, vocabulary: Tensor) -> tuple[Tensor, Tensor]:
    """Of the target's features [n, H]: y [n, D], its distribution over `vocabulary` [D] alone, with the sum 1, or 0 where its
    most likely token is none of these; and the place of that token among them [n], or -1. As in EAGLE-3's code."""
    logits = (labels.to(lm_head.dtype) @ lm_head.T).float()
    best = logits.argmax(-1)
    place = torch.searchsorted(vocabulary, best).clamp(max=len(vocabulary) - 1)
    kept = vocabulary[place] == best
    return logits[:, vocabulary].softmax(-1) * kept[:, None], place.where(kept, -1)


class _FusedCrossEntropy(torch.autograd.Function):
    """`reference_cross_entropy` with d loss / d draft = (|y| q - y) @ lm_head, |y| = sum_v y(v), chunk by chunk."""

    @staticmethod
    def forward(ctx, draft: Tensor, labels: Labels, lm_head: Tensor, terms: Terms, chunk: int) -> tuple[Tensor, Tensor]:
        losses, agrees = draft.new_empty(len(draft), dtype=torch.float32), [draft.new_empty(0, dtype=torch.bool)]
        slope = torch.empty_like(draft) if ctx.needs_input_grad[0] else None
        weight = lm_head.T
        for start in range(0, len(draft), chunk):
            part = slice(start, start + chunk)
            y, best = _label_weights(labels[part], lm_head, terms)
            logits = (draft[part].to(lm_head.dtype) @ weight).float()
            agrees.append(best == logits.argmax(-1))
            normaliser, total = logits.logsumexp(-1), y.sum(-1)
            losses[part] = total * normaliser - (y * logits).sum(-1)
            if slope is not None:
                q = logits.sub_(normaliser[:, None]).exp_().mul_(total[:, None])
                slope[part] = (q.sub_(y).to(lm_head.dtype) @ lm_head).to(slope.dtype)
        ctx.save_for_backward(slope)
        agree = torch.cat(agrees)
        ctx.mark_non_differentiable(agree)
        return losses, agree

    @staticmethod
    def backward(ctx, upstream: Tensor, _agree):
        (slope,) = ctx.saved_tensors
        return slope * upstream[:, None].to(slope.dtype), None, None, None, None


def fused_cross_entropy(
    draft: Tensor, labels: Labels, lm_head: Tensor, chunk: int = 512, terms: Terms = Terms()
) -> tuple[Tensor, Tensor]:
    """Losses [R] (classification and distillation), differentiable in `draft` only, and top-1 agreement [R] (bool).

    draft [R, H]; labels of R rows; lm_head [V, H], in whose dtype the products are taken. At most `chunk` rows of [V] exist
    at once.
    """
    with torch.autocast(draft.device.type, enabled=False):
        return _FusedCrossEntropy.apply(draft, labels, lm_head, terms, chunk)


def own_cross_entropy(
    draft: Tensor,
    own: Tensor,
    labels: Labels,
    lm_head: Tensor,
    chunk: int = 512,
    terms: Terms = Terms(),
    vocabulary: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`fused_cross_entropy` for a head that is read out by a matrix of its own: q = softmax(own draft), own [V, H], and the
    losses are differentiable in `draft` and `own`. At most `chunk` rows of [V] exist at once: the gradient computes them again.

    vocabulary [D]: of which tokens `own` [D, H] has rows. p is then that of features (no TopLabels) restricted to them and
    renormalised, and a row whose most likely token is none of them has no loss and no agreement; classification alone.
    """

    def one(draft: Tensor, own: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
        if vocabulary is None:
            y, best = _label_weights(labels, lm_head, terms)
        else:
            y, best = _restricted_labels(labels, lm_head, vocabulary)
        log_q = (draft.to(own.dtype) @ own.T).float().log_softmax(-1)
        return -(y * log_q).sum(-1), log_q.argmax(-1) == best

    with torch.autocast(draft.device.type, enabled=False):
        parts = [
            checkpoint(one, draft[at : at + chunk], own, labels[at : at + chunk], use_reentrant=False)
            for at in range(0, len(draft), chunk)
        ]
    if not parts:
        return draft.new_zeros(0, dtype=torch.float32), draft.new_zeros(0, dtype=torch.bool)
    losses, agree = zip(*parts, strict=True)
    return torch.cat(losses), torch.cat(agree)


def tree_loss(
    draft: Sequence[Tensor],
    labels: Sequence[Labels],
    lm_head: Tensor,
    chunk: int = 512,
    terms: Terms = Terms(),
    weights: Sequence[Tensor] | None = None,
    own: Tensor | None = None,
    vocabulary: Tensor | None = None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The sum over a tree's nodes of their terms, averaged over roots. With classification alone, Algorithm 1 of the
    SALF & TALF paper.

    draft: for each depth, features [..., k_d, H] of the head (k_0 = 1); labels: at the same nodes; weights: of the roots
    [...], for each depth (default: all equal, sum 1). A root of weight 0 costs nothing. Roots may be fewer at larger depths,
    chosen so that the expectation stays (`packing.choose_roots`). own [V, H]: reads the draft's features, with gradient; None:
    lm_head does. vocabulary: of `own`, as in `own_cross_entropy`. Returns the loss, and for each depth the mean loss and the
    top-1 agreement of a node, without gradient.
    """
    total, losses, agreements = torch.zeros((), device=lm_head.device), [], []
    for depth, (guess, truth) in enumerate(zip(draft, labels, strict=True)):
        guess, truth = guess.flatten(0, -3), truth.flatten(0, len(truth.shape) - 3)
        if weights is None:
            weight = guess.new_full((len(guess),), 1 / len(guess))
        else:
            weight = weights[depth].flatten().to(guess.dtype)
            counted = weight.nonzero()[:, 0]
            guess, truth, weight = guess[counted], truth[counted], weight[counted]
        width = guess.shape[1]
        guess, truth = guess.flatten(0, 1), truth.flatten(0, 1)
        if own is None:
            rows, agree = fused_cross_entropy(guess, truth, lm_head, chunk, terms)
        else:
            rows, agree = own_cross_entropy(guess, own, truth, lm_head, chunk, terms, vocabulary)
        if terms.regression:
            rows = rows + terms.regression * regression(guess, truth)
        level = (rows.view(len(weight), width).sum(1) * weight).sum()
        total = total + level
        losses.append(level.detach() / width)
        agreements.append((agree.float().view(len(weight), width).mean(1) * weight).sum() / weight.sum().clamp(min=1e-9))
    return total, losses, agreements


@torch.no_grad()
def row_metrics(
    draft: Tensor,
    target: Tensor,
    lm_head: Tensor,
    chunk: int = 512,
    own: Tensor | None = None,
    vocabulary: Tensor | None = None,
) -> RowMetrics:
    """`RowMetrics` of rows of features draft, target [R, H] under lm_head [V, H], the draft's under `own` where it has one;
    float32, a chunk at a time. vocabulary [D]: of which tokens `own` has rows; q is 0 elsewhere, and loss and kl, which would
    be infinite, are those of p restricted to it and renormalised."""
    parts = []
    for guess, truth in zip(draft.split(chunk), target.split(chunk), strict=True):
        log_p = F.linear(truth, lm_head).float().log_softmax(-1)
        log_q = F.linear(guess, lm_head if own is None else own).float().log_softmax(-1)
        best, guessed = log_p.argmax(-1), log_q.argmax(-1)
        if vocabulary is not None:
            log_p, guessed = log_p[:, vocabulary], vocabulary[guessed]
        overlap = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
        if vocabulary is not None:
            log_p = log_p.log_softmax(-1)
        p = log_p.exp()
        loss = -(p * log_q).sum(-1)
        parts.append(RowMetrics(loss, loss + (p * log_p).sum(-1), best == guessed, overlap))
    return RowMetrics(*(torch.cat(column) for column in zip(*parts, strict=True)))
