"""One sequence inside one model: a committed prefix in the cache and, behind it, the rows of the tree in flight.

Used alike by the target, an LM drafter and a draft head; it knows topology and positions, not tokens' meaning.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from decoding.cache import SlotCache

Forward = Callable[..., Tensor]


class TreeSession:
    """Runs tokens through `forward(tokens [1, n], positions [1, n], mask, cache, **inputs) -> hidden [1, n, H]`."""

    def __init__(self, forward: Forward, device: torch.device, dtype: torch.dtype):
        self.forward, self.device, self.dtype = forward, device, dtype
        self._blocked = torch.finfo(dtype).min
        self._ancestors = self._blank(64)
        self.reset()

    def reset(self) -> None:
        self.cache = SlotCache()
        self.length = 0  # committed tokens
        self._depth: list[int] = []  # of each tree row

    @property
    def rows(self) -> int:
        """Tree rows in the cache."""
        return len(self._depth)

    def append(self, tokens: list[int], **inputs: Tensor) -> Tensor:
        """Commit `tokens` behind the prefix; hidden states [n, H]. The tree must be empty."""
        if self.rows:
            raise RuntimeError("append: the cache still holds a tree; keep() first")
        n, past = len(tokens), self.length
        mask = None
        if n > 1 and past:
            mask = torch.full((n, n), self._blocked, device=self.device, dtype=self.dtype).triu_(1)
            mask = torch.cat([mask.new_zeros(n, past), mask], 1)[None, None]
        hidden = self._run(tokens, list(range(past, past + n)), mask, inputs)
        self.length += n
        return hidden

    def grow(self, tokens: list[int], parents: list[int], **inputs: Tensor) -> Tensor:
        """Run `tokens` as new tree rows; `parents` are tree rows (-1: the end of the prefix). Hidden states [n, H].

        Every row sees the prefix, its ancestors and itself.
        """
        first, n = self.rows, len(tokens)
        if first + n > len(self._ancestors):
            grown = self._blank(2 * (first + n))
            grown[:first, :first] = self._ancestors[:first, :first]
            self._ancestors = grown
        for row, parent in enumerate(parents, first):
            if parent >= 0:
                self._ancestors[row] = self._ancestors[parent]
            else:
                self._ancestors[row] = self._blocked
            self._ancestors[row, row] = 0
            self._depth.append(self._depth[parent] + 1 if parent >= 0 else 0)
        positions = [self.length + depth for depth in self._depth[first:]]
        if n == 1 and self._depth[first] == first:  # a chain so far: the one new row sees every row
            return self._run(tokens, positions, None, inputs)
        mask = self._ancestors.new_zeros(n, self.length + first + n)
        mask[:, self.length :] = self._ancestors[first : first + n, : first + n]
        return self._run(tokens, positions, mask.to(self.device)[None, None], inputs)

    def keep(self, rows: list[int]) -> None:
        """Commit these tree rows, a path from the end of the prefix down, and drop all others."""
        self.cache.keep(self.length, [self.length + row for row in rows])
        self.length += len(rows)
        self._depth.clear()

    def _run(self, tokens: list[int], positions: list[int], mask: Tensor | None, inputs: dict[str, Tensor]) -> Tensor:
        ids = torch.tensor([tokens, positions], device=self.device)
        return self.forward(ids[:1], ids[1:], mask, self.cache, **inputs)[0]

    def _blank(self, capacity: int) -> Tensor:
        return torch.full((capacity, capacity), self._blocked, dtype=self.dtype)
