"""Work in batches that shrink when memory runs out."""

from collections.abc import Callable
from typing import TypeVar

import torch

from nde_talf.decoding.common.errors import UserError, first_line, lacks_memory
from nde_talf.decoding.common.progress import console

T = TypeVar("T")


class MicroBatch:
    """Number of items that go through the models at once.

    It begins with `size`. When the items do not fit into memory, it is halved for good, and a
    warning is printed.
    """

    def __init__(self, size: int):
        self.size = size

    def run(self, count: int, work: Callable[[slice], T]) -> list[T]:
        """Call `work` with slices of 0..count and collect what it returns.

        Raises UserError if one item alone does not fit.
        """
        done, at = [], 0
        while at < count:
            try:
                done.append(work(slice(at, min(at + self.size, count))))
                at += self.size
                continue
            except (RuntimeError, MemoryError) as error:
                if not lacks_memory(error):  # CUDA's error says so in words too
                    raise
                if self.size == 1:
                    raise UserError(
                        f"memory runs out on a single super-tree or text ({first_line(error)})."
                        " Use a smaller model.dtype or traces.dtype, or a device with more memory."
                    ) from error
            # Outside the handler, which would keep the tensors of the failed attempt.
            self.size = max(1, min(self.size, count) // 2)
            console.print(f"! out of memory: from here on {self.size} at once")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return done
