"""A draft head after its own n-th most likely token: accuracy and calibration (Figure 2b of the SALF & TALF paper)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from data.dialogues.token_rows import TokenRows
from decoding.model import CausalModel
from draft_training.evaluate import rows_with_roots
from draft_training.head import EagleHead
from draft_training.target_trees import target_features, target_levels
from draft_training.tree_attention import TreeLevel

BINS = 15  # of the calibration error, equally wide


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Expected calibration error (Guo et al. 2017): the sum over bins of |mean right - mean confidence|, weighted with the
    fraction of the outcomes in a bin.

    Args:
        confidence: [n], the head's probability of the target's most likely token, as in the paper's Appendix A.
        right: [n], whether that is the head's most likely token too.
    """
    index = np.minimum((confidence * BINS).astype(int), BINS - 1)
    return float(sum(abs((right - confidence)[index == b].sum()) for b in range(BINS)) / len(confidence))


@torch.inference_mode()
def after_ranks(
    head: EagleHead, target: CausalModel, rows: TokenRows, ranks: int = 5, stride: int = 8
) -> tuple[np.ndarray, np.ndarray]:
    """Confidence and right (see `calibration_error`), each [ranks, n], at every `stride`-th root of the rows of text."""
    found: list[tuple[Tensor, Tensor]] = []
    for row, roots in rows_with_roots(rows.to(target.device), stride):
        tokens, document = row.tokens, row.document
        _, features = target_features(target, tokens, document, layers=head.feature_layers)
        first = head.tree_features(tokens, features, roots, [], document=document)[0][:, roots - 1]
        guesses = head.logits(first).topk(ranks, -1).indices
        levels = [TreeLevel(guesses, torch.zeros_like(guesses))]
        q = head.logits(head.tree_features(tokens, features, roots, levels, document=document)[-1]).float().softmax(-1)
        best = target.logits(target_levels(target, tokens, roots, levels, document=document)[0]).argmax(-1)
        confidence, right = q.gather(-1, best[..., None])[..., 0], (q.argmax(-1) == best).float()
        found.append((confidence.flatten(0, 1), right.flatten(0, 1)))
    confidence, right = (torch.cat(part).T.cpu().numpy() for part in zip(*found, strict=True))
    return confidence, right
