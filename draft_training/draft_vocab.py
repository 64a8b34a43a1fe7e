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
    """The draft vocabulary in a head's weights; None if they have none.

    Raises UserError, naming `source`, where d2t and t2d do not say the same.
    """
    if not {"d2t", "t2d"} & weights.keys():
        return None
    if (
        {"d2t", "t2d"} <= weights.keys()
        and weights["d2t"].ndim == 1
        and weights["d2t"].dtype == torch.int64
    ):
        vocabulary = vocabulary_of(weights["d2t"])
        if (
            torch.equal(vocabulary, weights["t2d"].nonzero().flatten())
            and len(weights["t2d"]) == vocab_size
        ):
            return vocabulary
    raise UserError(
        f"{source}: its d2t and t2d do not name the same of the target's {vocab_size} tokens, in"
        " ascending order, so the head would draft nonsense. Export the head again."
    )
