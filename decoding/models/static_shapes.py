"""Static shapes: passes of a few fixed sizes over a fixed cache, so that each is one graph.

A pass over n rows is padded to the next of at most eight sizes; its mask spans the full cache; the
slots that it writes are a tensor. Nothing that the forward pass sees depends on how far the
sequence has come, so `torch.compile` captures a graph a size and CUDA replays it. Padded rows write
to the last slot, which no row is shown. All sizes are captured at the first prompt of a model, so
that no later pass has to wait for that.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock, RLock
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, StaticLayer

from nde_talf.decoding.common.arguments import Positive, checked
from nde_talf.decoding.common.errors import UserError, first_line
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.device import asynchronous, blocked, upload
from nde_talf.decoding.models.cache import KVCache, Slots
from nde_talf.decoding.models.configuration import bytes_of_context
from nde_talf.decoding.models.tree_session import Forward, Shapes, TreeSession

Compile = Callable[[Callable], Callable]
MARGIN = 17  # tokens of context beyond prompt and text with which no delayed tree has to be cut
_SIZES = 8
_SHOWN = 512  # slots, the fewest that a pass is shown
_GRAPHS = 256  # of one function: one for each size, number of slots and model


def cuda_graphs(function: Callable) -> Callable:
    """`function` compiled to a CUDA graph for every shape that it is called with."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    compiled = torch.compile(function, mode="reduce-overhead", fullgraph=True, dynamic=False)

    def replayed(*args: Any, **kwargs: Any) -> Tensor | None:
        torch.compiler.cudagraph_mark_step_begin()
        result = compiled(*args, **kwargs)
        return (
            None if result is None else result.clone()
        )  # the next replay writes to the same memory

    return replayed


class RecordedGraphs:
    """Functions over fixed buffers, each captured as a CUDA graph when it is first called.

    Nothing is compiled and no guard is checked. Off CUDA functions run as they are, as do those
    that cannot be captured, after one warning.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.pool: Any = None  # of memory that the graphs share
        self.graphs: dict[Any, Callable[[], Any]] = {}

    def __call__(self, key: Any, function: Callable[[], Any]) -> Any:
        """Return the function's result, tensors that the next call of this key overwrites."""
        if key in self.graphs:
            return self.graphs[key]()
        # Libraries allocate in a first call what a graph may not.
        result = function()
        if asynchronous(self.device):
            self.graphs[key] = self._capture(function)
        return result

    def _capture(self, function: Callable[[], Any]) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                result = function()
        except RuntimeError as error:
            warnings.warn(
                f"static shapes: a pass cannot be captured, so it runs as it is"
                f" ({first_line(error)}).",
                stacklevel=2,
            )
            return function

        def replay() -> Any:
            graph.replay()
            return result

        return replay


