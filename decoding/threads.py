"""CPU threads of decoding.

A pass through a small model ends before its threads have been woken, and where something else runs
they wait for one another: 64 tokens of the shipped pair took 2 s with one thread and 80 s with
torch's default on a machine with a busy second core.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nde_talf.decoding.models.base import Model
from nde_talf.decoding.models.forward import fused_weights

_first = torch.get_num_threads()
_chosen = _first
asked = False
"""True while the number of threads is one that a configuration gives."""


def choose_threads(target: Model) -> None:
    """Let torch use one thread for a small target on a CPU, and its own number for others.

    Small means that no matrix of its layers is `LARGE`. A number that the user set stays: by
    OMP_NUM_THREADS, where the decode loop does not call this, by `torch.set_num_threads`, where it
    is not torch's own, or in a configuration (`asked`).
    """
    global _chosen
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    # Torch's own choices: a thread a core, or half of them where they are double.
    defaults = {cores, cores // 2, usable, usable // 2}
    ours = not asked and torch.get_num_threads() == _chosen and _first in defaults
    if target.device.type != "cpu" or not ours:
        return
    vocabulary = (target.vocab_size,)
    layers = (each.numel() for each in target.body.parameters() if each.shape[:1] != vocabulary)
    _chosen = _first if max(layers, default=0) >= fused_weights.LARGE else 1
    torch.set_num_threads(_chosen)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` CPU threads inside the block; 0 changes nothing."""
    global asked
    before, given = torch.get_num_threads(), asked
    if count:
        torch.set_num_threads(count)
        asked = True
    try:
        yield
    finally:
        torch.set_num_threads(before)
        asked = given
