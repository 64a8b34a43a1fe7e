"""The draft vocabulary: the tokens that a head can draft.

A draft vocabulary is ids [D] of the target's V tokens, ascending. d2t [D] (int64): what has to be
added to an index in it for the id there; t2d [V] (bool): which ids are in it.
"""

import torch
from torch import Tensor

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.common.errors import UserError

COVERED = 0.98
"""Share of the text that a draft vocabulary covers where nothing else is asked for."""
SMALL = 8192
"""Of fewer tokens none is left out unasked: a level gains little, and a timing would decide it."""


def frequent_tokens(rows: TokenRows, size: float, vocab_size: int) -> Tensor | None:
    """Find the most frequent ids of a target's `vocab_size`, ascending.

    Tokens of `rows` whose prediction counts are counted; of equally frequent ids the lower one is
    taken.

    size: the number of ids. Below 1: the share of new text that the fewest ids shall cover; None if
    that takes all. The share of tokens seen once in `rows` estimates how much of new text is unseen
    (Good-Turing).

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
    """The fraction of the tokens whose prediction counts in `rows` that can be drafted."""
    return torch.isin(rows.tokens[rows.loss].cpu(), vocabulary).float().mean().item()


def layout_of(vocabulary: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """d2t and t2d of a draft vocabulary."""
    inside = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, vocabulary, True)
    return {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": inside}


def vocabulary_in(weights: dict[str, Tensor], vocab_size: int, source: str) -> Tensor | None:
    """Take the draft vocabulary out of a head's weights; None if they have none.

    Raises UserError, naming `source`, where d2t and t2d (which may be missing) do not say the same.
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