class FixedLayer(StaticLayer):
    """One layer's keys and values [1, heads, capacity, head_dim], at fixed addresses.

    They begin as zeros: what was never written has weight 0 in attention, and 0 times what memory
    may hold need not be 0.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, target: "WriteTarget", slots: Slots | None = None, index: int = 0):
        super().__init__(target.capacity)
        self.target, self.slots, self.index = target, slots, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take slots of the tensor that layers share; a layer of another shape has its own."""
        if self.slots is None:
            super().lazy_initialization(key_states, value_states)
            return
        self.slots, self.index = self.slots.of(key_states, value_states, self.index)
        new = self.slots.states is None
        try:
            states = self.slots.room(key_states, value_states, self.target.capacity)
        except torch.OutOfMemoryError as error:
            size = 2 * self.slots.layers * self.target.capacity * key_states[:, :, :1].nbytes
            raise UserError(
                f"static shapes: keys and values of {self.target.capacity} tokens need"
                f" {size / 2**30:.2f} GiB, more than the device has left. Give a smaller context."
            ) from error
        if new:
            states.zero_()
        shown = states[2 * self.index : 2 * self.index + 2, :, :, : self.target.capacity]
        self.keys = shown[0, ..., : key_states.shape[-1]]
        self.values = shown[1, ..., : value_states.shape[-1]]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, heads, n, head_dim] to the slots; return what rows see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self.target.slots, key_states)
        self.values.index_copy_(2, self.target.slots, value_states)
        if self.target.alone:
            return key_states, value_states
        shown = self.target.shown
        return self.keys[:, :, :shown], self.values[:, :, :shown]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (number of slots that a pass is shown, offset 0)."""
        return (query_length if self.target.alone else self.target.shown), 0

    def get_seq_length(self) -> int:
        """Return 0, since positions and masks are given."""
        return 0


class WriteTarget:
    """Slots [n] that a pass over fixed layers writes to.

    alone: the rows are a sequence's first ones, which see only themselves. shown: the first slots,
    which the rows are shown otherwise.
    """

    def __init__(self, capacity: int):
        self.capacity, self.alone, self.shown = capacity, True, capacity
        self.slots = torch.empty(0, dtype=torch.long)


class FixedCache(KVCache):
    """A cache of `layers` layers at fixed addresses, of `capacity` slots each.

    Passes write where a tensor says, so that a captured graph can be replayed.

    Args:
        shared: layers of one shape share one tensor, so that a move is one. torch.compile wants a
            tensor for each.
    """

    capacity: int

    def __init__(self, layers: int, capacity: int, shared: bool = False):
        self.capacity, self.target = capacity, WriteTarget(capacity)
        slots = Slots(layers, capacity) if shared else None
        Cache.__init__(self, layers=[FixedLayer(self.target, slots, i) for i in range(layers)])

    def columns(self, count: int) -> int:
        """See `KVCache.columns`."""
        return count if self.target.alone else self.target.shown

    def place(self, positions: Tensor) -> Tensor:
        """See `KVCache.place`."""
        if self.positions is None:
            self.positions = positions.new_zeros(1, self.capacity)
            # as the keys: torch makes no graph that writes to anything else
            torch._dynamo.mark_static_address(self.positions)
        self.positions.index_copy_(1, self.target.slots, positions)
        return positions if self.target.alone else self.positions[:, : self.target.shown]

    def write_to(self, slots: Tensor, shown: int = 0) -> None:
        """Set where the next pass writes, and how many slots it is shown; 0: its own rows alone."""
        target = self.target
        target.slots, target.alone, target.shown = slots, not shown, shown or target.capacity

    def clear(self, slot: int) -> None:
        """Write zeros to a slot, in every layer."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[:, :, slot], layer.values[:, :, slot] = 0, 0

    def move(self, slots: Tensor, to: Tensor) -> None:
        """Copy `slots` [n] to the slots `to` [n], in every layer."""
        layers = [layer for layer in self.layers if layer.is_initialized]
        # a layer that is not reads another one's keys and values
        shared = dict.fromkeys(layer.slots.states for layer in layers if layer.slots)
        alone = [states for each in layers if not each.slots for states in (each.keys, each.values)]
        for states in (*shared, *alone):
            states.index_copy_(-2, to, states.index_select(-2, slots))
        if self.positions is not None:
            self.positions.index_copy_(1, to, self.positions.index_select(1, slots))


