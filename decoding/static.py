"""Static shapes: passes of a few fixed sizes over a fixed cache, so that each is one graph.

A pass over n rows is padded to the next of at most eight sizes; its mask spans the full cache; the
slots that it writes are a tensor. Nothing that the forward pass sees depends on how far the
sequence has come, so `torch.compile` captures a graph a size and CUDA replays it. Padded rows write
to the last slot, which no row is shown. All sizes are captured at the first prompt of a model, so
that no later pass has to wait for that.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, RLock
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nde_talf.decoding.cache import KVCache
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.device import integers, upload

Compile = Callable[[Callable], Callable]
MARGIN = 17  # tokens of context beyond prompt and text with which no delayed tree has to be cut
_SIZES = 8
_GRAPHS = 256  # of one function: a size each, of every model


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


def uncompiled(function: Callable) -> Callable:
    """Return `function` as it is."""
    return function


class StaticShapes:
    """Fixed shapes for sequences of up to `context` tokens, and up to `rows` rows of a tree after.

    compile: what is done to a forward pass, by default `cuda_graphs` on CUDA and nothing elsewhere.
    Models keep their cache and their graphs here from one session to the next; a model holds one
    sequence at a time, the one that was begun last.
    """

    def __init__(
        self,
        context: int,
        rows: int = 128,
        compile: Compile | None = None,
    ):
        for name, value in (("context", context), ("rows", rows)):
            if value < 1:
                raise UserError(f"static shapes: {name}={value}; it must be at least 1.")
        self.context, self.rows, self.compile = context, rows, compile
        doubled = [*(1 << power for power in range((rows - 1).bit_length())), rows]
        # More than 128 rows: eight sizes, each the same multiple of the one before.
        even = sorted({math.ceil(rows ** (step / (_SIZES - 1))) for step in range(_SIZES)})
        self.sizes = doubled if len(doubled) <= _SIZES else even
        self.capacity = (
            -(-(context + rows + 1) // 8) * 8
        )  # attention kernels want masks in lines of a multiple of 8
        self._passes: dict[Callable[..., Tensor], FixedPasses] = {}
        self._lock = Lock()

    def size(self, rows: int) -> int:
        """The smallest size of a pass that holds `rows`. Raises UserError where there is none."""
        if rows > self.rows:
            raise UserError(
                f"static shapes: a tree of {rows} rows where {self.rows} were asked for; give"
                f" rows={rows} or more."
            )
        return next(size for size in self.sizes if size >= rows)

    def passes(
        self, forward: Callable[..., Tensor], device: torch.device, layers: int | None
    ) -> "FixedPasses":
        """Return a model's passes, the same object at every call."""
        with self._lock:
            if forward not in self._passes:
                compile = self.compile or (cuda_graphs if device.type == "cuda" else uncompiled)
                self._passes[forward] = FixedPasses(
                    forward, device, KVCache(layers, capacity=self.capacity), compile, self
                )
            return self._passes[forward]


class FixedPasses:
    """A forward pass with the cache and the graphs that a model's sessions share.

    user: the session whose sequence the cache holds. lock: held while the cache is written or
    changes hands, since threads may share the model.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        device: torch.device,
        cache: KVCache,
        compile: Compile,
        shapes: StaticShapes,
    ):
        self.forward, self.device, self.cache, self.shapes, self.capacity = (
            forward,
            device,
            cache,
            shapes,
            shapes.capacity,
        )
        self.compiled, self.move = compile(forward), compile(cache.move)
        self.warm = compile is uncompiled
        self.user: Any = None
        self.lock = RLock()

    @contextmanager
    def _turn(self, session: Any, takes: bool = False) -> Iterator[None]:
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

    def size(self, count: int, rows: int) -> int:
        """The size of a pass over `count` rows, of a tree that has `rows` rows after it.

        All of them need slots.
        """
        self.shapes.size(max(count, rows))
        return self.shapes.size(count)

    def first(self, session: Any, ids: tuple[Tensor, Tensor], inputs: dict[str, Tensor]) -> Tensor:
        """A sequence's first pass, over the prompt: neither padded nor compiled.

        The session takes the cache.
        """
        with self._turn(session, takes=True):
            self.cache.write_to(torch.arange(ids[0].shape[1], device=self.device), alone=True)
            hidden = self.forward(*ids, None, self.cache, **inputs)[0]
            if not self.warm:
                self._warm_up(session, {name: x[:, :1] for name, x in inputs.items()})
            return hidden

    def _warm_up(self, session: Any, inputs: dict[str, Tensor]) -> None:
        """Run every size twice, over rows that see and write nothing but the last slot.

        torch compiles a function in the first call, and makes its CUDA graph in the second. inputs:
        one row of each.
        """
        self.warm = True
        nowhere = self.capacity - 1
        for size in 2 * self.shapes.sizes:
            tokens, positions = (
                torch.zeros(1, size, dtype=torch.long, device=self.device) for _ in range(2)
            )
            mask = torch.full(
                (1, 1, size, self.capacity),
                torch.finfo(session.dtype).min,
                dtype=session.dtype,
                device=self.device,
            )
            mask[..., nowhere] = 0
            self._pass(
                tokens[0] + nowhere,
                (tokens, positions),
                mask,
                {n: x.repeat(1, size, 1) for n, x in inputs.items()},
            )
        for _ in range(2):
            self.move(*torch.full((2, self.shapes.rows), nowhere, device=self.device).unbind())

    def run(
        self,
        session: Any,
        end: int,
        size: int,
        ids: tuple[Tensor, Tensor],
        mask: Tensor,
        inputs: dict[str, Tensor],
    ) -> Tensor:
        """A pass over rows padded to `size`, which writes the slots up to `end`."""
        count = ids[0].shape[1]
        slots = [*range(end - count, end), *[self.capacity - 1] * (size - count)]
        padded = {name: F.pad(x, (0, 0, 0, size - count)) for name, x in inputs.items()}
        with self._turn(session):
            tokens, positions = (F.pad(x, (0, size - count)) for x in ids)
            return self._pass(
                upload(integers(slots), self.device), (tokens, positions), mask, padded
            )[0, :count]

    def _pass(
        self, slots: Tensor, ids: tuple[Tensor, Tensor], mask: Tensor, inputs: dict[str, Tensor]
    ) -> Tensor:
        self.cache.write_to(slots)
        try:
            return self.compiled(*ids, mask, self.cache, **inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UserError(
                "static shapes: a forward pass cannot be captured as one graph"
                f" ({str(error).strip().splitlines()[0]}). Switch static shapes off for this model."
            ) from error

    def commit(self, session: Any, length: int, rows: list[int]) -> None:
        """Put these tree rows right after a prefix of `length` slots."""
        with self._turn(session):
            moved = [(length + row, length + at) for at, row in enumerate(rows) if row != at]
            if moved:
                moved += [(self.capacity - 1, self.capacity - 1)] * (self.shapes.rows - len(moved))
                self.move(*upload(integers(moved).T.contiguous(), self.device).unbind())
