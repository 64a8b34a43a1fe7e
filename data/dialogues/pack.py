"""Documents of different lengths packed into rows of one length.

This module knows token ids and which of them count, but no text.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nde_talf.data.dialogues.token_rows import PADDING, TokenRows
from nde_talf.decoding.common.errors import UserError


@dataclass(frozen=True)
class Document:
    """Tokens that attend to each other alone.

    Attributes:
        tokens: ids [n].
        loss: [n], True where the prediction of this token counts.
    """

    tokens: list[int]
    loss: list[bool]

    def cut(self, length: int) -> "Document":
        """The document's first `length` tokens."""
        return (
            self
            if len(self.tokens) <= length
            else Document(self.tokens[:length], self.loss[:length])
        )


def pack_documents(documents: Sequence[Document], length: int, pad: int = 0) -> TokenRows:
    """Pack documents into rows by best-fit decreasing: the longest first, each into the fullest row
    that it fits in.

    Example: documents of 6, 4 and 3 tokens and rows of 10 give two rows, 6 + 4 and 3 with 7 tokens
    of padding.

    A document of more than `length` tokens is cut to its first `length`. Documents in which nothing
    counts are left out. In each row the documents are numbered from 0. Equal documents give equal
    rows.

    Args:
        documents: at least one in which a token counts.
        length: tokens in a row.
        pad: token id of the padding.

    Raises:
        UserError: nothing is left that counts.
    """
    fitting = [document.cut(length) for document in documents]
    fitting = sorted(
        (d for d in fitting if any(d.loss[1:])), key=lambda document: -len(document.tokens)
    )
    if not fitting:
        raise UserError(
            f"None of {len(documents)} documents has a token to learn from among its first"
            f" {length}. Raise the length of a row, or use documents whose answers begin earlier."
        )
    rows: list[list[Document]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for document in fitting:
        first = bisect_left(room, (len(document.tokens), -1))
        free, row = room.pop(first) if first < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(document)
        insort(room, (free - len(document.tokens), row))
    shape = (len(rows), length)
    packed = TokenRows(
        torch.full(shape, pad), torch.zeros(shape, dtype=torch.bool), torch.full(shape, PADDING)
    )
    for row, held in enumerate(rows):
        end = 0
        for number, document in enumerate(held):
            here = slice(end, end := end + len(document.tokens))
            packed.tokens[row, here] = torch.tensor(document.tokens)
            packed.loss[row, here] = torch.tensor(document.loss)
            packed.document[row, here] = number
    return packed
