"""One sequence inside one model: a committed prefix in the cache, then the tree's rows.

The target, an LM drafter and a draft head all use it. It knows topology and positions, not
tokens' meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nde_talf.decoding.cache import KVCache
from nde_talf.decoding.device import asynchronous, integers, upload
from nde_talf.decoding.masks import HostMask

if TYPE_CHECKING:
    from nde_talf.decoding.static import FixedPasses, StaticShapes

Forward = Callable[..., Tensor]
Tokens = list[int] | Tensor  # on the host, or on the device
_FEW = 64
"""Rows of a pass whose tokens and positions a session holds memory for."""


class TreeSession:
    """Session that runs a sequence's tokens through `forward`.

    It is called as `forward(tokens [1, n], positions [1, n], mask, cache, **inputs)` and returns
    hidden states [1, n, H].

    A tree grows by `grow`, in one pass or in several. `commit` keeps one path of it; `rollback`
    keeps nothing.

    Args:
        layers: of the model, see `KVCache`.
        static: the passes are of these shapes, over a cache that the sessions of one model share;
            then a session that was begun before another one raises UserError when it goes on.
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
        self.fixed: FixedPasses | None = (
            None if static is None else static.passes(forward, device, layers)
        )
        self._blocked = torch.finfo(dtype).min
        self._direct = static is None and device.type == "cpu" and not asynchronous(device)
        self._held: dict[int, tuple[Tensor, Tensor, np.ndarray]] = {}  # by n, see `_few`
        self.reset()

    def reset(self, expected: int = 0) -> None:
        """Drop the sequence; the next one will need about `expected` slots."""
        self.cache = self.fixed.cache if self.fixed else KVCache(self.layers, expected)
        self.length = 0  # committed tokens
        self.rows = 0  # tree rows in the cache
        self._tree = HostMask(self.dtype)  # of the rows whose parents the host knows

    def append(self, tokens: Tokens, **inputs: Tensor) -> Tensor:
        """Run `tokens` one after the other, after the prefix; hidden states [n, H].

        The tree must be empty.

        Tokens of the host are committed. Those of the device are rows of a tree of one path;
        `commit` says how many count.
        """
        if self.rows:
            raise RuntimeError("append: the cache still holds a tree; commit() or rollback() first")
        count = len(tokens)
        if isinstance(tokens, Tensor):
            return self.grow(
                tokens,
                torch.ones(count, count, dtype=torch.bool, device=self.device).tril(),
                **inputs,
            )
        if self.length:
            hidden = self.grow(tokens, range(-1, count - 1), **inputs)
            self._dropped()
        else:
            hidden = self._run(tokens, range(count), None, inputs)
        self.length += count
        return hidden

    def grow(self, tokens: Tokens, parents: Sequence[int] | Tensor, **inputs: Tensor) -> Tensor:
        """Run `tokens` as new tree rows, which see the prefix, their ancestors and themselves.

        Args:
            tokens: [n].
            parents: tree rows (-1: the end of the prefix). If only the device knows them: which
                rows each one sees, bool [n, rows + n], itself included; until `commit`, no parents
                can be given then.
            **inputs: further arguments of `forward`, one row for each token.

        Returns:
            [n, H], hidden states.
        """
        first, count, tree = self.rows, len(tokens), self._tree
        self.rows += count
        if isinstance(parents, Tensor):
            mask = torch.zeros(parents.shape, dtype=self.dtype, device=self.device).masked_fill_(
                ~parents, self._blocked
            )
            return self._run(tokens, parents.sum(-1) + (self.length - 1), mask[None, None], inputs)
        if first != len(tree.depths):
            self.rows = first
            raise RuntimeError(
                "grow: the cache holds rows whose parents only the device knows; commit() first"
            )
        tree.grow(parents)
        length = self.length
        positions = [
            length + depth for depth in tree.depths[first:]
        ]  # as deep as there are rows above
        sees_all = count == 1 and positions[0] == length + first and not self.fixed
        seen = None if sees_all else tree.of(first)
        if self._direct:  # nothing goes to another device, or is padded
            return self.forward(*self._few(tokens, positions), seen, self.cache, **inputs)[0]
        return self._run(
            tokens, positions, None if seen is None else upload(seen, self.device), inputs
        )

    def commit(self, rows: list[int]) -> None:
        """Keep these tree rows, a path from the end of the prefix down, and drop all others."""
        if self.fixed:
            self.fixed.commit(self, self.length, rows)
        else:
            self.cache.commit(self.length, [self.length + row for row in rows])
        self.length += len(rows)
        self._dropped()

    def rollback(self) -> None:
        """Drop the tree."""
        self.commit([])

    def _dropped(self) -> None:
        self.rows = 0
        self._tree.clear()

    def _run(
        self,
        tokens: Tokens,
        positions: Sequence[int] | Tensor,
        mask: Tensor | None,
        inputs: dict[str, Tensor],
    ) -> Tensor:
        """A pass over n rows. mask: additive, [1, 1, n, rows], about the tree's rows so far.

        None: one row that sees everything, or the first tokens of a sequence, which see those
        before them.
        """
        ids = self._ids(tokens, positions)
        if self.fixed and mask is None:
            return self.fixed.first(self, ids, inputs)
        if self.fixed and mask is not None:
            size = self.fixed.size(len(positions), self.rows)
            return self.fixed.run(
                self, self.length + self.rows, size, ids, self._wide(mask, size), inputs
            )
        return self.forward(*ids, mask, self.cache, **inputs)[0]

    def _few(self, tokens: Tokens, positions: list[int]) -> tuple[Tensor, Tensor]:
        """Tokens and positions of a tree on the host, as tensors [1, n].

        Up to `_FEW` of them are written into tensors that the session keeps for every n, so the
        next pass over n rows overwrites them. That takes less time than making new ones.
        """
        count = len(tokens)
        if count > _FEW:
            return self._ids(tokens, positions)
        if (held := self._held.get(count)) is None:
            both = torch.empty(2, 1, count, dtype=torch.long)
            held = self._held[count] = both[0], both[1], both.view(2, count).numpy()
        held[2][0], held[2][1] = tokens, positions
        return held[0], held[1]

    def _ids(self, tokens: Tokens, positions: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Both as [1, n] on the device."""
        if isinstance(tokens, Tensor) and isinstance(positions, Tensor):
            return tokens[None], positions[None]
        ids = upload(integers([tokens, positions]), self.device)  # at once
        return ids[:1], ids[1:]

    def _wide(self, mask: Tensor, size: int) -> Tensor:
        """Widen `mask` to a cache of fixed capacity, [1, 1, size, capacity].

        All rows see the prefix, none what is after the tree. Padded rows see what there is, so that
        they stay finite.
        """
        assert self.fixed is not None
        end = self.length + self.rows
        wide = torch.zeros(size, self.fixed.capacity, dtype=self.dtype, device=self.device)
        wide[: mask.shape[2], self.length : end] = mask[0, 0]
        wide[:, end:] = self._blocked
        return wide[None, None]
