"""A draft head after its own n-th most likely token: accuracy and calibration (Figure 2b of the
SALF & TALF paper).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.evaluate import rows_with_roots
from nde_talf.draft_training.head import EagleHead
from nde_talf.draft_training.target_trees import target_features, target_levels
from nde_talf.draft_training.tree_attention import TreeLevel

BINS = 15  # of the calibration error, equally wide


def calibration_error(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error (Guo et al. 2017) of n outcomes: the sum over bins of confidence
    of |mean correct - mean confidence|, weighted with the fraction of the outcomes that are in the
    bin.

    (Appendix A of the SALF & TALF paper bins by the probability of the target's token instead,
    which measures the target's entropy where that is high.)

    Args:
        confidence: [n], the probability given to the most likely token.
        correct: [n], whether it was right, or how likely that was.
        bins: equally wide.
    """
    index = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [abs((correct[index == b] - confidence[index == b]).sum()) for b in range(bins)]
    return float(sum(gaps) / len(confidence))


@torch.inference_mode()
def after_ranks(
    head: EagleHead,
    target: CausalModel,
    rows: TokenRows,
    ranks: int = 5,
    stride: int = 8,
    of_label: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The head after its own n-th most likely token, n = 1..ranks (Figure 2b of the SALF & TALF
    paper).

    Args:
        stride: of the tokens that a root may be, every `stride`-th is one.
        of_label: as in Appendix A of that paper: confidence is the head's probability of the
            target's most likely token, and right is agree.

    Returns:
        Each [ranks, n]: agree (0 or 1), whether the head's most likely next token is the target's;
        confidence, the head's probability of its most likely token; right, the target's probability
        of that token, which is how often it is right where the target samples.
    """
    found: list[list[Tensor]] = [[], [], []]
    for row, roots in rows_with_roots(rows.to(target.device), stride):
        tokens, document = row.tokens, row.document
        _, features = target_features(target, tokens, document, layers=head.feature_layers)
        first = head.tree_features(tokens, features, roots, [], document=document)[0][:, roots - 1]
        guesses = head.logits(first).topk(ranks, -1).indices
        levels = [TreeLevel(guesses, torch.zeros_like(guesses))]
        q = (
            head.logits(head.tree_features(tokens, features, roots, levels, document=document)[-1])
            .float()
            .softmax(-1)
        )
        p = (
            target.logits(target_levels(target, tokens, roots, levels, document=document)[0])
            .float()
            .softmax(-1)
        )
        confidence, best = q.max(-1)
        agree = (best == p.argmax(-1)).float()
        right = p.gather(-1, best[..., None])[..., 0]
        if of_label:
            confidence, right = q.gather(-1, p.argmax(-1, keepdim=True))[..., 0], agree
        for parts, values in zip(found, (agree, confidence, right), strict=True):
            parts.append(values.flatten(0, 1))
    agree, confidence, right = (torch.cat(parts).T for parts in found)
    return agree, confidence, right
