"""Units of work for workers: one in this process, or Ray actors on one or many machines.

Each worker has GPUs of its own.
"""

import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from nde_talf.decoding.common.errors import UserError, first_line
from nde_talf.decoding.common.progress import console

DEATHS = 4
"""Workers that may die over one unit of work."""
CONNECT_SECONDS = 5.0
NOTICE_SECONDS, START_SECONDS = 30.0, 300.0
"""After how long it is printed that no worker has started yet, and how long that may take, while no
other one works.

A worker imports torch later, with its first unit.
"""
BEYOND_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable: with 0 a cluster that is started here takes the loopback's address, on Linux too.
"""


class Workers:
    """Workers that are made when they are first needed and live until the block ends.

        with Workers(make, 4, None, 1) as workers:
            for i, result in workers.map(Squares.square, [(2,), (3,)]): ...

    Args:
        make: makes a worker.
        count: number of Ray actors; 1 works in this process.
        address: of a Ray cluster ("auto", "host:port", "ray://host:port"); None starts one on this
            machine, which listens on the loopback alone.
        gpus: of each actor.
    """

    def __init__(self, make: Callable[[], Any], count: int, address: str | None, gpus: float):
        self.make, self.count, self.address, self.gpus = make, count, address, gpus
        self._actors: list[Any] = []
        self._free: list[Any] = []  # actors without work
        self._starting: dict[Any, Any] = {}  # actors by a future that is there once they started
        self._running: dict[Any, tuple[int, Any]] = {}  # unit and actor by the future of the result

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers, whatever they are doing."""
        for actor in self._actors:
            self._ray.kill(actor)

    def map(
        self, work: Callable[..., Any], items: Iterable[tuple], limit: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yield (i, work(worker, *items[i])) for all items, in the order of completion.

        The next item goes to any free worker. A worker that dies is replaced, and its item goes to
        the next free one. Every result is yielded once. limit: number of workers, where there are
        fewer items than workers.

        Raises:
            UserError: a worker raised it; four workers died over one item; the cluster lacks what
                the workers need.
        """
        return self._spread(work, items, limit) if self.count > 1 else self._alone(work, items)

    def _alone(self, work: Callable[..., Any], items: Iterable[tuple]) -> Iterator[tuple[int, Any]]:
        for i, item in enumerate(items):
            yield i, work(self._here, *item)

    def _spread(
        self, work: Callable[..., Any], items: Iterable[tuple], limit: int | None
    ) -> Iterator[tuple[int, Any]]:
        waiting = deque(enumerate(items))
        self._start(min(self.count, limit or self.count))
        while waiting or self._running:
            while self._free and waiting:
                (i, item), actor = waiting.popleft(), self._free.pop()
                self._running[actor.do.remote(work, item)] = i, actor
            ready = self._next()
            if ready in self._starting:
                self._free.append(self._starting.pop(ready))
                continue
            i, actor = self._running.pop(ready)
            try:
                result = self._ray.get(ready)
            except self._ray.exceptions.RayActorError as error:
                raise UserError(
                    f"{DEATHS} workers died over unit {i} of {work.__name__}, one after the other"
                    f" ({first_line(error)}). If memory ran out, lower traces.micro_batch, or"
                    " start fewer workers."
                ) from error
            self._free.append(actor)
            if isinstance(result, UserError):
                raise result
            yield i, result

    @cached_property
    def _here(self) -> Any:
        """The worker of this process."""
        return self.make()

    @cached_property
    def _ray(self) -> ModuleType:
        ray = start_ray(self.address)
        check_resources(ray, self.count, self.gpus)
        return ray

    @cached_property
    def _kind(self) -> Any:
        """The class of the actors. Ray starts a dead one again, and repeats its unit."""
        pickle = self._ray.cloudpickle
        make = pickle.dumps(self.make)  # read with the first unit, since its imports take time

        class Actor:
            worker: Any = None

            def started(self) -> None:
                """There is a result as soon as the actor's process runs."""

            def do(self, work: Callable[..., Any], item: tuple) -> Any:
                try:
                    self.worker = self.worker or pickle.loads(make)()
                    return work(self.worker, *item)
                except UserError as error:
                    return error

        options: dict[str, Any] = {"max_restarts": -1, "max_task_retries": DEATHS - 1}
        options |= {"scheduling_strategy": "SPREAD"}
        return self._ray.remote(num_gpus=self.gpus, **options)(Actor)

    def _start(self, count: int) -> None:
        """Make actors until there are `count`."""
        for _ in range(count - len(self._actors)):
            self._actors.append(actor := self._kind.remote())
            self._starting[actor.started.remote()] = actor

    def _next(self) -> Any:
        """A future that is there. Raises UserError if no worker works and none starts in time."""
        futures, bounded = [*self._running, *self._starting], not self._running
        ready, _ = self._ray.wait(futures, timeout=NOTICE_SECONDS if bounded else None)
        if not ready:
            needs = f"A worker needs {self.gpus:g} GPUs of one machine and a CPU"
            free = f"free are {_shown(self._ray.available_resources())} on all machines together"
            console.print(
                f"! no Ray worker has started for {NOTICE_SECONDS:.0f} s. {needs}; {free}."
            )
            ready, _ = self._ray.wait(futures, timeout=START_SECONDS - NOTICE_SECONDS)
        if not ready:
            raise UserError(
                f"no Ray worker started within {START_SECONDS:.0f} s. {needs}; {free}. Wait until"
                " other jobs have ended, or lower engine.gpus."
            )
        return ready[0]


def start_ray(address: str | None) -> ModuleType:
    """Connect to the Ray cluster at `address`, or start one on this machine.

    A started cluster has its ports on the loopback and no dashboard.

    Raises:
        UserError: Ray or the cluster is not there.
    """
    if not address:
        os.environ.setdefault(BEYOND_LOOPBACK, "0")  # Ray reads it when it is imported
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "engine.workers above 1 needs Ray: pip install -e '.[ray]', or set engine.workers=1."
        ) from error
    if not ray.is_initialized():
        _connect(ray, address)
    return ray


