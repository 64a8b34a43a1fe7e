"""One sequence inside one model: a committed prefix in the cache and, behind it, the rows of the tree in flight.

Used alike by the target, an LM drafter and a draft head; it knows topology and positions, not tokens' meaning.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from decoding.cache import SlotCache
from decoding.device import upload

Forward = Callable[..., Tensor]
Tokens = list[int] | list[Tensor]  # on the host, or on the device as tensors of no dimension
# Of n rows, what they do not see of the rows up to the last: lines, or on the device bool [n, rows].
Hides = list[bytes] | Tensor


class TreeSession:
    """Runs tokens through `forward(tokens [1, n], positions [1, n], mask, cache, **inputs) -> hidden [1, n, H]`.

    layers: of the model, see `SlotCache`.
    """

    def __init__(self, forward: Forward, device: torch.device, dtype: torch.dtype, layers: int | None = None):
        self.forward, self.device, self.dtype, self.layers = forward, device, dtype, layers
        self._blocked = torch.finfo(dtype).min
        self._empty(0)

    def reset(self, expected: int = 0) -> None:
        """Forget the sequence; the next one will need about `expected` slots."""
        self._empty(expected)

    def _empty(self, expected: int) -> None:
        self.cache = SlotCache(self.layers, expected)
        self.length = 0  # committed tokens
        self.rows = 0  # tree rows in the cache
        self._depth: list[int] = []  # of each tree row
        self._hides: list[bytes] = []  # of each tree row: 1 for every row up to itself that it does not see, 0 for others

    def append(self, tokens: list[int], **inputs: Tensor) -> Tensor:
        """Commit `tokens` behind the prefix; hidden states [n, H]. The tree must be empty."""
        if self.rows:
            raise RuntimeError("append: the cache still holds a tree; keep() first")
        n, past = len(tokens), self.length
        hides = [bytes(row + 1) for row in range(n)] if past else None
        hidden = self._run(tokens, list(range(past, past + n)), hides, inputs)
        self.length += n
        return hidden

    def grow(self, tokens: Tokens, parents: list[int] | Tensor, **inputs: Tensor) -> Tensor:
        """Run `tokens` as new tree rows, which see the prefix, their ancestors and themselves. Hidden states [n, H].

        parents: tree rows (-1: the end of the prefix). Where only the device knows them: which rows each one sees, bool
        [n, rows + n], itself included; until `keep`, no parents can be given then.
        """
        first = self.rows
        if isinstance(parents, Tensor):
            self.rows += len(parents)
            return self._run(tokens, parents.sum(-1) + (self.length - 1), ~parents, inputs)
        if first != len(self._depth):
            raise RuntimeError("grow: the cache holds rows whose parents only the device knows; keep() first")
        self.rows += len(parents)
        for row, parent in enumerate(parents, first):
            above = self._hides[parent] if parent >= 0 else b""
            self._hides.append(above + b"\1" * (row - len(above)) + b"\0")
            self._depth.append(self._depth[parent] + 1 if parent >= 0 else 0)
        return self._run(tokens, [self.length + depth for depth in self._depth[first:]], self._hides[first:], inputs)

    def keep(self, rows: list[int]) -> None:
        """Commit these tree rows, a path from the end of the prefix down, and drop all others."""
        self._move(rows)
        self.length += len(rows)
        self.rows = 0
        self._depth.clear()
        self._hides.clear()

    def _move(self, rows: list[int]) -> None:
        """Put these tree rows right behind the prefix in the cache."""
        self.cache.keep(self.length, [self.length + row for row in rows])

    def _run(self, tokens: Tokens, positions: list[int] | Tensor, hides: Hides | None, inputs: dict[str, Tensor]) -> Tensor:
        """A pass over rows; hides None: over a sequence's first tokens, which see those before them."""
        mask = None if hides is None else self._mask(hides)
        return self.forward(*self._ids(tokens, positions), mask, self.cache, **inputs)[0]

    def _ids(self, tokens: Tokens, positions: list[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Both as [1, n] on the device, where tokens may be already, and positions with them."""
        if isinstance(positions, Tensor):
            return torch.stack(tokens)[None], positions[None]
        if isinstance(tokens[0], Tensor):
            return torch.stack(tokens)[None], upload(torch.tensor([positions]), self.device)
        ids = upload(torch.tensor([tokens, positions]), self.device)
        return ids[:1], ids[1:]

    def _mask(self, hides: Hides) -> Tensor | None:
        """Additive mask [1, 1, n, cached + n]: the prefix is seen, and of the rows behind it those without a 1. None for one
        row of the host's that sees everything."""
        if isinstance(hides, Tensor):
            hidden, width = hides, hides.shape[1]
        elif len(hides) == 1 and not any(hides[0]):
            return None
        else:
            width = len(hides[-1])
            hidden = torch.frombuffer(bytearray(b"").join(line.ljust(width, b"\1") for line in hides), dtype=torch.bool)
            hidden = upload(hidden.view(len(hides), width), self.device)
        mask = torch.zeros(len(hides), self.length + width, dtype=self.dtype, device=self.device)
        mask[:, self.length :].masked_fill_(hidden, self._blocked)
        return mask[None, None]
