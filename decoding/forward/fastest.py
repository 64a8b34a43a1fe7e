"""Choose how a model's large matrices are multiplied, by timing them.

For example, on an AMD EPYC 40 matrices of 4,864 x 896 in float32 take 41 ms for one row in torch's
own way and 18 packed, 54 and 22 for eight.
"""

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import content_digest, read_json, user_cache, write_json
from nde_talf.decoding.common.processor import cpu_model
from nde_talf.decoding.forward.layer import LARGE
from nde_talf.decoding.forward.onednn import has_onednn, in_blocks, packed
from nde_talf.decoding.names import PRODUCTS

MANY = "-many"
ROWS = (1, 4, 8, 16, 32)
SECONDS = 0.8
"""Time for all shapes together."""
BYTES = 128 << 20
"""Weights of a shape that are timed in turn, more than the caches hold."""


@torch.inference_mode()
def fastest(module: nn.Module, asked: str = "auto", packs: bool = False) -> str:
    """Return the way that is fastest for the large matrices of `module`, or the one asked for.

    Every shape of its layers is timed, for 1 to 32 rows. Times add up over the layers. The winner
    has the smallest product of these sums over the numbers of rows. It leaves one row to torch's
    own way where that is faster by a tenth. The answer is kept in the user's cache, by processor,
    threads, type and shapes, so that the next run multiplies in the same way.

    Args:
        module: a transformers model.
        asked: "auto", or a way of `onednn`.
        packs: whether packing is a choice: it takes memory for a copy of the weights.

    Raises:
        UserError: the way asked for is none, or oneDNN has none for these weights.
    """
    if asked not in PRODUCTS:
        raise UserError(f"products={asked}; choose one of {', '.join(PRODUCTS)}.")
    dtype = next(module.parameters()).dtype
    there = has_onednn(dtype)
    if asked not in ("auto", "plain") and not there:
        raise UserError(
            f"products={asked}: oneDNN has no {dtype} products with this torch on this processor."
            " Choose auto or plain."
        )
    if asked != "auto":
        return asked
    shapes = _large(module)
    if not (shapes and there):
        return "plain"
    packs = packs and _room(module)
    facts = {
        "processor": cpu_model(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "type": str(dtype),
        "shapes": [[*shape, len(matrices)] for shape, matrices in shapes.items()],
        "packs": packs,
    }
    path = user_cache() / f"products-{content_digest(facts)[:16]}.json"
    with suppress(UserError):  # of an earlier time
        way: str = read_json(path).get("way")
        if way in PRODUCTS[1:]:
            return way
    way = _timed([*shapes.values()], packs)
    with suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**facts, "way": way})
    return way


def _timed(shapes: list[list[Tensor]], packs: bool) -> str:
    """Return the way that is fastest for matrices of several shapes together."""
    each = [_times(matrices, packs, SECONDS / len(shapes)) for matrices in shapes]
    for_all = [way for way in each[0] if all(way in times for times in each)]
    rows = {way: zip(*(times[way] for times in each), strict=False) for way in for_all}
    seconds = {way: [*map(sum, by_shape)] for way, by_shape in rows.items()}
    way = min(seconds, key=lambda name: math.prod(seconds[name]))
    return way + MANY if 1.1 * seconds["plain"][0] < seconds[way][0] else way


def _large(module: nn.Module) -> dict[tuple[int, int], list[Tensor]]:
    """Group the large matrices by shape, the output layer's aside unless it is the only one."""
    shapes: dict[tuple[int, int], list[Tensor]] = {}
    for part in module.modules():
        if type(part) is nn.Linear and (weight := part.weight).numel() >= LARGE:
            if weight.device.type != "cpu":
                return {}
            rows, width = weight.shape
            shapes.setdefault((rows, width), []).append(weight)
    layers = {shape: matrices for shape, matrices in shapes.items() if len(matrices) > 1}
    return layers or shapes


def _room(module: nn.Module) -> bool:
    """Return True if memory has room for twice the weights beside what is in use."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not Linux
        return False
    return free > 2 * sum(weight.nbytes for weight in module.parameters())


def _times(matrices: list[Tensor], packs: bool, limit: float) -> dict[str, list[float]]:
    """Measure the seconds of each way for all these matrices, by number of rows as in ROWS.

    Fewer numbers of rows are timed where `limit` seconds are over. A way that cannot multiply them
    is left out.
    """
    some = matrices[: max(1, BYTES // matrices[0].nbytes)]
    ways: dict[str, tuple[Callable[..., object], list[Tensor]]]
    ways, few = {"plain": (F.linear, some)}, some[0].new_ones(1, some[0].shape[1])
    for name in ("onednn", "packed") if packs else ("onednn",):
        with suppress(RuntimeError):
            forms = [packed(each) for each in some] if name == "packed" else some
            in_blocks(few, forms[0], None)
            ways[name] = in_blocks, forms
    times: dict[str, list[float]] = {way: [] for way in ways}
    end = time.perf_counter() + limit
    for count in ROWS:
        states = few.expand(count, -1).contiguous()
        for way, (multiply, weights) in ways.items():
            seconds = []
            multiply(states, weights[0], None)  # warms up
            for _ in range(2):
                begun = time.perf_counter()
                for weight in weights:
                    multiply(states, weight, None)
                seconds.append(time.perf_counter() - begun)
            times[way].append(min(seconds) * len(matrices) / len(some))
        if time.perf_counter() > end:
            break
    return times
