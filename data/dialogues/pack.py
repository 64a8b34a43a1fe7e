"""Documents of different lengths as rows of one length. It knows token ids and which of them count; no text."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from data.dialogues.token_rows import PADDING, TokenRows
from decoding.common.errors import UserError


@dataclass(frozen=True)
class Document:
    """tokens [n]: ids; loss [n]: True where predicting this token counts. Attention sees one document alone."""

    tokens: list[int]
    loss: list[bool]

    def cut(self, length: int) -> "Document":
        """Its first `length` tokens."""
        return self if len(self.tokens) <= length else Document(self.tokens[:length], self.loss[:length])


def pack_documents(documents: Sequence[Document], length: int, pad: int = 0) -> TokenRows:
    """The documents in as few rows of `length` tokens as best-fit decreasing finds; padded with the token `pad`.

    A document of more than `length` tokens is cut to its beginning, which keeps every token behind what it was written
    behind. Documents in which nothing counts are left out. In a row they are numbered from 0. Equal documents give equal rows.

    Raises:
        UserError: nothing is left that counts.
    """
    fitting = [document.cut(length) for document in documents]
    fitting = sorted((d for d in fitting if any(d.loss[1:])), key=lambda document: -len(document.tokens))
    if not fitting:
        raise UserError(
            f"None of {len(documents)} documents has a token to learn from among its first {length}. Raise the length of a "
            "row, or use documents whose answers begin earlier."
        )
    rows: list[list[Document]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for document in fitting:
        at = bisect_left(room, (len(document.tokens), -1))
        free, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(document)
        insort(room, (free - len(document.tokens), row))
    shape = (len(rows), length)
    packed = TokenRows(torch.full(shape, pad), torch.zeros(shape, dtype=torch.bool), torch.full(shape, PADDING))
    for row, held in enumerate(rows):
        at = 0
        for number, document in enumerate(held):
            here = slice(at, at := at + len(document.tokens))
            packed.tokens[row, here] = torch.tensor(document.tokens)
            packed.loss[row, here] = torch.tensor(document.loss)
            packed.document[row, here] = number
    return packed


def padding_share(rows: TokenRows) -> float:
    """Share of the tokens that are padding."""
    return float((rows.document == PADDING).float().mean())
