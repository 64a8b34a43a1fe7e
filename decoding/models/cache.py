"""Key/value cache whose rows are slots.

Rows are written in place, rolled back by length and compacted by gathering.

Transformers' models write through it. Layers of one shape are in one
tensor, so that a gather is one operation; it is made as large as it is expected to become, and
grows by half if that is not enough.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from nde_talf.decoding.device import upload

_FIRST_CAPACITY = 256


class Slots:
    """Keys and values of up to `layers` layers of one shape, in one tensor.

    `states` is [2 layers, B, heads, capacity, head_dim].
    """

    def __init__(self, layers: int, expected: int):
        self.layers, self.expected = layers, max(_FIRST_CAPACITY, expected)
        self.states: Tensor | None = None

    def of(self, keys: Tensor, values: Tensor, index: int) -> "tuple[Slots, int]":
        """Return slots for a layer of such keys and values, and its number in them.

        One of another shape or device than the first layer gets slots of its own.
        """
        asked = keys.shape[1], max(keys.shape[-1], values.shape[-1]), keys.device
        states = self.states
        if states is None or (states.shape[2], states.shape[-1], states.device) == asked:
            return self, index
        return Slots(1, self.expected), 0

    def room(self, keys: Tensor, values: Tensor, needed: int) -> Tensor:
        """Return `states`, with room for `needed` slots of such keys and values.

        These are [B, heads, n, width]. The slots in use keep their content.
        """
        old = self.states
        if old is not None and needed <= old.shape[-2]:
            return old
        capacity = needed if old is None else max(needed, old.shape[-2] * 3 // 2)
        self.states = keys.new_empty(
            2 * self.layers,
            *keys.shape[:2],
            max(self.expected, capacity),
            max(keys.shape[-1], values.shape[-1]),
        )
        if old is not None:
            self.states[..., : old.shape[-2], :] = old
        return self.states

    def gather(self, length: int, slots: Tensor) -> None:
        """Copy `slots` [m] to length, length + 1, ..., in every layer."""
        if self.states is not None:
            moved = self.states.index_select(-2, slots.to(self.states.device))
            self.states[..., length : length + len(slots), :] = moved

    def keep_rows(self, rows: Sequence[int], length: int) -> None:
        """Keep `rows` of the batch, in this order, and the first `length` slots of each.

        Only rows that change places are copied.
        """
        if self.states is not None:
            moved = [(to, row) for to, row in enumerate(rows) if to != row]
            if moved:
                to, source = (list(each) for each in zip(*moved, strict=True))
                self.states[:, to, :, :length] = self.states[:, source, :, :length]
            self.states = self.states[:, : len(rows)]


class SlotLayer(DynamicLayer):
    """Keys and values [B, heads, capacity, head_dim] of one layer.

    The first `length` slots are in use. They are views of number `index` in `slots`.
    """

    keys: Tensor
    values: Tensor
    device: torch.device

    def __init__(self, slots: Slots, index: int = 0):
        super().__init__()
        self.length, self.slots, self.index = 0, slots, index
        self.states: Tensor | None = None  # that they are views of

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take over the device and slots."""
        self.device = key_states.device
        self.slots, self.index = self.slots.of(key_states, value_states, self.index)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, n, head_dim]; return all that the layer holds."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[-2]
        states = self.slots.room(key_states, value_states, end)
        if states is not self.states:
            self.states = states
            self.keys = states[2 * self.index, ..., : key_states.shape[-1]]
            self.values = states[2 * self.index + 1, ..., : value_states.shape[-1]]
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        """Return the number of slots in use."""
        return self.length


class KVCache(Cache):
    """The keys and values of every layer of a model.

    Args:
        layers: how many that are; None: they are made as the model writes, each in a tensor of its
            own.
        expected: slots that will be needed.

    Attributes:
        capacity: slots of layers that do not grow (`static_shapes.FixedCache`).
        positions: of the slots, [B, slots]; None unless a model with windows asks for them
            (`place`).
    """

    layers: Any
    capacity: int | None = None
    positions: Tensor | None = None

    def __init__(self, layers: int | None = None, expected: int = 0):
        if layers:
            slots = Slots(layers, expected)
            super().__init__(layers=[SlotLayer(slots, index) for index in range(layers)])
        else:
            super().__init__(
                layer_class_to_replicate=cast(
                    "type[SlotLayer]", lambda: SlotLayer(Slots(1, expected))
                )
            )

    @property
    def length(self) -> int:
        """Slots in use."""
        return self.layers[0].length if self.layers else 0

    def columns(self, count: int) -> int:
        """Return how many slots a pass over `count` rows is shown, these rows included."""
        return self.length + count

    def commit(self, length: int, slots: Sequence[int] = ()) -> None:
        """Keep the first `length` slots, then `slots` in this order.

        Everything else is dropped. Slots in their place already (length, length + 1, ...) are not
        moved.
        """
        inside = 0
        while inside < len(slots) and slots[inside] == length + inside:
            inside += 1
        if inside < len(slots):
            start, moved = (
                length + inside,
                upload(torch.tensor(slots[inside:]), self.layers[0].device),
            )
            for buffer in dict.fromkeys(layer.slots for layer in self.layers):
                buffer.gather(start, moved)
            if self.positions is not None:
                self.positions = torch.cat([self.positions[:, :start], self.positions[:, moved]], 1)
        for layer in self.layers:
            layer.length = length + len(slots)

    def place(self, positions: Tensor) -> Tensor:
        """Note the `positions` [B, n] of the rows that the next pass writes.

        Returns the positions of all slots that it is shown.
        """
        before = positions[:, :0] if self.positions is None else self.positions[:, : self.length]
        self.positions = torch.cat([before, positions], 1)
        return self.positions

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order."""
        for buffer in dict.fromkeys(layer.slots for layer in self.layers):
            buffer.keep_rows(rows, self.length)
        if self.positions is not None:
            self.positions = self.positions[list(rows)]
