"""Choose how a model's large matrices are multiplied, by timing them.

For example, on an AMD EPYC 40 matrices of 4,864 x 896 in float32 take 41 ms for one row in torch's
own way and 18 packed, 54 and 22 for eight.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import content_digest, read_json, user_cache, write_json
from nde_talf.decoding.common.processor import cpu_model
from nde_talf.decoding.models.forward.fused_weights import LEAST
from nde_talf.decoding.models.forward.onednn import has_onednn, in_blocks, packed
from nde_talf.decoding.names import PRODUCTS

MANY = "-many"
ROWS = (1, 5, 9, 16, 32)
"""Numbers of rows that are timed: one token, and trees as they are drafted."""
SECONDS = 0.8
"""Time for all numbers of rows together."""
BYTES = 128 << 20
"""Weights that are timed at least, more than the caches hold."""


@torch.inference_mode()
def fastest(module: nn.Module, asked: str = "auto", packs: bool = False) -> str:
    """Return the way that is fastest for the large matrices of `module`, or the one asked for.

    Matrices of its first layers are multiplied one after the other, as in a pass, by 1 to 32 rows.
    The winner has the smallest product of the times over the numbers of rows. It leaves one row to
    torch's own way where that is faster by a tenth. The answer is kept in the user's cache, by
    processor, threads, type and shapes, so that the next run multiplies in the same way.

    Args:
        module: a transformers model.
        asked: "auto", or a way of `onednn`.
        packs: whether packing is a choice: it takes memory for a copy of the weights.

    Raises:
        UserError: the way asked for is none, or oneDNN has none for these weights.
    """
    dtype = next(module.parameters()).dtype
    _check_way(asked, dtype)
    if asked != "auto":
        return asked
    matrices = _large(module)
    if not (matrices and has_onednn(dtype)):
        return "plain"
    # Room for twice the weights beside what is in use.
    needed = 2 * sum(weight.nbytes for weight in module.parameters())
    packs = packs and psutil.virtual_memory().available > needed
    shapes = Counter(tuple(matrix.shape) for matrix in matrices)
    facts = {
        "processor": cpu_model(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "type": str(dtype),
        "shapes": [[*shape, count] for shape, count in shapes.items()],
        "packs": packs,
        "rows": ROWS,
    }
    path = user_cache() / f"products-{content_digest(facts)[:16]}.json"
    with suppress(UserError):  # of an earlier time
        way: str = read_json(path).get("way")
        if way in PRODUCTS[1:]:
            return way
    way = _timed(matrices, packs)
    with suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**facts, "way": way})
    return way


def _check_way(asked: str, dtype: torch.dtype) -> None:
    """Raise UserError for a way that there is not, or not for weights of this type."""
    if asked not in PRODUCTS:
        raise UserError(f"products={asked}; choose one of {', '.join(PRODUCTS)}.")
    if asked not in ("auto", "plain") and not has_onednn(dtype):
        raise UserError(
            f"products={asked}: oneDNN has no {dtype} products with this torch on this processor."
            " Choose auto or plain."
        )


def _timed(matrices: list[Tensor], packs: bool) -> str:
    """Return the way with the smallest product of times over the numbers of rows."""
    times = _times(matrices, packs)
    way = min(times, key=lambda name: math.prod(times[name]))
    return way + MANY if 1.1 * times["plain"][0] < times[way][0] else way


def _large(module: nn.Module) -> list[Tensor]:
    """List the matrices that may be packed; none where one is on a GPU."""
    parts = (part for part in module.modules() if type(part) is nn.Linear)
    matrices = [part.weight for part in parts if part.weight.numel() >= LEAST]
    return matrices if all(matrix.is_cpu for matrix in matrices) else []


def _some(matrices: list[Tensor]) -> list[Tensor]:
    """Take the first BYTES of matrices, then one of each shape that the layers repeat."""
    ends = accumulate(matrix.nbytes for matrix in matrices)
    counts, some = Counter(matrix.shape for matrix in matrices), list[Tensor]()
    for matrix, end in zip(matrices, ends, strict=True):
        missing = all(matrix.shape != other.shape for other in some)
        if end <= BYTES or (missing and counts[matrix.shape] > 1):
            some.append(matrix)
    return some or matrices[:1]


def _times(matrices: list[Tensor], packs: bool) -> dict[str, list[float]]:
    """Measure the seconds of each way for `_some` of the matrices, for each of ROWS.

    Fewer numbers of rows are timed where SECONDS are over. A way that cannot multiply the matrices
    is left out.
    """
    some = _some(matrices)
    ways: dict[str, tuple[Callable[..., object], list[Tensor]]] = {"plain": (F.linear, some)}
    for name in ("onednn", "packed") if packs else ("onednn",):
        with suppress(RuntimeError):
            forms = [packed(each) for each in some] if name == "packed" else some
            in_blocks(some[0].new_ones(1, some[0].shape[1]), forms[0], None)
            ways[name] = in_blocks, forms
    times: dict[str, list[float]] = {way: [] for way in ways}
    end = time.perf_counter() + SECONDS
    for count in ROWS:
        states = [matrix.new_ones(count, matrix.shape[1]) for matrix in some]
        for way, (multiply, forms) in ways.items():
            times[way].append(min(_seconds(multiply, states, forms) for _ in range(3)))
        if time.perf_counter() > end:
            break
    return times


def _seconds(multiply: Callable[..., object], states: list[Tensor], forms: list[Tensor]) -> float:
    begun = time.perf_counter()
    for rows, matrix in zip(states, forms, strict=True):
        multiply(rows, matrix, None)
    return time.perf_counter() - begun
