"""What a step costs: forward times of target and draft on a grid, and the time of every action from them.

Eq. 11 (paper 000) prices a pass by its context length alone. Verifying n tokens is not one token at a longer context,
so the table has two dimensions: t_p(context, nodes) and t_q(context, width), in seconds, bilinearly interpolated.
"""

import platform
import statistics
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from data.files import read_json, write_json
from decoding.actions import TREES
from decoding.errors import UserError
from decoding.model import CausalModel
from decoding.session import TreeSession

FORMAT = 1
NODES = (1, 2, 4, 8, 12, 20, 33, 41)
WIDTHS = (1, 2, 3, 4)


@dataclass(frozen=True)
class LatencyTable:
    """Median seconds of a forward pass. target [contexts][nodes], draft [contexts][widths]; `machine` says where."""

    contexts: list[int]
    nodes: list[int]
    widths: list[int]
    target: list[list[float]]
    draft: list[list[float]]
    machine: dict[str, str]

    def save(self, path: Path) -> None:
        write_json(path, {"format": FORMAT, **asdict(self)})

    @classmethod
    def load(cls, path: str | Path) -> "LatencyTable":
        """Raises UserError naming `path` if it holds no table of this format."""
        content = read_json(Path(path))
        if content.pop("format", None) != FORMAT:
            raise UserError(f"{path}: it is no latency table of format {FORMAT}; measure it again (stage=selector).")
        return cls(**content)

    def passes(self, context: Tensor) -> Tensor:
        """[R, 2] seconds of one draft and one target pass over one token at `context` [R]: the selector's features."""
        one = torch.ones_like(context)
        return torch.stack([self._draft(context, one), self._target(context, one)], -1)

    def actions(self, context: Tensor) -> Tensor:
        """[R, 233] seconds of a step with each tree of `TREES` at `context` [R] committed tokens.

        A draft pass at the root always (it also feeds the selector), then one for every trunk token and every level of
        branches but the last; one target pass over all nodes (draws that coincide are not merged in this estimate).
        """
        context = context.double()[:, None]
        k, l1, l2 = _shapes().to(context).unbind(-1)
        draft = torch.zeros(len(context), len(TREES), dtype=context.dtype)
        for step in range(int((l1 + l2).max())):
            # Pass number `step` runs the root (0), a trunk token (up to L1), or a level of K branches.
            branches = step > l1
            width = torch.where(branches, k, 1.0)
            rows = torch.where(branches, l1 + (step - l1) * k, torch.tensor(float(step), dtype=context.dtype))
            drafts = (step < l1 + l2) | torch.tensor(step == 0)
            draft += torch.where(drafts, self._draft(context + rows, width.expand_as(draft)), 0.0)
        nodes = (1 + l1 + k * l2).expand_as(draft)
        return (draft + self._target(context.expand_as(draft), nodes)).float()

    def _target(self, context: Tensor, nodes: Tensor) -> Tensor:
        return bilinear(self.contexts, self.nodes, self.target, context, nodes)

    def _draft(self, context: Tensor, width: Tensor) -> Tensor:
        return bilinear(self.contexts, self.widths, self.draft, context, width)


@cache
def _shapes() -> Tensor:
    return torch.tensor(TREES)


def bilinear(rows: list[int], columns: list[int], values: list[list[float]], x: Tensor, y: Tensor) -> Tensor:
    """Interpolate values[rows, columns] at (x, y) of any one shape; outside the grid, its edge counts."""
    table = torch.tensor(values, dtype=torch.float64)

    def locate(grid: list[int], at: Tensor) -> tuple[Tensor, Tensor]:
        knots = torch.tensor(grid, dtype=torch.float64)
        if len(grid) == 1:
            return torch.zeros_like(at, dtype=torch.long), torch.zeros_like(at, dtype=torch.float64)
        low = (torch.searchsorted(knots, at.double().contiguous(), right=True) - 1).clamp(0, len(grid) - 2)
        return low, ((at - knots[low]) / (knots[low + 1] - knots[low])).clamp(0, 1)

    (i, u), (j, v) = locate(rows, x), locate(columns, y)
    i_next, j_next = (i + 1).clamp(max=len(rows) - 1), (j + 1).clamp(max=len(columns) - 1)
    near = table[i, j] * (1 - v) + table[i, j_next] * v
    far = table[i_next, j] * (1 - v) + table[i_next, j_next] * v
    return near * (1 - u) + far * u


@torch.inference_mode()
def measure_latency(target: CausalModel, draft: CausalModel, contexts: list[int], repeats: int = 15) -> LatencyTable:
    """Time forward passes on the grid (tree attention and logits included): medians over interleaved `repeats`."""
    sessions = {
        "target": (TreeSession(target.hidden, target.device, target.dtype), target, NODES),
        "draft": (TreeSession(draft.hidden, draft.device, draft.dtype), draft, WIDTHS),
    }
    contexts = sorted({min(c, target.max_context - 64, draft.max_context - 64) for c in contexts})
    grids: dict[str, list[list[float]]] = {"target": [], "draft": []}
    for context in contexts:
        times: dict[tuple[str, int], list[float]] = {}
        for session, _, _ in sessions.values():
            session.reset()
            session.append([i % target.vocab_size for i in range(context)])
        for repeat in range(repeats + 2):
            for name, (session, model, sizes) in sessions.items():
                for size in sizes:
                    # As in the loop, where a draft pass came before: caches warm for the draft, cold for the target.
                    _time_pass(*sessions["draft"][:2], 1)
                    seconds = _time_pass(session, model, size)
                    if repeat > 1:  # the first two rounds warm up
                        times.setdefault((name, size), []).append(seconds)
        for name, (_, _, sizes) in sessions.items():
            medians = [statistics.median(times[name, size]) for size in sizes]
            # A pass over more tokens, or at a longer context, never takes less: what does is noise.
            floor = grids[name][-1] if grids[name] else [0.0] * len(sizes)
            grids[name].append([max(*medians[: i + 1], *floor[: i + 1]) for i in range(len(sizes))])
    machine = {
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else platform.processor() or "cpu",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "target": target.name,
        "draft": draft.name,
        "dtype": str(target.dtype),
    }
    return LatencyTable(contexts, list(NODES), list(WIDTHS), grids["target"], grids["draft"], machine)


def _time_pass(session: TreeSession, model: CausalModel, size: int) -> float:
    started = time.perf_counter()
    model.logits(session.grow([7] * size, [-1] * size))
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    session.keep([])
    return seconds
