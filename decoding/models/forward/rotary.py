"""Rotary positions: tables of angles made once, and the rotation."""

from threading import Lock
from typing import Any

import torch
from torch import Tensor

_FIRST = 1024
"""Positions of a new table. It grows in powers of two."""


Angles = tuple[Tensor, Tensor]
"""cos, and sin with a minus sign in its first half, [B, n, 1, D]."""


class RotaryTable:
    """Angles at positions 0, 1, 2, ...: [positions, 2 D], as transformers computes them in float32.

    Args:
        module: transformers' rotary module.
        kind: of the layers, where the module has angles for each.
        like: a tensor of the states' type and device.
    """

    def __init__(self, module: Any, kind: str | None, like: Tensor):
        self.module, self.like = module, like
        self.kind = () if kind is None else (kind,)
        self.table, self._lock = like[:0], Lock()
        self.reach(_FIRST)

    def reach(self, positions: int) -> None:
        """Make the table longer where it ends before so many positions."""
        if positions <= len(self.table):
            return
        with self._lock:  # threads share the model
            longer = max(len(self.table), 1 << (positions - 1).bit_length())
            rows = torch.arange(longer, device=self.like.device)[None]
            cos, sin = self.module(self.like, rows, *self.kind)
            half = sin.shape[-1] // 2
            self.table = torch.cat([cos, -sin[..., :half], sin[..., half:]], -1)[0]

    def at(self, positions: Tensor) -> Angles:
        """Return the angles at `positions` [B, n]."""
        cos, sin = torch.embedding(self.table, positions).unsqueeze(2).chunk(2, -1)
        return cos, sin


def rotate(states: Tensor, angles: Angles) -> Tensor:
    """Turn states [B, n, heads, D] in place.

    In each head the pair (x_i, x_{i + D/2}), i < D/2, turns by the angle of i.
    """
    cos, sin = angles
    swapped = states.roll(states.shape[-1] // 2, -1)
    return states.mul_(cos).addcmul_(swapped, sin)
