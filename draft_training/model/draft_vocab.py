"""The draft vocabulary: the tokens that a head can draft.

A draft vocabulary is a rising tensor of ids [D] among the target's V tokens. Files hold it as
d2t [D] (int64), id minus index, and t2d [V] (bool), true for ids in it.
"""

import torch
from torch import Tensor

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.common.errors import UserError

COVERED = 0.98
"""Default share of the text that a draft vocabulary covers."""
SMALL = 8192
"""Below this number of tokens `auto` keeps all: little is gained, and noise would decide."""


def frequent_tokens(rows: TokenRows, size: float, vocab_size: int) -> Tensor | None:
    """Find the most frequent ids of a target's `vocab_size`, ascending.

    Counts the tokens of `rows` whose prediction counts; ties go to the lower id.

    size: the number of ids. Below 1: the share of new text to cover with the fewest ids; the result
    is None if that takes all. The share of tokens seen once in `rows` estimates the unseen part of
    new text (Good-Turing).

    Raises UserError for a number that is not below `vocab_size`.
    """
    counts = torch.bincount(rows.tokens[rows.loss].cpu(), minlength=vocab_size)
    counts, ids = counts.sort(descending=True, stable=True)
    if size < 1:
        covered = counts.where(counts > 1, 0).cumsum(0)
        size = 1 + int((covered < size * counts.sum()).sum())
        if size >= vocab_size:
            return None
    if size >= vocab_size:
        raise UserError(
            f"draft.draft_vocab={size:.0f}: the target has {vocab_size} tokens; null drafts them"
            " all."
        )
    return ids[: int(size)].sort().values


def fraction_inside(rows: TokenRows, vocabulary: Tensor) -> float:
    """Return the fraction of counted tokens in `rows` that can be drafted."""
    return torch.isin(rows.tokens[rows.loss].cpu(), vocabulary).float().mean().item()


def layout_of(vocabulary: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return d2t and t2d of a draft vocabulary."""
    inside = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, vocabulary, True)
    return {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": inside}


def vocabulary_in(weights: dict[str, Tensor], vocab_size: int, source: str) -> Tensor | None:
    """Take the draft vocabulary out of a head's weights; None if they have none.

    Raises UserError, naming `source`, if d2t and t2d contradict each other; t2d may be missing.
    """
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    if d2t is None and t2d is None:
        return None
    if d2t is not None and d2t.ndim == 1 and d2t.dtype == torch.int64:
        vocabulary = d2t + torch.arange(len(d2t))
        rises = torch.cat([vocabulary.new_tensor([-1]), vocabulary]).diff() > 0
        if rises.all() and bool((vocabulary < vocab_size).all()):
            inside = layout_of(vocabulary, vocab_size)["t2d"]
            if t2d is None or torch.equal(t2d.bool(), inside):
                return vocabulary
    raise UserError(
        f"{source}: its d2t and t2d do not name the same of the target's {vocab_size} tokens, in"
        " ascending order, so the head would draft nonsense. Export the head again."
    )