class StaticShapes(Shapes):
    """Fixed shapes for sequences of up to `context` tokens, and up to `rows` rows of a tree after.

    Models keep their cache and their graphs here from one session to the next; a model holds one
    sequence at a time, the one that was begun last.

    compile: what is done to a forward pass in place of `cuda_graphs`.

    Attributes:
        recorded: graphs are recorded as passes run, and not compiled.
    """

    recorded = False

    @checked
    def __init__(
        self,
        context: Positive,
        rows: Positive = 128,
        compile: Compile | None = None,
    ):
        self.context, self.rows, self.compile = context, rows, compile
        self.sizes = sorted({1, *(math.ceil(rows / 2**step) for step in range(_SIZES - 1))})
        self.capacity = (
            -(-(context + rows + 1) // 8) * 8
        )  # attention kernels want masks in lines of a multiple of 8
        self._passes: dict[Forward, FixedPasses] = {}
        self._lock = Lock()
        self._told = set[int]()

    def recorder(self, decoder: Any) -> Any:
        """Record no steps (`Shapes.recorder`), and print the size of the buffers."""
        self.tell_size(decoder)

    def tell_size(self, decoder: Any, rows: int = 0) -> None:
        """Print what a decoder's buffers take on a device, once; rows: bytes of distributions."""
        target, draft = decoder.target, decoder.drafter and decoder.drafter.model
        size = rows
        for model in (target, draft) if draft else (target,):
            size += self.capacity * bytes_of_context(model.config, model.dtype)
        if asynchronous(target.device) and size not in self._told:
            self._told.add(size)
            console.print(
                f"static shapes: buffers for {self.context} tokens take {size / 2**20:,.0f} MiB"
            )

    def size(self, rows: int) -> int:
        """The smallest size of a pass that holds `rows`. Raises UserError where there is none."""
        if rows > self.rows:
            raise UserError(
                f"static shapes: a tree of {rows} rows where {self.rows} were asked for; give"
                f" rows={rows} or more."
            )
        return next(size for size in self.sizes if size >= rows)

    def shown(self, end: int) -> int:
        """Return how many slots a pass is shown that needs the first `end`: 512, 1024, 2048, ...

        Over the full cache attention would cost the same for a short text as for a long one.
        """
        return min(self.capacity, max(_SHOWN, 1 << (end - 1).bit_length()))

    def check_layers(self, target: Any, layers: Sequence[int]) -> None:
        """Raise UserError where features of a target's layers cannot be taken inside a graph."""
        if layers and target.native is None:
            raise UserError(
                "static shapes: the drafter takes features of the target's layers"
                f" {', '.join(map(str, layers))}, which hooks collect outside a graph. Switch"
                " static shapes off, or use a head with draft.features=final."
            )

    def session(
        self, forward: Forward, device: torch.device, dtype: torch.dtype, layers: int | None
    ) -> "StaticSession":
        """Make a session whose passes have these shapes."""
        with self._lock:
            if forward not in self._passes:
                self._passes[forward] = FixedPasses(forward, device, dtype, layers or 0, self)
        return StaticSession(self._passes[forward])


class FixedPasses:
    """A forward pass with the cache and the graphs that a model's sessions share.

    user: the session whose sequence the cache holds. lock: held while the cache is written or
    changes hands, since threads may share the model.
    """

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        dtype: torch.dtype,
        layers: int,
        shapes: StaticShapes,
    ):
        self.forward, self.device, self.dtype = forward, device, dtype
        self.shapes, self.nowhere = shapes, shapes.capacity - 1
        compile = shapes.compile
        if device.type == "cuda" and not shapes.recorded:
            compile = compile or cuda_graphs
        self.cache = FixedCache(layers, shapes.capacity, shared=compile is None)
        self.compiled, self.move = forward, self.cache.move
        self.compiles = compile is not None
        self.recorded, self.buffers = RecordedGraphs(device), dict[Any, list[Tensor]]()
        self.warm = set[int]()  # numbers of slots shown, of which all sizes have run
        if compile is not None:
            self.compiled, self.move = compile(forward), compile(self.cache.move)
        self.user: StaticSession | None = None
        self.lock = RLock()

    @contextmanager
    def turn(self, session: "StaticSession", takes: bool = False) -> Iterator[None]:
        """Give `session` the cache inside the block.

        takes: it gets the cache now; otherwise UserError, unless it has it already.
        """
        with self.lock:
            if takes:
                self.user = session
            if self.user is not session:
                raise UserError(
                    "static shapes: this sequence cannot go on, since the model has begun another"
                    " sequence and holds one at a time. Read a stream to its end before the next,"
                    " give each StaticShapes of its own, or decode without static shapes, where"
                    " streams can be read in turn."
                )
            yield

    def first(self, ids: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """A sequence's first pass, over the prompt: neither padded nor compiled."""
        count = ids.shape[2]
        self.cache.write_to(torch.arange(count, device=self.device))
        hidden = self.forward(ids[0], ids[1], None, self.cache, **inputs)[0]
        self.warm_up(self.shapes.shown(count + self.shapes.rows), inputs)
        return hidden

    def warm_up(self, shown: int, inputs: dict[str, Tensor]) -> None:
        """Run every size twice over the first `shown` slots, unless that was done before.

        torch compiles a function in the first call, and makes its CUDA graph in the second. The
        rows write to the last slot, which is cleared: no later row may find a NaN there. inputs:
        one row of each, or more.
        """
        if not self.compiles or shown in self.warm:
            return
        self.warm.add(shown)
        for size in 2 * self.shapes.sizes:
            ids = torch.zeros(2, 1, size, dtype=torch.long, device=self.device)
            repeated = {name: x[:, :1].repeat(1, size, 1) for name, x in inputs.items()}
            mask = torch.zeros(1, 1, size, shown, device=self.device, dtype=self.dtype)
            self.run(ids[0, 0] + self.nowhere, ids, mask, repeated)
        for _ in range(2):
            self.move(*torch.full((2, self.shapes.rows), self.nowhere, device=self.device).unbind())
        self.cache.clear(self.nowhere)

    def run(self, slots: Tensor, ids: Tensor, mask: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Run a pass of one of the sizes, which writes to `slots`; ids: tokens and positions."""
        if self.shapes.recorded:
            tensors = slots, ids, mask, *inputs.values()
            if mask.shape not in self.buffers:
                self.buffers[mask.shape] = [each.clone() for each in tensors]
            buffers = self.buffers[mask.shape]
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.copy_(tensor)
            return self.recorded(mask.shape, partial(self._pass, [*inputs], *buffers)).clone()
        self.cache.write_to(slots, mask.shape[-1])
        try:
            return self.compiled(ids[0], ids[1], mask, self.cache, **inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UserError(
                "static shapes: a forward pass cannot be captured as one graph"
                f" ({first_line(error)}). Switch static shapes off for this model."
            ) from error

    def _pass(self, names: list[str], *tensors: Tensor) -> Tensor:
        slots, ids, mask, *inputs = tensors
        self.cache.write_to(slots, mask.shape[-1])
        return self.forward(
            ids[0], ids[1], mask, self.cache, **dict(zip(names, inputs, strict=True))
        )


class StaticSession(TreeSession):
    """Session over a cache that the sessions of one model share.

    One that was begun before another one raises UserError when it is read.
    """

    skips_masks = False

    def __init__(self, passes: FixedPasses):
        self.passes, self.most = passes, passes.shapes.rows
        super().__init__(passes.forward, passes.device, passes.dtype)

    def _new_cache(self, expected: int) -> KVCache:
        return self.passes.cache

    def _run(self, ids: Tensor, sees: Any, inputs: dict[str, Tensor]) -> Tensor:
        """See `TreeSession._run`: rows are padded to one of the sizes."""
        passes, count = self.passes, ids.shape[2]
        if sees is None:
            with passes.turn(self, takes=True):
                return passes.first(ids, inputs)
        passes.shapes.size(self.rows)  # all rows of the tree need slots
        padding = passes.shapes.size(count) - count
        end = self.length + self.rows
        slots = torch.tensor([*range(end - count, end), *[passes.nowhere] * padding])
        padded = {name: F.pad(x, (0, 0, 0, padding)) for name, x in inputs.items()}
        ids = F.pad(ids, (0, padding))
        with passes.turn(self):
            # All rows see the prefix, none what is after the tree. Padded rows see what there is,
            # so that they stay finite.
            shown = passes.shapes.shown(end)
            passes.warm_up(shown, padded)
            shape = 1, 1, count + padding, shown
            mask = torch.zeros(shape, dtype=self.dtype, device=self.device)
            mask[..., :count, self.length : end] = self._additive(sees)
            mask[..., end:] = blocked(self.dtype)
            return passes.run(upload(slots, self.device), ids, mask, padded)[0, :count]

    def _keep(self, rows: list[int]) -> None:
        passes, length = self.passes, self.length
        with passes.turn(self):
            moved = [(length + row, length + at) for at, row in enumerate(rows) if row != at]
            if moved:
                if passes.compiles:  # of one shape
                    moved += [(passes.nowhere, passes.nowhere)] * (passes.shapes.rows - len(moved))
                passes.move(*upload(torch.tensor(moved).T.contiguous(), self.device).unbind())
