"""Test vectors of an exported head: a short text, the target's features, the head's best logits.

Entry i of the head is at position i. It takes token i + 1 and the target's feature after token i.
The file lists its most probable tokens with their logits, so that another reader of heads can be
tested without the target's layers. It is JSON: engines load every safetensors file of a folder.
"""

from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import TypedDict

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json, reading
from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.model.tree_attention import tree_features
from nde_talf.draft_training.targets.target_trees import target_features

VECTORS = "vectors.json"
ENTRIES, BEST = 4, 16
ERROR, ERROR_OF_HALF = 1e-3, 0.05
"""Largest difference of logits, as a fraction of the largest one, in float32 and in half precision.
"""


class HeadVectors(TypedDict):
    """The content of `VECTORS`: n + 1 tokens, features [n, W], and for each entry its best tokens.

    half: whether the logits were computed in half precision.
    """

    tokens: list[int]
    features: list[list[float]]
    best: list[list[int]]
    logits: list[list[float]]
    half: bool


@torch.inference_mode()
def vectors_of(head: EagleHead) -> HeadVectors:
    """Make the test vectors of `head`."""
    rows = head.target.vocab_size
    tokens = torch.tensor([(rows // 3 + 7 * at) % rows for at in range(ENTRIES + 1)])
    _, features = target_features(
        head.target, tokens[None].to(head.device), None, layers=head.feature_layers
    )
    logits = _logits(head, tokens, features[0])
    drafted = rows if head.vocabulary is None else len(head.vocabulary)
    known, best = logits.topk(min(BEST, drafted))
    return HeadVectors(
        tokens=tokens.tolist(),
        features=features[0, :-1].float().tolist(),
        best=best.tolist(),
        logits=known.tolist(),
        half=_in_half(head),
    )


@torch.inference_mode()
def check_vectors(head: EagleHead, path: Path, again: str) -> None:
    """Raise UserError where a head does not give the logits of its test vectors."""
    content: HeadVectors = read_json(path, HeadVectors, again)
    with reading(path, again):
        features = torch.tensor([*content["features"], content["features"][-1]])
        known = torch.tensor(content["logits"])
        logits = _logits(head, torch.tensor(content["tokens"]), features)
        error = (logits.gather(-1, torch.tensor(content["best"])) - known).abs().max().item()
        bound = ERROR_OF_HALF if content["half"] or _in_half(head) else ERROR
    if not error <= bound * (1 + known.abs().max().item()):
        raise UserError(
            f"{path}: its head gives other logits than it was exported with, by up to {error:.2g}:"
            f" {again}."
        )


def _in_half(head: EagleHead) -> bool:
    return min(head.dtype.itemsize, head.target.dtype.itemsize) < torch.float32.itemsize


def _logits(head: EagleHead, tokens: Tensor, features: Tensor) -> Tensor:
    """Return the logits [n, V] of the entries of n + 1 tokens; the last feature has none."""
    training, roots = head.training, torch.empty(0, dtype=torch.long, device=head.device)
    ids, rows = tokens[None].to(head.device), features[None].to(head.device, head.target.dtype)
    (outputs,) = tree_features(head.eval(), ids, rows, roots, [])
    head.train(training)
    return head.logits(outputs[0]).float().cpu()
