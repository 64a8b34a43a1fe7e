"""The draft vocabulary: tokens that a head with its own lm_head can draft.

A draft vocabulary is ids [D] of the target's V tokens, ascending. d2t [D] (int64): what has to be
added to an index in it for the id there; t2d [V] (bool): which ids are in it. Pure functions.
"""

import torch
from torch import Tensor

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.common.errors import UserError


def frequent_tokens(rows: TokenRows, size: int, vocab_size: int) -> Tensor:
    """Find the `size` most frequent ids of a target's `vocab_size`, ascending.

    Tokens of `rows` whose prediction counts are counted; of equally frequent ids the lower one is
    taken.

    Raises UserError unless there are fewer than all.
    """
    if size >= vocab_size:
        raise UserError(
            f"draft.draft_vocab={size}: the target has {vocab_size} tokens; leave it out to draft"
            " them all."
        )
    counts = torch.bincount(rows.tokens[rows.loss].cpu(), minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def fraction_inside(rows: TokenRows, vocabulary: Tensor) -> float:
    """The fraction of the tokens whose prediction counts in `rows` that can be drafted."""
    return torch.isin(rows.tokens[rows.loss].cpu(), vocabulary).float().mean().item()


def layout_of(vocabulary: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """d2t and t2d of a draft vocabulary."""
    d2t = vocabulary - torch.arange(len(vocabulary))
    return d2t, torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, vocabulary, True)


def vocabulary_of(d2t: Tensor) -> Tensor:
    """The draft vocabulary [D] that d2t [D] names."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def vocabulary_in(weights: dict[str, Tensor], vocab_size: int, source: str) -> Tensor | None:
    """Return the draft vocabulary in a head's weights; None if they have none.

    A missing t2d is added. Raises UserError, naming `source`, where d2t and t2d do not say the
    same.
    """
    if not {"d2t", "t2d"} & weights.keys():
        return None
    d2t = weights.get("d2t", torch.empty(0))
    if d2t.ndim == 1 and d2t.dtype == torch.int64:
        vocabulary = vocabulary_of(d2t)
        if "t2d" not in weights and bool((vocabulary < vocab_size).all()):
            weights["t2d"] = layout_of(vocabulary.clamp(min=0), vocab_size)[1]
        inside = weights.get("t2d", torch.empty(0))
        if len(inside) == vocab_size and torch.equal(vocabulary, inside.nonzero().flatten()):
            return vocabulary
    raise UserError(
        f"{source}: its d2t and t2d do not name the same of the target's {vocab_size} tokens, in"
        " ascending order, so the head would draft nonsense. Export the head again."
    )