def _connect(ray: ModuleType, address: str | None) -> None:
    """Raise UserError if no cluster answers at `address`, or none starts here."""
    options: dict[str, Any] = {} if address else {"include_dashboard": False}
    try:
        if address and ":" in address:  # Ray itself would try for a minute
            url = urlsplit(address if "://" in address else f"//{address}")
            socket.create_connection((url.hostname or "", url.port or 0), CONNECT_SECONDS).close()
        ray.init(address=address or "local", **options)
    except Exception as error:  # Ray has no class of its own for a cluster that does not start
        if address:
            raise UserError(
                f"ray.address={address}: no Ray cluster answers there ({first_line(error)})."
            ) from error
        raise UserError(
            f"engine.workers: no Ray cluster started on this machine ({first_line(error)}). Run"
            " the same command again when it is less busy, or set engine.workers=1."
        ) from error


def check_resources(ray: ModuleType, workers: int, gpus: float) -> None:
    """Check that a cluster has room for so many workers with so many GPUs each.

    A worker's GPUs are on one machine, so machines are counted one by one.

    Raises:
        UserError: the cluster is too small, with the numbers.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(int(node.get("GPU", 0) / gpus) for node in nodes) if gpus else workers
    if room < workers:
        raise UserError(
            f"engine.workers={workers} with {gpus:g} GPUs each need a larger Ray cluster: the"
            f" cluster has {'; '.join(map(_shown, nodes))}, room for {room}. Lower engine.workers"
            " or engine.gpus, or start Ray on more machines (ray.address)."
        )


def _shown(resources: dict[str, float]) -> str:
    return f"{resources.get('GPU', 0):g} GPUs and {resources.get('CPU', 0):g} CPUs"
