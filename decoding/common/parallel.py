"""Units of work for workers: one in this process, or Ray actors on one machine or many, each with GPUs of its own."""

from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from decoding.common.errors import UserError


def map_units(
    make: Callable[[], object], method: str, items: Iterable[tuple], workers: int, address: str | None, gpus: float
) -> Iterator[tuple[int, object]]:
    """Yield (i, make().method(*items[i])) for all items, in the order in which they are finished.

    Items are taken as they are needed. A worker that dies is replaced and its item done again, at most three times. Each result
    reaches the caller, the only writer, once. A UserError of a worker is raised here.

    Args:
        make: makes a worker.
        method: name of the worker's method.
        items: the method's arguments.
        workers: number of Ray actors; 1 works in this process.
        address: of a Ray cluster ("auto", "ray://host:port"); None starts one on this machine.
        gpus: of each actor.
    """
    if workers == 1:
        worker = make()
        for i, item in enumerate(items):
            yield i, getattr(worker, method)(*item)
        return
    ray = start_ray(address)

    class Actor:
        def __init__(self) -> None:
            self.worker = make()

        def do(self, item: tuple) -> Any:
            try:
                return getattr(self.worker, method)(*item)
            except UserError as error:
                return error

    kind = ray.remote(num_gpus=gpus, max_restarts=-1, max_task_retries=3)(Actor)
    actors = [kind.remote() for _ in range(workers)]
    waiting, running = iter(enumerate(items)), {}

    def give(actor: Any) -> None:
        if (following := next(waiting, None)) is not None:
            running[actor.do.remote(following[1])] = (following[0], actor)

    try:
        for actor in actors:
            give(actor)
        while running:
            (ready,), _ = ray.wait(list(running))
            i, actor = running.pop(ready)
            try:
                result = ray.get(ready)
            except ray.exceptions.RayActorError as error:
                raise UserError(
                    f"a worker died four times over unit {i} of {method} ({str(error).splitlines()[0]}). If memory ran out, "
                    "lower traces.micro_batch or traces.node_chunk, or start fewer workers."
                ) from error
            if isinstance(result, UserError):
                raise result
            give(actor)
            yield i, result
    finally:
        for actor in actors:
            ray.kill(actor)


def start_ray(address: str | None) -> ModuleType:
    """Connect to the cluster, or start one on this machine. Raises UserError if Ray or the cluster is not there."""
    try:
        import ray
    except ImportError as error:
        raise UserError("engine.workers above 1 needs Ray: pip install -e '.[ray]', or set engine.workers=1.") from error
    if not ray.is_initialized():
        try:
            ray.init(address=address, **({} if address else {"include_dashboard": False}))
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(f"ray.address={address}: no Ray cluster answers there ({error}).") from error
    return ray
