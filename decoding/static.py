"""Static shapes: passes of a few fixed sizes over a cache of fixed capacity, so that each size is one graph.

A pass over n rows is padded to the next of the sizes 1, 2, 4, ...; its mask spans the whole cache; the slots that it writes are
a tensor. Nothing that the forward pass sees depends on how far the sequence has come, so `torch.compile` captures a graph a
size and CUDA replays it. Padded rows write to the last slot, which no row is shown.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, RLock

import torch
from torch import Tensor
from torch.nn import functional as F

from decoding.common.errors import UserError
from decoding.device import upload
from decoding.session import Forward, Hides, Tokens, TreeSession
from decoding.static_cache import StaticCache

Compile = Callable[[Callable], Callable]
MARGIN = 17  # tokens of context beyond prompt and text with which no delayed tree has to be cut
_GRAPHS = 256  # of one function: a size each, of every model


def cuda_graphs(function: Callable) -> Callable:
    """`function` compiled to a CUDA graph for every shape that it is called with."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    compiled = torch.compile(function, mode="reduce-overhead", fullgraph=True, dynamic=False)

    def replayed(*args, **kwargs) -> Tensor | None:
        torch.compiler.cudagraph_mark_step_begin()
        result = compiled(*args, **kwargs)
        return None if result is None else result.clone()  # the next replay writes to the same place

    return replayed


def uncompiled(function: Callable) -> Callable:
    return function


