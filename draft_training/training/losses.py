"""The losses of a draft head: `talf_loss`, and `eagle_loss` for EAGLE and HASS.

Each returns per-node losses and their weighted sum.

A node is a position where the head predicts the target: the root of a tree, or a drafted token. At
a node q is the head's distribution of the next token and f its feature; p and h are the target's.
Each loss is a weighted sum of three terms:

- classification: the cross-entropy -sum_v p(v) log q(v);
- distillation: the same sum over the target's 10 most likely tokens alone;
- regression: smooth L1 (or L1) between f and h.

The cross-entropies hold a chunk of rows at a time, and compute the sum's gradient along with it.
Tests compare them with autograd's of all rows at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nde_talf.decoding.models.lm_head import Readout
from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.registry import LOSSES, loss
from nde_talf.draft_training.training_settings import EagleLoss, Loss, TalfLoss


@dataclass(frozen=True)
class HeadReadout(Readout):
    """The target's frozen readout, and a head's own matrix where it has one.

    Products are taken in the weights' dtype.

    Args:
        matrix: the head's own, [V, H] or [D, H], which gets gradients; None where the target's is
            used.
        vocabulary: ids [D] of the tokens that the head can draft, ascending; None: all.
        chunk: rows of [V] held at once; fewer on a CPU, so that they stay in its cache.
    """

    matrix: Tensor | None = None
    vocabulary: Tensor | None = None
    chunk: int = 512

    @classmethod
    def of(cls, head: EagleHead) -> "HeadReadout":
        """Make the readout of `head`, in autocast's dtype where it is on."""
        target, matrix, kind = head.target.readout, head.own_matrix, head.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else target.weight.dtype
        weight, chunk = target.weight.to(dtype), 64 if kind == "cpu" else cls.chunk
        return cls(weight, target.bias, target.scale, target.cap, matrix, head.vocabulary, chunk)

    @cached_property
    def rows(self) -> Tensor:
        """The head's lm_head [V, H] or [D, H], in the dtype of products."""
        if self.matrix is not None:
            return self.matrix.to(self.weight.dtype)
        return self.weight if self.vocabulary is None else self.weight[self.vocabulary]

    def chunks(self, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Split tensors of equally many rows into chunks."""
        return zip(*(each.split(self.chunk) for each in rows), strict=True)

    def of_target(self, features: Tensor) -> Tensor:
        """Return the target's logits [R, V] of features [R, H], float32."""
        return self.finish(F.linear(features.to(self.weight.dtype), self.weight, self.bias).float())

    def of_head(self, features: Tensor) -> Tensor:
        """Return the head's logits [R, V], or [R, D] with a vocabulary, of features [R, H]."""
        logits = F.linear(features.to(self.rows.dtype), self.rows).float()
        return self.finish(logits) if self.matrix is None else logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of the head's logits z [R, V] by the products W f.

        It is s, or s (1 - (z / c)^2) with a soft cap c; with a matrix of the head's own, 1.
        """
        if self.matrix is not None:
            return 1.0
        if self.cap is None:
            return self.scale
        return (logits / self.cap).square_().neg_().add_(1).mul_(self.scale)


class NodeLosses(NamedTuple):
    """Losses of R nodes.

    Attributes:
        total: sum over the nodes of loss times weight; it alone has a gradient.
        loss: of each node, [R].
        agree: whether p and q have the same most likely token, bool [R].
    """

    total: Tensor
    loss: Tensor
    agree: Tensor


@loss("talf")
def talf_loss(
    features: Tensor,
    labels: Tensor,
    readout: HeadReadout,
    counts: Tensor,
    weights: Loss = TalfLoss(),
) -> NodeLosses:
    """Cross-entropy -sum_v y(v) log q(v) at R nodes, y = classification p + distillation p[top].

    TALF's weights make y = p (SALF & TALF paper, Algorithm 1, line 7). With the identity as the
    readout, features are logits. A target that gives 0.5, 0.3, 0.2 and a head that gives 0.6, 0.1,
    0.3 have the loss -(0.5 log 0.6 + 0.3 log 0.1 + 0.2 log 0.3) = 1.187:

    >>> p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.6, 0.1, 0.3]])
    >>> once, readout = torch.ones(1), HeadReadout(torch.eye(3))
    >>> round(talf_loss(q.log(), p.log(), readout, once).total.item(), 3)
    1.187

    With a draft vocabulary, as in EAGLE-3's code, p is restricted to it and renormalised, and the
    loss is 0 at nodes whose most likely token is outside.

    Args:
        features: the head's f at the nodes, [R, H]. Gradients reach it, and `readout.matrix`.
        labels: the target's h at the nodes, [R, H].
        readout: of both.
        counts: weights of the nodes in the sum, [R].
        weights: of the terms.
    """
    return NodeLosses(*_Fused.apply(features, readout.matrix, labels, readout, counts, weights))


@loss("eagle")
@loss("hass")
def eagle_loss(
    features: Tensor,
    labels: Tensor,
    readout: HeadReadout,
    counts: Tensor,
    weights: EagleLoss,
) -> NodeLosses:
    """EAGLE (Li et al. 2024): w_reg smoothL1(f, h) - w_cls sum_v p(v) log q(v).

    The features log 0.6, log 0.1, log 0.3 and log 0.5, log 0.3, log 0.2 are 0.182, 1.099 and 0.405
    apart. Smooth L1 is half the square within 1 and the distance less 0.5 beyond; the mean over the
    three is 0.232. With weights 1 and 0.1 the loss is 0.232 + 0.1 * 1.187 = 0.351:

    >>> p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.6, 0.1, 0.3]])
    >>> once, readout = torch.ones(1), HeadReadout(torch.eye(3))
    >>> weights = EagleLoss(regression=1.0, classification=0.1)
    >>> round(eagle_loss(q.log(), p.log(), readout, once, weights).total.item(), 3)
    0.351

    HASS (Zhang et al. 2025) adds - w_dis sum_{v in top-10 of p} p(v) log q(v). q is normalised over
    all tokens in both sums. Of three tokens all are among the top 10, so that here the second sum
    equals the first: 0.232 + (0.1 + 0.2) * 1.187 = 0.589:

    >>> from nde_talf.draft_training.training_settings import HassLoss
    >>> weights = HassLoss(regression=1.0, classification=0.1, distillation=0.2)
    >>> round(eagle_loss(q.log(), p.log(), readout, once, weights).total.item(), 3)
    0.589

    Args: as `talf_loss` has them.
    """
    total, loss, agree = talf_loss(features, labels, readout, counts, weights)
    distance = weights.regression * regression(features, labels, weights.regression_norm)
    return NodeLosses(total + distance @ counts, loss + distance.detach(), agree)


def regression(features: Tensor, labels: Tensor, norm: str) -> Tensor:
    """Return smooth L1 (beta 1) between features [..., H], a mean over H: float32 or 64 [...].

    As in EAGLE's code. norm="l1": |f - h|, as the papers write it, likewise a mean, so that weights
    mean the same at every H.
    """
    distance = F.l1_loss if norm == "l1" else F.smooth_l1_loss
    kind = torch.promote_types(features.dtype, torch.float32)
    return distance(features.to(kind), labels.to(kind), reduction="none").mean(-1)


class _Fused(torch.autograd.Function):
    """Compute -sum_v y(v) log q(v) chunk by chunk, with gradients.

    The derivative of a row's loss by its logits is g = |y| q - y, with |y| = sum_v y(v). With z',
    the slope of the logits by the products W f, and the row's weight c:

        d total / d f = c (g z') @ W        d total / d W = sum over rows of (g z')^T @ c f
    """

    @staticmethod
    def forward(
        ctx,
        features: Tensor,
        matrix: Tensor | None,
        labels: Tensor,
        readout: HeadReadout,
        counts: Tensor,
        weights: Loss,
    ) -> tuple[Tensor, Tensor, Tensor]:
        counts, w = counts.float(), readout.rows
        by_matrix, found = None, []  # the gradient of `matrix`, summed in float32
        if ctx.needs_input_grad[1]:
            by_matrix = torch.zeros_like(matrix, dtype=torch.float32)
        # Slopes [512, V] are kept for two products; laws are computed in smaller chunks (`of`).
        for f, h, c in zip(
            *(x.split(HeadReadout.chunk) for x in (features, labels, counts)), strict=True
        ):
            chunks = readout.chunks(f, h)
            parts = (_node_slopes(guess, truth, readout, weights) for guess, truth in chunks)
            loss, agree, slope = map(torch.cat, zip(*parts, strict=True))
            found.append((loss, agree, ((slope @ w) * c[:, None]).to(f.dtype)))
            if by_matrix is not None:
                by_matrix += slope.T @ (f * c[:, None]).to(w.dtype)
        losses, agree, by_features = map(torch.cat, zip(*found, strict=True))
        ctx.save_for_backward(by_features, by_matrix)
        ctx.mark_non_differentiable(losses, agree)
        return losses @ counts, losses, agree

    @staticmethod
    def backward(ctx, upstream: Tensor, _losses, _agree):
        by_features, by_matrix = (
            None if each is None else each * upstream.to(each.dtype) for each in ctx.saved_tensors
        )
        return by_features, by_matrix, None, None, None, None


def _node_slopes(
    features: Tensor, labels: Tensor, readout: HeadReadout, weights: Loss
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of R nodes [R], whether p and q agree [R], and g z' [R, V]."""
    p, best = target_law(labels, readout)
    y, logits = weighted_labels(p, weights), readout.of_head(features)
    top, mass = logits.amax(-1, keepdim=True), y.sum(-1, keepdim=True)
    agree = (logits.gather(1, best.clamp(min=0)[:, None]) == top)[:, 0] & (best >= 0)
    expected, by_product = torch.linalg.vecdot(y, logits), readout.slope(logits)
    q = logits.sub_(top).exp_()
    norm = q.sum(-1, keepdim=True)
    loss = (mass * (top + norm.log()))[:, 0] - expected
    slope = q.mul_(mass / norm).sub_(y).mul_(by_product)
    return loss, agree, slope.to(readout.weight.dtype)


