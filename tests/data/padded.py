"""Tiny pairs whose output layers have different numbers of rows."""

from nde_talf.decoding.model import CausalModel
from tests.decoding.pairs import tiny_pair


def padded_pair(
    rows: int, draft_rows: int, noise: float = 0.05, **sizes
) -> tuple[CausalModel, CausalModel]:
    """`tiny_pair` with a target of `rows` rows and a draft of `draft_rows`, which speaks the
    target's.
    """
    target, draft = tiny_pair(rows, noise, **sizes)
    if draft_rows != rows:
        draft.module.resize_token_embeddings(draft_rows, mean_resizing=False)
        draft = CausalModel(draft.module, "draft")
        draft.match(target.vocab_size)
    return target, draft
