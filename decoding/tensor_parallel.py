"""A target that is sharded over the GPUs of one machine, one process a GPU (tensor parallelism).

Process 0, the leader, runs the program as ever: policies, verification, sampling and files exist
there alone. The other processes run `nde_talf.decoding.follower`. `nde_talf.decoding.tensor_parts`
is what all of them do to load a model: transformers puts a part of every attention and MLP matrix
into each process. Embeddings, norms and lm_head are in all of them, so that logits need the leader
alone.

A forward pass of a sharded model goes like this:

1. The leader sends commands through a socket: what was done to caches since the last pass (slots
   committed, caches copied or dropped), then which model runs, and the shapes of the inputs.
2. It broadcasts the inputs, tensor by tensor.
3. All processes run the pass. Each one attends with its own heads, over its own part of the cache,
   and the sums over the processes (all-reduce) are taken inside the layers.

Followers wait for a command at a socket, for as long as the leader lives: it may train for hours
between two passes. The time limit of the process group (`PASS_SECONDS`) counts inside a pass. When
a process ends, its sockets close. A follower then ends too; the leader raises UserError.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nde_talf.decoding.cache import KVCache
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.loading import body_of, first_line
from nde_talf.decoding.tensor_parts import (
    KEY,
    check_folder,
    complete,
    join_group,
    launched_rank,
    load_sharded,
    rendezvous,
)
from nde_talf.decoding.windows import WINDOW_KEYS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PASS_SECONDS = 600.0
"""Longest wait of one process for another one inside a pass."""
START_SECONDS = 600.0
"""Longest wait for the processes to come up, where this process did not start them."""
GRACE = 20.0
"""Seconds that a process has to end by itself, once another one has ended."""
_DOWN = (OSError, EOFError)
"""What a socket raises whose other end is closed."""


class Shape(NamedTuple):
    """A tensor in a command: it is broadcast after it."""

    size: tuple[int, ...]
    dtype: torch.dtype


class CacheOf(NamedTuple):
    """A cache in a command: its number, the `layers` that it was made with, and for transformers'
    own caches its length.
    """

    number: int
    layers: int | None
    length: int | None


class Leader:
    """Process 0 of a group: starts the others at its first `load`, loads models into all of them
    and leads their passes.

    Args:
        count: processes, this one included.
        device: "cpu" or "cuda".
        roles: names of the models that are sharded (`CausalModel.load`, name).
        seconds: see `PASS_SECONDS`.
    """

    def __init__(
        self,
        count: int,
        device: str,
        roles: Sequence[str] = ("model.target",),
        seconds: float = PASS_SECONDS,
    ):
        self.count, self.device, self.roles, self.seconds = count, device, tuple(roles), seconds
        self.broken: str | None = None
        self._closed, self._inside = (
            False,
            threading.Lock(),
        )  # held during a pass, since threads may share a model
        self._moves: list[
            tuple[Any, ...]
        ] = []  # of caches and models, which the followers have not been sent yet
        self._caches: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbers = iter(range(1, 1 << 62))
        self._folder = tempfile.TemporaryDirectory(prefix="tp-")
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._commands: dict[int, Connection] = {}
        self._lives: dict[int, Connection] = {}

    def start(self) -> None:
        """Start the other processes, or meet those that torchrun started.

        Raises UserError where they do not come up.
        """
        if (place := torch._C._get_accelerator().type) != self.device:
            raise UserError(
                f"{KEY}={self.count}: transformers puts the parts on {place}; set"
                f" model.device={place}."
            )
        path, launched = f"{self._folder.name}/socket", launched_rank() is not None
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(2 * self.count)
            server.settimeout(0.5)
            store = rendezvous(f"{self._folder.name}/store", 0, self.count)
            if launched:
                store.set("socket", path)
            else:
                self._processes = {rank: self._process(rank) for rank in range(1, self.count)}
            deadline = time.monotonic() + START_SECONDS
            while len(self._lives) < self.count - 1:
                with suppress(TimeoutError):
                    connection = Connection(server.accept()[0].detach())
                    rank, kind = connection.recv()
                    (self._lives if kind == "life" else self._commands)[rank] = connection
                if time.monotonic() > deadline or any(
                    own.poll() is not None for own in self._processes.values()
                ):
                    self.broken = self._down(
                        "the processes did not come up"
                    )  # it cannot be tried again
                    raise UserError(self.broken)
        # Lightning would take the launcher's variables for a training of its own over all
        # processes.
        for name in [
            name
            for name in os.environ
            if launched and (name in _LAUNCHER or name.startswith("TORCHELASTIC_"))
        ]:
            del os.environ[name]
        self._send("start", self.device, self.seconds)
        join_group(store, 0, self.count, self.device, self.seconds)
        threading.Thread(target=self._watch, daemon=True).start()

    def _process(self, rank: int) -> "subprocess.Popen[bytes]":
        command = [
            sys.executable,
            "-m",
            "decoding.follower",
            self._folder.name,
            str(rank),
            str(self.count),
        ]
        paths = os.pathsep.join(path for path in sys.path if path)
        if self.device == "cpu" and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it looks up the host's name
        environment = {**os.environ, "PYTHONPATH": paths, "LOCAL_RANK": str(rank)}
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"process-{rank}.log"

    def load(self, folder: str | Path, dtype: str, name: str) -> "PreTrainedModel":
        """The model in `folder`, with a part of it in every process.

        Raises UserError as `load_module` and `check_sharding`.
        """
        check_folder(folder, self.count, name)
        number = next(self._numbers)
        with self._turn():
            if not self._lives:
                self.start()
            self._send("load", number, str(folder), dtype, name)
            try:
                module = load_sharded(folder, self.device, 0, self.count, dtype, name)
            except UserError:
                self._replies()
                raise
            for rank, reply in self._replies().items():
                if reply:
                    raise UserError(f"process {rank} of {self.count}: {reply}")
            self._send("complete", number)
            complete(module)
        body = body_of(module)
        body.forward = partial(self._forward, number, weakref.ref(body))
        module.sharded_by = self, number  # type: ignore[assignment]
        weakref.finalize(module, self._moves.append, ("drop_model", number))
        return module

    def full_weight(self, number: int, name: str, weight: Tensor) -> Tensor:
        """A weight of model `number`, gathered from all processes."""
        with self._turn():
            self._send("weight", number, name)
            return weight.detach().full_tensor()  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the other processes. Models that are sharded cannot be used any more."""
        self._closed = True
        for connection in (*self._commands.values(), *self._lives.values()):
            connection.close()
        if dist.is_initialized() and (
            not self.broken or self.device == "cpu"
        ):  # nccl might wait for those that have ended
            dist.destroy_process_group()
        for process in self._processes.values():
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
        self._folder.cleanup()

    def _forward(self, number: int, body: "weakref.ref[Any]", *args: Any, **kwargs: Any) -> Any:
        with (
            self._turn(),
            torch.no_grad(),
        ):  # with gradients transformers would take another way through the layers
            tensors: list[Tensor] = []
            given = [self._described(value, tensors) for value in args]
            named = self._described(kwargs, tensors)
            autocast = (
                torch.get_autocast_dtype(self.device)
                if torch.is_autocast_enabled(self.device)
                else None
            )
            own: Any = body()
            # A check at loading makes windows small for a moment (`CausalModel`).
            windows = {key: size for key in WINDOW_KEYS if (size := getattr(own.config, key, None))}
            self._send("run", number, given, named, windows, autocast)
            for tensor in tensors:
                dist.broadcast(tensor, 0)
            return own.__class__.forward(own, *args, **kwargs)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """A pass, or anything else that all processes do together; one thread at a time.

        An error leaves the processes at different points. From then on every call raises the same
        UserError.
        """
        with self._inside:
            if self.broken:
                raise UserError(self.broken)
            try:
                yield
            except UserError:
                raise
            except Exception as error:
                self.broken = self._down(first_line(error))
                raise UserError(self.broken) from error
            except BaseException:  # Ctrl-C
                self.broken = (
                    f"{KEY}={self.count}: a pass was interrupted. Run the same command again."
                )
                raise

    def _send(self, *command: Any) -> None:
        """A command, after what was done to caches and models since the last one."""
        moves = self._moves[:]
        del self._moves[: len(moves)]  # not clear(): a cache that is dropped meanwhile adds one
        for connection in self._commands.values():
            connection.send([*moves, command])

    def _replies(self) -> dict[int, str | None]:
        """What each follower answers: None, or an error. Waits for as long as they live."""
        return {rank: connection.recv() for rank, connection in self._commands.items()}

    def _described(self, value: Any, tensors: list[Tensor]) -> Any:
        """An input of a pass as a command holds it."""
        from transformers.cache_utils import Cache

        if isinstance(value, Tensor):
            tensors.append(value.contiguous())
            return Shape(tuple(value.shape), value.dtype)
        if isinstance(value, dict):
            return {name: self._described(x, tensors) for name, x in value.items()}
        if isinstance(value, Cache):
            number = self._number(value)
            if not isinstance(value, KVCache):
                return CacheOf(number, None, value.get_seq_length())
            return CacheOf(number, len(value.layers) or None, None)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise UserError(
            f"{KEY}={self.count}: an input of type {type(value).__name__} cannot be sent to the"
            " other processes."
        )

    def _number(self, cache: Any) -> int:
        if cache not in self._caches:
            if isinstance(cache, KVCache):
                if cache.target is not None:
                    raise UserError(
                        f"{KEY}={self.count} does not go with static shapes; leave"
                        " model.static_shapes out."
                    )
                cache.moved = partial(_note, weakref.ref(self), weakref.ref(cache))
            self._caches[cache] = number = next(self._numbers)
            weakref.finalize(cache, self._moves.append, ("drop_cache", number))
        return self._caches[cache]

    def note(self, cache: KVCache, what: str, *details: Any) -> None:
        """Something was done to a cache; the followers do it before their next pass."""
        self._moves.append(
            (
                what,
                self._number(cache),
                *(self._number(x) if isinstance(x, KVCache) else x for x in details),
            )
        )

    def _down(self, error: str) -> str:
        """One paragraph about an error that other processes had a part in: which one ended, and
        what it said last.
        """
        found = []
        with suppress(*_DOWN):
            wait([*self._lives.values()], 2.0)  # one that is just ending
        for rank, connection in self._commands.items():
            with suppress(*_DOWN):
                if connection.poll():
                    found.append(f"process {rank} of {self.count} says: {connection.recv()}")
        for rank, process in self._processes.items():
            with suppress(subprocess.TimeoutExpired):
                found.append(
                    f"process {rank} of {self.count}"
                    f" {_ended(process.wait(0.5))}{self._last_line(rank)}"
                )
        why = "; ".join(found) or error
        return (
            f"{KEY}={self.count}: the processes that hold the model cannot go on together ({why})."
            " Run the same command again: it goes on from what is finished."
        )

    def _last_line(self, rank: int) -> str:
        lines = self._log(rank).read_text(errors="replace").split("\n")
        return next(
            (f", and printed: {line.strip()}" for line in reversed(lines) if line.strip()), ""
        )

    def _watch(self) -> None:
        """End this process when another one has ended and a pass waits for it, which only some
        backends notice.
        """
        with suppress(*_DOWN):
            wait([*self._lives.values()])
        if self._closed:
            return
        if self._inside.acquire(timeout=GRACE):
            return self._inside.release()
        console.print(self._down("a process ended"), soft_wrap=True)
        os._exit(1)


_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_leader: Leader | None = None


@contextmanager
def leading(leader: Leader) -> Iterator[None]:
    """Inside, `CausalModel.load` loads the models of the leader's roles in parts."""
    global _leader
    _leader = leader
    try:
        if launched_rank() is not None:
            leader.start()  # the others wait already
        yield
    finally:
        _leader = None
        leader.close()


def leader_of(name: str) -> Leader | None:
    """Who loads the model of this name in parts; None: it is loaded here, in full."""
    return _leader if _leader is not None and name in _leader.roles else None


def full_weight(module: Any, name: str) -> Tensor:
    """The parameter `name` of a model, gathered if processes hold parts of it."""
    weight = module.get_parameter(name)
    if not hasattr(weight, "full_tensor"):
        return weight
    leader, number = module.sharded_by
    return leader.full_weight(number, name, weight)


def _note(
    leader: "weakref.ref[Leader]", cache: "weakref.ref[KVCache]", what: str, *details: Any
) -> None:
    own, moved = leader(), cache()
    if own is not None and moved is not None:
        own.note(moved, what, *details)


def _ended(code: int) -> str:
    return (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    )