def target_law(labels: Tensor, readout: HeadReadout) -> tuple[Tensor, Tensor]:
    """Return p [R, V] at R nodes, and the index [R] of its most likely token.

    With a draft vocabulary p [R, D] is renormalised in it. At nodes whose most likely token is
    outside, p is 0 and the index -1.
    """
    logits = readout.of_target(labels)
    best = logits.argmax(-1)
    if readout.vocabulary is None:
        return logits.softmax(-1), best
    index = torch.searchsorted(readout.vocabulary, best).clamp(max=len(readout.vocabulary) - 1)
    inside = readout.vocabulary[index] == best
    p = logits[:, readout.vocabulary].softmax(-1) * inside[:, None]
    return p, index.where(inside, -1)


def weighted_labels(p: Tensor, weights: Loss) -> Tensor:
    """Return y [R, V] of the cross-entropy -sum_v y(v) log q(v)."""
    y = p if weights.classification == 1 else p * weights.classification
    if not weights.distillation:
        return y
    top = p.topk(min(weights.top, p.shape[-1]), -1)
    return y.scatter_add(1, top.indices, weights.distillation * top.values)


def tree_loss(
    features: Sequence[Tensor],
    labels: Sequence[Tensor],
    readout: HeadReadout,
    loss: Loss,
    weights: Sequence[Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum the losses of a tree's nodes, averaged over roots.

    With TALF this is Algorithm 1 of the SALF & TALF paper.

    Args:
        features: of the head, for each depth [..., k_d, H], with k_0 = 1. Larger depths may have
            fewer roots, drawn with the same expectation (`document_masks.choose_roots`).
        labels: at the same nodes.
        readout: of both.
        loss: name and weights of the loss.
        weights: of the roots [...], for each depth. Roots of weight 0 take no time.

    Returns:
        The loss, and without gradient for each depth d `loss_depth_d` and `agreement_depth_d`,
        means over its nodes, and `accepted_length`, which the agreements predict.
    """
    levels = []
    for guess, truth, weight in zip(features, labels, weights, strict=True):
        counted = weight.flatten().nonzero()[:, 0]
        nodes = (each.flatten(0, -3)[counted].flatten(0, 1) for each in (guess, truth))
        count = weight.flatten()[counted].repeat_interleave(guess.shape[-2])
        levels.append((*nodes, count.to(torch.promote_types(guess.dtype, torch.float32))))
    # All depths in one call: the gradient of a head's own matrix is kept once.
    guess, truth, counts = map(torch.cat, zip(*levels, strict=True))
    losses, agreements, sizes = {}, {}, [len(count) for *_, count in levels]
    with torch.autocast(guess.device.type, enabled=False):  # it would sum in bfloat16
        total, each, agree = LOSSES[loss.name](guess, truth, readout, counts, loss)
        terms = (x.split(sizes) for x in (each, agree, counts.to(each)))
        for depth, (level, agreed, count, guess) in enumerate(zip(*terms, features, strict=True)):
            losses[f"loss_depth_{depth}"] = level @ count / guess.shape[-2]
            share = agreed.to(count) @ count / count.sum().clamp(min=1e-9)
            agreements[f"agreement_depth_{depth}"] = share
    length = accepted_length(torch.stack([*agreements.values()]))
    return total, losses | agreements | {"accepted_length": length}


def accepted_length(agreement: Tensor) -> Tensor:
    """Predict the tokens per target pass from the agreement [D] by depth.

    For greedy decoding with a path of D drafted tokens: 1 + a_0 + a_0 a_1 + ... A head that agrees
    at 0.8, 0.5 and 0.5 of the nodes has

    >>> round(accepted_length(torch.tensor([0.8, 0.5, 0.5])).item(), 3)
    2.4
    """
    return 1 + agreement.cumprod(0).sum()


class NodeMetrics(NamedTuple):
    """Figures of R nodes, each [R].

    Attributes:
        kl: KL(p || q) in nats.
        agree: whether p and q have the same most likely token.
        overlap: sum_v min(p, q), the acceptance rate of one speculative draw.
    """

    kl: Tensor
    agree: Tensor
    overlap: Tensor


@torch.no_grad()
def node_metrics(features: Tensor, labels: Tensor, readout: HeadReadout) -> NodeMetrics:
    """Return `NodeMetrics` of the head's features [R, H] and the target's labels [R, H], float32.

    With a draft vocabulary q is 0 outside it, where the KL would be infinite: it is computed with p
    restricted to the vocabulary and renormalised.
    """
    parts, vocabulary = [], readout.vocabulary
    for guess, truth in readout.chunks(features, labels):
        log_p = readout.of_target(truth).log_softmax(-1)
        log_q = readout.of_head(guess).log_softmax(-1)
        best, guessed, p = log_p.argmax(-1), log_q.argmax(-1), log_p.exp()
        if vocabulary is not None:
            guessed, p = vocabulary[guessed], p[:, vocabulary]
            log_p = log_p[:, vocabulary].log_softmax(-1)
        overlap, p = torch.minimum(p, log_q.exp()).sum(-1), log_p.exp()
        parts.append(
            NodeMetrics(-(p * log_q).sum(-1) + (p * log_p).sum(-1), best == guessed, overlap)
        )
    return NodeMetrics(*map(torch.cat, zip(*parts, strict=True)))
