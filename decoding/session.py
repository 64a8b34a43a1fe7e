"""One sequence inside one model: a committed prefix in the cache and, after it, the rows of the tree in flight.

Used alike by the target, an LM drafter and a draft head; it knows topology and positions, not tokens' meaning.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from decoding.cache import KVCache
from decoding.device import upload
from decoding.masks import blocked_lines, blocked_mask
from decoding.static import FixedPasses, StaticShapes

Forward = Callable[..., Tensor]
Tokens = list[int] | Tensor  # on the host, or on the device


class TreeSession:
    """Runs tokens through `forward(tokens [1, n], positions [1, n], mask, cache, **inputs) -> hidden [1, n, H]`.

    A tree grows by `grow`, in one pass or in several. `commit` keeps one path of it; `rollback` keeps nothing.

    Args:
        layers: of the model, see `KVCache`.
        static: the passes are of these shapes, over a cache that the sessions of one model share; then a session that was
            begun before another one raises UserError when it goes on.
    """

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        dtype: torch.dtype,
        layers: int | None = None,
        static: StaticShapes | None = None,
    ):
        self.forward, self.device, self.dtype, self.layers = forward, device, dtype, layers
        self.fixed: FixedPasses | None = None if static is None else static.passes(forward, device, layers)
        self._blocked = torch.finfo(dtype).min
        self.reset()

    def reset(self, expected: int = 0) -> None:
        """Drop the sequence; the next one will need about `expected` slots."""
        self.cache = self.fixed.cache if self.fixed else KVCache(self.layers, expected)
        self.length = 0  # committed tokens
        self.rows = 0  # tree rows in the cache
        self._lines: list[
            bytes
        ] = []  # for each tree row, a byte for every row up to itself: 1 where it does not see that row, else 0

    def append(self, tokens: Tokens, **inputs: Tensor) -> Tensor:
        """Run `tokens` one after the other, after the prefix; hidden states [n, H]. The tree must be empty.

        Tokens of the host are committed. Those of the device are rows of a tree of one path; `commit` says how many count.
        """
        if self.rows:
            raise RuntimeError("append: the cache still holds a tree; commit() or rollback() first")
        count, past = len(tokens), self.length
        if isinstance(tokens, Tensor):
            return self.grow(tokens, torch.ones(count, count, dtype=torch.bool, device=self.device).tril(), **inputs)
        lines = [bytes(row + 1) for row in range(count)] if past else None
        hidden = self._run(tokens, list(range(past, past + count)), lines, inputs)
        self.length += count
        return hidden

    def grow(self, tokens: Tokens, parents: list[int] | Tensor, **inputs: Tensor) -> Tensor:
        """Run `tokens` as new tree rows, which see the prefix, their ancestors and themselves.

        Args:
            tokens: [n].
            parents: tree rows (-1: the end of the prefix). Where only the device knows them: which rows each one sees, bool
                [n, rows + n], itself included; until `commit`, no parents can be given then.

        Returns:
            [n, H], hidden states.
        """
        first, count = self.rows, len(tokens)
        if isinstance(parents, Tensor):
            self.rows += count
            return self._run(tokens, parents.sum(-1) + (self.length - 1), ~parents, inputs)
        if first != len(self._lines):
            raise RuntimeError("grow: the cache holds rows whose parents only the device knows; commit() first")
        self.rows += count
        lines = blocked_lines(parents, self._lines)
        self._lines += lines
        # A row lies as deep as there are other rows that it sees.
        return self._run(tokens, [self.length + line.count(0) - 1 for line in lines], lines, inputs)

    def commit(self, rows: list[int]) -> None:
        """Keep these tree rows, a path from the end of the prefix down, and drop all others."""
        if self.fixed:
            self.fixed.commit(self, self.length, rows)
        else:
            self.cache.commit(self.length, [self.length + row for row in rows])
        self.length += len(rows)
        self.rows = 0
        self._lines.clear()

    def rollback(self) -> None:
        """Drop the tree."""
        self.commit([])

    def _run(
        self, tokens: Tokens, positions: list[int] | Tensor, hides: list[bytes] | Tensor | None, inputs: dict[str, Tensor]
    ) -> Tensor:
        """A pass over n rows. hides: which of the tree's rows so far they do not see, as lines or bool [n, rows]. None:
        the first tokens of a sequence, which see those before them."""
        ids = self._ids(tokens, positions)
        if self.fixed and hides is None:
            return self.fixed.first(self, ids, inputs)
        if self.fixed and hides is not None:
            end = self.length + (self.rows or len(positions))
            size = self.fixed.size(len(positions), self.rows)
            return self.fixed.run(self, end, size, ids, self._mask(hides, size, self.fixed.capacity), inputs)
        if isinstance(hides, list) and len(hides) == 1 and not any(hides[0]):
            hides = None  # one row that sees everything
        mask = None if hides is None else self._mask(hides, len(positions))
        return self.forward(*ids, mask, self.cache, **inputs)[0]

    def _ids(self, tokens: Tokens, positions: list[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Both as [1, n] on the device."""
        if isinstance(tokens, Tensor) and isinstance(positions, Tensor):
            return tokens[None], positions[None]
        ids = upload(torch.tensor([tokens, positions]), self.device)
        return ids[:1], ids[1:]

    def _mask(self, hides: list[bytes] | Tensor, size: int, capacity: int | None = None) -> Tensor:
        """Additive mask [1, 1, size, rows] about the tree's rows: the text before them is seen by all. With a `capacity` it is
        about so many slots from the first on, of which those after the tree are not seen. Padded rows see what there is, so
        that they stay finite."""
        hides = hides if isinstance(hides, Tensor) else upload(blocked_mask(hides), self.device)
        start = self.length if capacity else 0
        end = start + hides.shape[1]
        mask = torch.zeros(size, capacity or end, dtype=self.dtype, device=self.device)
        mask[: hides.shape[0], start:end].masked_fill_(hides, self._blocked)
        if capacity:
            mask[:, end:] = self._blocked
        return mask[None, None]
