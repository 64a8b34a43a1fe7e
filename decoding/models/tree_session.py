"""One sequence inside one model: a committed prefix in the cache, then the tree's rows.

The target, an LM drafter and a draft head all use it. It keeps topology and positions, not
tokens' meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nde_talf.decoding.device import blocked, upload
from nde_talf.decoding.models.cache import KVCache

if TYPE_CHECKING:
    from numpy.typing import NDArray

Forward = Callable[..., Tensor]


class Shapes:
    """Fixed shapes of passes: see `nde_talf.decoding.models.static_shapes.StaticShapes`."""

    context: int
    session: Callable[..., TreeSession]
    """Makes a session of these shapes."""
    check_layers: Callable[..., None]
    """Raises UserError where features of a target's layers cannot be taken."""

    def recorder(self, decoder: Any) -> Callable[..., Any] | None:
        """Return what makes the step of a sequence after its prefill; None: the loop's own."""
        return None


class TreeSession:
    """Session that runs a sequence's tokens through `forward`.

    It is called as `forward(tokens [1, n], positions [1, n], mask, cache, **inputs)` and returns
    hidden states [1, n, H].

    A tree grows by `grow`, in one pass or in several. `commit` keeps one path of it, or nothing.

    Args:
        layers: of the model, see `KVCache`.
    """

    skips_masks = True
    """A row that sees all slots before it runs without a mask."""
    most = 1024
    """Tokens of a pass after a prefix: its mask has as many columns."""

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        dtype: torch.dtype,
        layers: int | None = None,
    ):
        self.forward, self.device, self.dtype, self.layers = forward, device, dtype, layers
        # By tree row: bit i is 1 where it sees row i.
        self._sees: list[int] = []
        self.reset()

    def reset(self, expected: int = 0) -> None:
        """Drop the sequence; the next one will need about `expected` slots."""
        self.cache = self._new_cache(expected)
        self.length = 0  # committed tokens
        self.rows = 0  # tree rows in the cache

    def append(self, tokens: list[int], **inputs: Tensor) -> Tensor:
        """Run and commit `tokens`, one after the other, after the prefix; hidden states [n, H].

        The tree must be empty. More than `most` go in several passes.
        """
        if self.rows:
            raise RuntimeError("append: the cache still holds a tree; commit() first")
        count = len(tokens)
        if self.length and count > self.most:
            passes = []
            for start in range(0, count, self.most):
                part = slice(start, start + self.most)
                rows = {name: values[:, part] for name, values in inputs.items()}
                passes.append(self.append(tokens[part], **rows))
            return torch.cat(passes)
        if self.length:
            hidden = self.grow(tokens, range(-1, count - 1), **inputs)
            self.rows = 0
        else:
            hidden = self._run(self._uploaded(tokens, range(count)), None, inputs)
        self.length += count
        return hidden

    def grow(self, tokens: list[int], parents: Sequence[int], **inputs: Tensor) -> Tensor:
        """Run `tokens` as new tree rows, which see the prefix, their ancestors and themselves.

        Args:
            tokens: [n].
            parents: tree rows (-1: the end of the prefix).
            **inputs: further arguments of `forward`, one row for each token.

        Returns:
            [n, H], hidden states.
        """
        first = self.rows
        del self._sees[first:]
        for row, parent in enumerate(parents, first):
            self._sees.append((self._sees[parent] if parent >= 0 else 0) | 1 << row)
        self.rows, sees = len(self._sees), self._sees[first:]
        ids = self._uploaded(tokens, [self.length - 1 + row.bit_count() for row in sees])
        if self.skips_masks and sees == [(1 << self.rows) - 1]:
            return self._run(ids, None, inputs)
        width = -(-self.rows // 8)  # bytes
        packed = np.frombuffer(b"".join(row.to_bytes(width, "little") for row in sees), np.uint8)
        bits = np.unpackbits(packed.reshape(-1, width), 1, self.rows, "little")
        return self._run(ids, bits, inputs)

    def commit(self, rows: list[int]) -> None:
        """Keep these tree rows, a path from the end of the prefix down, and drop all others."""
        self._keep(rows)
        self.length += len(rows)
        self.rows = 0

    def _new_cache(self, expected: int) -> KVCache:
        return KVCache(self.layers, expected)

    def _keep(self, rows: list[int]) -> None:
        self.cache.commit(self.length, [self.length + row for row in rows])

    def _uploaded(self, tokens: list[int], positions: Sequence[int]) -> Tensor:
        """Put tokens and positions on the device at once, [2, 1, n]."""
        return upload(torch.from_numpy(np.array([[tokens], [positions]])), self.device)

    def _run(
        self, ids: Tensor, sees: NDArray[np.uint8] | None, inputs: dict[str, Tensor]
    ) -> Tensor:
        """Run n rows, of tokens and positions `ids` [2, 1, n]; hidden states [n, H].

        sees: 1 where one of the n rows sees one of the tree's rows so far, [n, rows]. None: one row
        that sees everything, or the first tokens of a sequence, which see those before them.
        """
        mask = None if sees is None else self._additive(sees)[None, None]
        return self.forward(ids[0], ids[1], mask, self.cache, **inputs)[0]

    def _additive(self, sees: NDArray[np.uint8]) -> Tensor:
        """Return the mask that is added to scores: 0 where a row sees, else `blocked`."""
        kind = np.float64 if self.dtype == torch.float64 else np.float32
        mask = np.where(sees, kind(0), kind(blocked(self.dtype)))
        return upload(torch.from_numpy(mask), self.device).to(self.dtype)
