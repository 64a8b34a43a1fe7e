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
from nde_talf.decoding.models.tree_session import TreeSession
from nde_talf.draft_training.model.head import EagleHead

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
    tokens = [(rows // 3 + 7 * at) % rows for at in range(ENTRIES + 1)]
    states = head.target.session(head.feature_layers).append(tokens[:-1])
    _, features = head.target.parts(states, head.feature_layers)
    logits = _logits(head, tokens[1:], features)
    drafted = rows if head.vocabulary is None else len(head.vocabulary)
    known, best = logits.topk(min(BEST, drafted))
    return HeadVectors(
        tokens=tokens,
        features=features.float().tolist(),
        best=best.tolist(),
        logits=known.tolist(),
        half=_in_half(head),
    )


@torch.inference_mode()
def check_vectors(head: EagleHead, path: Path, again: str) -> None:
    """Raise UserError where a head does not give the logits of its test vectors."""
    content: HeadVectors = read_json(path, HeadVectors, again)
    with reading(path, again):
        known = torch.tensor(content["logits"])
        logits = _logits(head, content["tokens"][1:], torch.tensor(content["features"]))
        error = (logits.gather(-1, torch.tensor(content["best"])) - known).abs().max().item()
        bound = ERROR_OF_HALF if content["half"] or _in_half(head) else ERROR
    if not error <= bound * (1 + known.abs().max().item()):
        raise UserError(
            f"{path}: its head gives other logits than it was exported with, by up to {error:.2g}:"
            f" {again}."
        )


def _in_half(head: EagleHead) -> bool:
    return min(head.dtype.itemsize, head.target.dtype.itemsize) < torch.float32.itemsize


def _logits(head: EagleHead, tokens: list[int], features: Tensor) -> Tensor:
    """Return the logits [n, V] of n entries, as decoding runs them."""
    training, rows = head.training, features.to(head.device, head.target.dtype)
    session = TreeSession(head.eval().forward, head.device, head.dtype, len(head.layers))
    outputs = session.append(tokens, features=head.combine(rows)[None])
    head.train(training)
    return head.logits(outputs).float().cpu()
