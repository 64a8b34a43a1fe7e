"""Held-out figures of a draft head: agreement, divergence, acceptance rates."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import track
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.model.tree_attention import tree_features
from nde_talf.draft_training.targets.document_masks import counted_roots
from nde_talf.draft_training.targets.target_trees import (
    TargetTrees,
    TreeLevel,
    target_beam,
    target_levels,
)
from nde_talf.draft_training.training.losses import (
    HeadReadout,
    NodeMetrics,
    accepted_length,
    node_metrics,
)

SAMPLED = 4  # tokens drafted in the simulated figure of a report
_STRIDE = 8  # every eighth root is measured


@torch.inference_mode()
def held_out_report(
    head: EagleHead,
    target: CausalModel,
    rows: TokenRows,
    k: int = 4,
    depth: int = 3,
) -> dict[str, Any]:
    """Measure how well `head` follows `target` after every eighth root of held-out rows.

    Returns `roots` (count); `agreement` and `kl` (nats), lists by depth over the nodes of the
    target's own beams; `accepted_length`, which the agreements predict; and `overlap`: mean of
    sum_v min(p, q) at the root and after 1, ..., 4 tokens sampled from q, which is the acceptance
    rate of one speculative draw at temperature 1. Nodes at and below an end of the text do
    not count: no decoder drafts after it.
    """
    report: dict[str, Any] = {"roots": 0}
    readout, generator = HeadReadout.of(head), torch.Generator().manual_seed(0)
    levels: list[list[NodeMetrics]] = [[] for _ in range(depth)]
    overlap: list[Tensor] = []
    counted = [*rows_with_roots(rows.to(target.device), _STRIDE)]
    for row, roots in track(counted, "evaluating the head on held-out text", len(counted), "row"):
        trees = target_beam(target, row.tokens, k, depth, roots, row.document, head.feature_layers)
        outputs = tree_features(
            head, row.tokens, trees.features, roots, trees.levels, document=row.document
        )
        outputs[0] = outputs[0][:, roots - 1, None]
        labels = [trees.along[:, roots, None], *trees.labels]
        report["roots"] += len(roots)
        marks = [torch.zeros_like(roots, dtype=torch.bool), *ended(trees.levels, target.ends)]
        for level, guess, truth, mark in zip(levels, outputs, labels, marks, strict=True):
            guess, truth = head.read(guess).flatten(0, 2), truth.flatten(0, 2)
            found = node_metrics(guess, truth, readout)
            level.append(NodeMetrics(*(x.float()[~mark.flatten()] for x in found)))
        overlap.append(sampled_overlap(head, target, trees, generator, row.document))
    if not report["roots"]:
        raise UserError("the held-out rows hold no token that counts; hold out more of them.")
    kl, agree, _ = zip(*(map(torch.cat, zip(*level, strict=True)) for level in levels), strict=True)
    report["agreement"] = [float(each.nanmean().nan_to_num()) for each in agree]
    report["kl"] = [float(each.nanmean().nan_to_num()) for each in kl]
    report["accepted_length"] = accepted_length(torch.tensor(report["agreement"])).item()
    report["overlap"] = torch.cat(overlap, 1).nanmean(1).nan_to_num().tolist()
    return report


def ended(levels: Sequence[TreeLevel], ends: Iterable[int]) -> list[Tensor]:
    """Mark the nodes [B, R, k] of each level at or below an end of the text."""
    marks: list[Tensor] = []
    for level in levels:
        ids = torch.tensor(sorted(ends), dtype=torch.long, device=level.tokens.device)
        above = marks[-1].gather(2, level.parents) if marks else False
        marks.append(torch.isin(level.tokens, ids) | above)
    return marks


def rows_with_roots(rows: TokenRows, stride: int) -> Iterator[tuple[TokenRows, Tensor]]:
    """Yield row by row [1, L], with every `stride`-th of its counted roots [R].

    Rows without roots are skipped.
    """
    counted = counted_roots(rows.loss, rows.document)
    for at in range(len(rows)):
        roots = counted[at].nonzero()[::stride, 0]
        if len(roots):
            yield rows[at : at + 1], roots


def sampled_overlap(
    head: EagleHead,
    target: CausalModel,
    trees: TargetTrees,
    generator: torch.Generator,
    document: Tensor | None,
) -> Tensor:
    """Compute sum_v min(p, q) [5, B * R] after each root of `trees` and up to 4 sampled tokens.

    The tokens are sampled one after another from q with `generator` (on the CPU); temperature 1.
    NaN after an end of the text.
    """
    tokens, roots, readout = trees.tokens, trees.roots[0], HeadReadout.of(head)
    levels: list[TreeLevel] = []
    (outputs,) = tree_features(head, tokens, trees.features, roots, [], document=document)
    outputs, labels, overlaps = outputs[:, roots - 1], trees.along[:, roots], []
    for drafted in range(SAMPLED + 1):
        guess, truth = head.read(outputs).flatten(0, 1), labels.flatten(0, 1)
        overlaps.append(node_metrics(guess, truth, readout).overlap)
        if drafted == SAMPLED:
            break
        q = head.logits(outputs).float().softmax(-1).flatten(0, 1).cpu()
        drawn = torch.multinomial(q, 1, generator=generator).to(tokens.device)
        token = drawn.view(len(tokens), len(roots), 1)
        levels.append(TreeLevel(token, torch.zeros_like(token)))
        drafts = tree_features(head, tokens, trees.features, roots, levels, document=document)
        outputs = drafts[-1][:, :, 0]
        labels = target_levels(target, tokens, roots, levels, document=document)[-1][:, :, 0]
    marks = torch.stack(ended(levels, target.ends)).flatten(1)
    return torch.stack(overlaps).masked_fill(pad(marks, (0, 0, 1, 0)), torch.nan)
