"""Who a drafter without `fork` drafts for: it holds one sequence, and the last that was begun has it."""

from threading import RLock
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from decoding.common.errors import UserError
from decoding.drafter import Drafter

_lock = RLock()  # a drafter's method runs whole, also where threads share the drafter


def own(drafter: Drafter) -> Drafter:
    """A drafter for one sequence of its own: a fork, or the drafter itself under guard."""
    return drafter.fork() if hasattr(drafter, "fork") else _Turn(drafter)  # type: ignore[return-value]


class _Turn:
    """`drafter` as one sequence sees it. Raises UserError once `start` was called for another one."""

    _last: ClassVar["WeakValueDictionary[int, _Turn]"] = WeakValueDictionary()  # by id of the drafter, which turns keep alive

    def __init__(self, drafter: Drafter):
        self._drafter = drafter

    def start(self, *arguments: Any) -> None:
        with _lock:
            self._last[id(self._drafter)] = self
            self._drafter.start(*arguments)

    def __getattr__(self, name: str) -> Any:
        with _lock:
            self._check()
            found = getattr(self._drafter, name)
        return self._whole(found) if callable(found) else found

    def _whole(self, method: Any) -> Any:
        def guarded(*arguments: Any) -> Any:
            with _lock:
                self._check()
                return method(*arguments)

        return guarded

    def _check(self) -> None:
        if self._last.get(id(self._drafter)) is not self:
            raise UserError(
                f"this sequence cannot go on, since its drafter ({type(self._drafter).__name__}) has begun another one and "
                "holds one at a time. Read a stream to its end before the next, or give the drafter a method fork() that "
                "returns a copy without a sequence (decoding.drafter.Drafter)."
            )
