"""A key/value cache of fixed capacity at fixed addresses: where a pass writes is a tensor, so that a captured graph can be
replayed for any place."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class StaticLayer(CacheLayerMixin):
    """One layer's keys and values [1, heads, capacity, head_dim], at fixed addresses."""

    is_compileable = True
    is_sliding = False

    def __init__(self, place: "Place"):
        super().__init__()
        self.place = place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros: what was never written has weight 0 in attention, and 0 times what memory may hold need not be 0.
        self.keys, self.values = (
            x.new_zeros(*x.shape[:2], self.place.capacity, x.shape[-1]) for x in (key_states, value_states)
        )
        for states in (self.keys, self.values):
            torch._dynamo.mark_static_address(states)  # or CUDA graphs would copy the cache in and out
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self.place.slots, key_states)
        self.values.index_copy_(2, self.place.slots, value_states)
        if self.place.first:
            return key_states, value_states
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.place.first else self.place.capacity), 0

    def get_seq_length(self) -> int:
        return 0  # positions and masks are given

    def get_max_length(self) -> int:
        return self.place.capacity


class Place:
    """Where a pass writes: slots [n]. first: it is a sequence's first one, which sees itself alone."""

    def __init__(self, capacity: int):
        self.capacity, self.first = capacity, True
        self.slots: Tensor | None = None


class StaticCache(Cache):
    """Static layers that share the place a pass writes to."""

    def __init__(self, layers: int, capacity: int):
        self.place = Place(capacity)
        super().__init__(layers=[StaticLayer(self.place) for _ in range(layers)])

    @property
    def bytes(self) -> int:
        """What the buffers hold."""
        return sum(x.nbytes for layer in self.layers if layer.is_initialized for x in (layer.keys, layer.values))

    def move(self, slots: Tensor, to: Tensor) -> None:
        """Copy `slots` [n] to the slots `to` [n], in every layer."""
        for layer in self.layers:
            for states in (layer.keys, layer.values):
                states.index_copy_(2, to, states.index_select(2, slots))