class StaticShapes:
    """For sequences of up to `context` tokens, with up to `rows` rows of a tree behind them.

    compile: what is done to a forward pass, by default `cuda_graphs` on CUDA and nothing elsewhere. Models keep their cache and
    their graphs here from one session to the next; a model holds one sequence at a time, the one that was begun last.
    """

    def __init__(self, context: int, rows: int = 128, compile: Compile | None = None):
        for name, value in (("context", context), ("rows", rows)):
            if value < 1:
                raise UserError(f"static shapes: {name}={value}; it must be at least 1.")
        self.context, self.rows, self.compile = context, rows, compile
        self.sizes = [*(1 << power for power in range((rows - 1).bit_length())), rows]
        self.capacity = -(-(context + rows + 1) // 8) * 8  # attention kernels want masks in lines of a multiple of 8
        self._models: dict[Forward, _StaticModel] = {}
        self._lock = Lock()

    def size(self, rows: int) -> int:
        """The least size of a pass that holds `rows`. Raises UserError where there is none."""
        if rows > self.rows:
            raise UserError(f"static shapes: a tree of {rows} rows where {self.rows} were asked for; give rows={rows} or more.")
        return next(size for size in self.sizes if size >= rows)

    def model(self, forward: Forward, device: torch.device, layers: int) -> "_StaticModel":
        with self._lock:
            if forward not in self._models:
                compile = self.compile or (cuda_graphs if device.type == "cuda" else uncompiled)
                self._models[forward] = _StaticModel(forward, StaticCache(layers, self.capacity), compile)
            return self._models[forward]


def session(
    forward: Forward, device: torch.device, dtype: torch.dtype, layers: int | None, static: StaticShapes | None
) -> TreeSession:
    """A session of static shapes where there are `static`, else a plain one."""
    if static is None:
        return TreeSession(forward, device, dtype, layers)
    return StaticSession(forward, device, dtype, layers, static)


class _StaticModel:
    """A forward pass with the cache and the graphs that its sessions share. user: whose sequence the cache holds. lock: held
    while the cache is written or changes hands, since threads may share the model."""

    def __init__(self, forward: Forward, cache: StaticCache, compile: Compile):
        self.forward, self.cache = forward, cache
        self.compiled, self.move = compile(forward), compile(cache.move)
        self.user: StaticSession | None = None
        self.lock = RLock()


class StaticSession(TreeSession):
    """A `TreeSession` of static shapes. A sequence's first pass, over the prompt, is as long as it is and runs uncompiled; it
    takes the model's cache, and a session that had it before raises UserError from then on."""

    def __init__(self, forward: Forward, device: torch.device, dtype: torch.dtype, layers: int, static: StaticShapes):
        self.static, self.model = static, static.model(forward, device, layers)
        super().__init__(forward, device, dtype, layers)

    def _empty(self, expected: int) -> None:
        super()._empty(expected)
        self.cache = self.model.cache

    @contextmanager
    def _turn(self, first: bool = False) -> Iterator[None]:
        """Inside, the model's cache is this sequence's; first: it takes it."""
        with self.model.lock:
            if first:
                self.model.user = self
            if self.model.user is not self:
                raise UserError(
                    "static shapes: this sequence cannot go on, since the model has begun another sequence and holds one at a "
                    "time. Read a stream to its end before the next, give each StaticShapes of its own, or decode without "
                    "static shapes, where streams can be read in turn."
                )
            yield

    def _move(self, rows: list[int]) -> None:
        with self._turn():
            self._put(rows)

    def _put(self, rows: list[int]) -> None:
        moved = [(self.length + row, self.length + at) for at, row in enumerate(rows) if row != at]
        if moved:
            moved += [(self._nowhere, self._nowhere)] * (self.static.rows - len(moved))
            self.model.move(*upload(torch.tensor(moved).T.contiguous(), self.device).unbind())

    @property
    def _nowhere(self) -> int:
        return self.static.capacity - 1

    def _run(self, tokens: Tokens, positions: list[int] | Tensor, hides: Hides | None, inputs: dict[str, Tensor]) -> Tensor:
        with self._turn(first=hides is None):
            return self._pass(tokens, positions, hides, inputs)

    def _pass(self, tokens: Tokens, positions: list[int] | Tensor, hides: Hides | None, inputs: dict[str, Tensor]) -> Tensor:
        n, place = len(positions), self.cache.place
        place.first = hides is None
        if hides is None:
            place.slots = torch.arange(n, device=self.device)
            return self.forward(*self._ids(tokens, positions), None, self.cache, **inputs)[0]
        self.static.size(max(n, self.rows))  # all rows of a tree have their slots
        size = self.static.size(n)
        unread = isinstance(hides, Tensor)
        end = self.length + (hides.shape[1] if unread else len(hides[-1]))
        place.slots = upload(torch.tensor([*range(end - n, end), *[self._nowhere] * (size - n)]), self.device)
        ids, positions = (F.pad(x, (0, size - n)) for x in self._ids(tokens, positions))
        padded = {name: F.pad(x, (0, 0, 0, size - n)) for name, x in inputs.items()}
        mask = self._mask(F.pad(hides, (0, 0, 0, size - n)) if unread else hides + [b""] * (size - n))
        try:
            return self.model.compiled(ids, positions, mask, self.cache, **padded)[0, :n]
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UserError(
                f"static shapes: a forward pass cannot be captured as one graph ({str(error).strip().splitlines()[0]}). "
                "Switch static shapes off for this model."
            ) from error

    def _mask(self, hides: Hides) -> Tensor:
        """Additive mask [1, 1, n, capacity]. A padded row, of an empty line or one of zeros, sees what there is, so that it
        stays finite."""
        if isinstance(hides, Tensor):
            unused = self.static.capacity - self.length - hides.shape[1]
            hidden = F.pad(F.pad(hides, (self.length, 0)), (0, unused), value=True)
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            return mask.masked_fill_(hidden, self._blocked)[None, None]
        prefix, capacity = bytes(self.length), self.static.capacity
        lines = ((prefix + line).ljust(capacity, b"\1") if line else bytes(capacity) for line in hides)
        hidden = torch.frombuffer(bytearray(b"").join(lines), dtype=torch.bool).view(len(hides), capacity)
        mask = torch.zeros(len(hides), capacity, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(upload(hidden, self.device), self._blocked)[None, None]
