"""A process that holds a part of sharded models and follows the passes of process 0: see
`nde_talf.decoding.tensor_parallel`.

`python -m decoding.follower FOLDER RANK COUNT` is how process 0 starts one; under torchrun the
command itself calls `follow`.
"""

import os
import signal
import socket
import sys
import threading
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from nde_talf.decoding.cache import KVCache
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.loading import body_of, first_line
from nde_talf.decoding.tensor_parallel import _DOWN, GRACE, CacheOf, Shape
from nde_talf.decoding.tensor_parts import (
    complete,
    join_group,
    load_sharded,
    local_rank,
    rendezvous,
)


class Follower:
    """Does what the commands say, in order. A command is the name of a method and its arguments."""

    def __init__(self, commands: Connection, store: dist.Store, rank: int, count: int):
        self.commands, self.store, self.rank, self.count = commands, store, rank, count
        self.models: dict[int, PreTrainedModel] = {}
        self.caches: dict[int, Any] = {}

    def start(self, device: str, seconds: float) -> None:
        self.device = device
        self.place = (
            torch.device(device) if device == "cpu" else torch.device(device, local_rank(self.rank))
        )
        join_group(self.store, self.rank, self.count, device, seconds)

    def load(self, number: int, folder: str, dtype: str, name: str) -> None:
        fault = None
        try:
            self.models[number] = load_sharded(
                folder, self.device, self.rank, self.count, dtype, name
            )
        except UserError as error:
            fault = str(error)
        self.commands.send(fault)

    def complete(self, number: int) -> None:
        complete(self.models[number])

    def weight(self, number: int, name: str) -> None:
        self.models[number].get_parameter(name).detach().full_tensor()  # type: ignore[attr-defined]

    def run(
        self,
        number: int,
        given: list[Any],
        named: dict[str, Any],
        windows: dict[str, int],
        autocast: torch.dtype | None,
    ) -> None:
        """A forward pass. windows: as the model's configuration has them in process 0."""
        body = cast(PreTrainedModel, body_of(self.models[number]))
        for key, size in windows.items():
            setattr(body.config, key, size)
        args, kwargs = [self._value(each, body) for each in given], self._value(named, body)
        with torch.no_grad(), torch.autocast(self.device, autocast) if autocast else nullcontext():
            body(*args, **kwargs)

    def commit(self, cache: int, length: int, slots: list[int]) -> None:
        self.caches[cache].commit(length, slots)

    def copies(self, cache: int, copied: int, count: int, length: int) -> None:
        self.caches[copied] = self.caches[cache].copies(count, length)

    def drop_cache(self, cache: int) -> None:
        self.caches.pop(cache, None)  # one that never saw a pass is not here

    def drop_model(self, number: int) -> None:
        self.models.pop(number, None)

    def _value(self, value: Any, body: PreTrainedModel) -> Any:
        if isinstance(value, Shape):
            tensor = torch.empty(value.size, dtype=value.dtype, device=self.place)
            dist.broadcast(tensor, 0)
            return tensor
        if isinstance(value, dict):
            return {name: self._value(x, body) for name, x in value.items()}
        return self._cache(value, body) if isinstance(value, CacheOf) else value

    def _cache(self, value: CacheOf, body: PreTrainedModel) -> Cache:
        """Its part of a cache of process 0."""
        if value.number not in self.caches:
            new = (
                KVCache(value.layers) if value.length is None else DynamicCache(config=body.config)
            )
            self.caches[value.number] = new
        cache = self.caches[value.number]
        if (
            value.length is not None and cache.get_seq_length() > value.length
        ):  # transformers' assisted generation went back
            cache.crop(value.length - cache.get_seq_length())
        return cache


def follow(folder: str | None, rank: int, count: int) -> None:
    """Follow process 0 until it ends. folder: where it waits for this process; None: torchrun's
    store knows.
    """
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of a terminal; process 0 decides
    store = rendezvous(f"{folder}/store", rank, count)
    path = f"{folder}/socket" if folder else store.get("socket").decode()
    commands, life = _connected(path, rank, "commands"), _connected(path, rank, "life")
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()
    follower = Follower(commands, store, rank, count)
    try:
        while True:
            for name, *args in commands.recv():
                getattr(follower, name)(*args)
    except _DOWN:
        pass  # process 0 has ended
    except Exception as error:
        with_type = f"{type(error).__name__}: {first_line(error)}"
        try:
            commands.send(with_type)
        except _DOWN:
            return
        raise


def _connected(path: str, rank: int, kind: str) -> Connection:
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    connection = Connection(client.detach())
    connection.send((rank, kind))
    return connection


def _end_with(life: Connection) -> None:
    """End this process some time after process 0, also where it hangs in a pass."""
    wait([life])
    time.sleep(GRACE)
    os._exit(1)


def main() -> None:
    folder, rank, count = sys.argv[1:]
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    follow(folder, int(rank), int(count))


if __name__ == "__main__":
    main()
