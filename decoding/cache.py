"""A key/value cache whose rows are slots: written in place, rolled back by length, compacted by gathering rows.

It knows nothing about trees. Transformers' models write through it; buffers grow by doubling, so a pass never copies
the prefix.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_FIRST_CAPACITY = 256


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values [B, heads, capacity, head_dim], of which the first `length` slots are in use."""

    is_sliding = False
    is_croppable = True

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._reserve(key_states, value_states, _FIRST_CAPACITY)
        self.is_initialized = True

    def _reserve(self, key_states: Tensor, value_states: Tensor, needed: int) -> None:
        capacity = max(_FIRST_CAPACITY, 1 << (needed - 1).bit_length())
        for name, states in (("keys", key_states), ("values", value_states)):
            batch, heads, _, width = states.shape
            grown = states.new_zeros(batch, heads, capacity, width)
            if self.length:
                grown[:, :, : self.length] = getattr(self, name)[:, :, : self.length]
            setattr(self, name, grown)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            self._reserve(key_states, value_states, end)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def keep(self, length: int, slots: Tensor | None) -> None:
        """Keep the first `length` slots and behind them, in this order, `slots` [m]; drop everything else."""
        if slots is not None:
            for states in (self.keys, self.values):
                states[:, :, length : length + len(slots)] = states.index_select(-2, slots)
            length += len(slots)
        self.length = length

    def expand(self, batch: int) -> None:
        """Copy the one sequence held to `batch` rows."""
        self.keys = self.keys.expand(batch, -1, -1, -1).contiguous()
        self.values = self.values.expand(batch, -1, -1, -1).contiguous()


class SlotCache(Cache):
    """`SlotLayer`s for every layer of a model, made as the model writes."""

    def __init__(self):
        super().__init__(layer_class_to_replicate=SlotLayer)

    @property
    def length(self) -> int:
        return self.layers[0].length if self.layers else 0

    def keep(self, length: int, slots: list[int] | None = None) -> None:
        """See `SlotLayer.keep`. Slots that already lie in place (length, length + 1, ...) are not moved."""
        slots = list(slots or ())
        while slots and slots[0] == length:
            length, slots = length + 1, slots[1:]
        if not self.layers:
            return
        moved = torch.tensor(slots, device=self.layers[0].device) if slots else None
        for layer in self.layers:
            layer.keep(length, moved)

    def expand(self, batch: int) -> None:
        for layer in self.layers:
            layer.expand(batch)
