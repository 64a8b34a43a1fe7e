"""The CPU threads of torch, for the time of a block."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nde_talf.decoding import threads as chosen


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` CPU threads inside the block; 0 changes nothing."""
    before, asked = torch.get_num_threads(), chosen.asked
    if count:
        torch.set_num_threads(count)
        chosen.asked = True
    try:
        yield
    finally:
        torch.set_num_threads(before)
        chosen.asked = asked
