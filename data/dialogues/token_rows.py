"""Rows of token ids to train on, and documents of different lengths packed into them."""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nde_talf.decoding.common.errors import UserError

PADDING = -1
"""The document of a padding token."""


@dataclass
class TokenRows:
    """N rows of L tokens.

    Attention and positions never cross documents; a document's tokens are neighbours.

    Attributes:
        tokens: ids [N, L], int64.
        loss: [N, L], bool: True where the prediction of this token counts, as in an assistant's
            turn.
        document: [N, L], int64: number of the packed document in its row; -1 (PADDING) for padding.
    """

    tokens: Tensor
    loss: Tensor
    document: Tensor

    @classmethod
    def plain(cls, tokens: Tensor) -> "TokenRows":
        """Rows [N, L] of text in which every token counts, one document a row."""
        tokens = tokens.long()
        return cls(tokens, torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: Tensor | slice) -> "TokenRows":
        """Some of the rows."""
        return self._each(lambda part: part[rows])

    def to(self, device: torch.device | str) -> "TokenRows":
        """Return the rows on `device`."""
        return self._each(lambda part: part.to(device))

    def cut(self, length: int) -> "TokenRows":
        """Return the first `length` tokens of each row."""
        return self._each(lambda part: part[:, :length])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "TokenRows":
        return TokenRows(*map(change, (self.tokens, self.loss, self.document)))

    def numel(self) -> int:
        """Count the tokens."""
        return self.tokens.numel()

    @property
    def packed(self) -> bool:
        """Tell whether any row holds more than one document, or padding."""
        return bool((self.document != self.document[:, :1]).any() or (self.document < 0).any())

    @property
    def padding(self) -> float:
        """The fraction of the tokens that are padding."""
        return float((self.document == PADDING).float().mean())


@dataclass(frozen=True)
class Document:
    """Tokens that attend to each other alone.

    Attributes:
        tokens: ids [n].
        loss: [n], True where the prediction of this token counts.
    """

    tokens: Sequence[int]
    loss: Sequence[int]


def pack_documents(documents: Sequence[Document], length: int, pad: int = 0) -> TokenRows:
    """Pack documents into rows: the longest first, each into the fullest row that it fits in.

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
    cut = (Document(each.tokens[:length], each.loss[:length]) for each in documents)
    fitting = [document for document in cut if any(document.loss[1:])]
    fitting.sort(key=lambda document: -len(document.tokens))
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
    packed = TokenRows.plain(torch.full((len(rows), length), pad))
    packed.loss[:], packed.document[:] = False, PADDING
    for row, documents_of_row in enumerate(rows):
        end = 0
        for number, document in enumerate(documents_of_row):
            here = slice(end, end := end + len(document.tokens))
            packed.tokens[row, here] = torch.tensor(document.tokens)
            packed.loss[row, here] = torch.tensor(document.loss)
            packed.document[row, here] = number
    return packed
