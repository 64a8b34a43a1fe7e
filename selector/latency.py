"""What a step costs: forward times of target and draft on a grid, and the time of every tree from them.

Eq. 11 (NDE paper) prices a pass by its context length alone. Verifying n tokens is not one token at a longer context,
so the table has two dimensions: t_p(context, nodes) and t_q(context, width), in seconds, bilinearly interpolated.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from decoding.actions import TREES
from decoding.common.errors import UserError
from decoding.common.files import write_sealed
from decoding.common.formats import Format
from decoding.model import CausalModel

FORMAT = Format("latency table", 3, 3, "measure it again (stage=latency force=true)", {2: dict})
NODES = (1, 2, 4, 8, 12, 20, 33, 41)
WIDTHS = (1, 2, 3, 4)
SPACING = 16  # tokens between the contexts at which steps are priced
SHAPES = torch.tensor(TREES)  # [233, 3]

Context = TypeVar("Context", Tensor, int)


@dataclass(frozen=True)
class LatencyTable:
    """Median seconds of the parts of a step.

    Attributes:
        contexts: committed tokens at which passes were timed, rising, as are `nodes` and `widths`.
        nodes: sizes of the trees.
        widths: sizes of the levels.
        target: [contexts][nodes], a pass over a tree.
        draft: [contexts][widths], a pass over one level and the draws from it.
        verify: by verifier, [nodes], all else in a step.
        models: sizes of the pair that it was measured on; empty in a table of no pair in particular.
        machine: what it was measured on, and with what.
    """

    contexts: list[int]
    nodes: list[int]
    widths: list[int]
    target: list[list[float]]
    draft: list[list[float]]
    verify: dict[str, list[float]] = field(default_factory=dict)
    models: dict[str, list[int]] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        write_sealed(path, {"format": FORMAT.number, **asdict(self)})

    @classmethod
    def load(cls, path: str | Path) -> "LatencyTable":
        """Raises UserError naming `path` if it holds no complete table, or one that is not as it was written. A table by hand
        is of format 2, which has no checksum."""
        content = FORMAT.load(Path(path), notice=lambda found: bool(found.get("models")))  # of a pair: not written by hand
        content.pop("format")
        try:
            table = cls(**content)
            table._check()
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}: it is no complete latency table ({error}); measure it again (stage=latency).") from error
        return table

    def _check(self) -> None:
        for name, grid, columns in (("target", self.target, self.nodes), ("draft", self.draft, self.widths)):
            if [len(row) for row in grid] != [len(columns)] * len(self.contexts):
                raise ValueError(f"'{name}' is not {len(self.contexts)} x {len(columns)}")
            if not all(0 < x < float("inf") for row in grid for x in row):
                raise ValueError(f"'{name}' holds times that are not positive")
        for name, times in self.verify.items():
            if len(times) != len(self.nodes):
                raise ValueError(f"'verify.{name}' has not {len(self.nodes)} times")
        for axis in (self.contexts, self.nodes, self.widths):
            if not axis or sorted(set(axis)) != list(axis):
                raise ValueError("contexts, nodes and widths must rise")

    def check_models(self, target: CausalModel, draft: CausalModel, path: str | Path) -> None:
        """Raise UserError if the table was measured on a pair of other sizes."""
        for name, model in (("target", target), ("draft", draft)):
            if name in self.models and self.models[name] != sizes(model):
                raise UserError(
                    f"{path}: its {name} has (hidden size, layers, vocabulary) {tuple(self.models[name])} and the pair's "
                    f"{tuple(sizes(model))}: it is of another pair. Measure this one: stage=latency."
                )

    def passes(self, context: Tensor) -> Tensor:
        """[R, 2] seconds of one draft and one target pass over one token at `context` [R]: the selector's features."""
        one = torch.ones_like(context)
        return torch.stack([self._draft(context, one), self._target(context, one)], -1)

    def steps(self, context: Tensor, verifier: str | None = None) -> Tensor:
        """[R, 233] seconds of a step with each tree of `TREES` at `context` [R] committed tokens.

        Always a draft pass at the root, which also feeds the selector, then one for every trunk token and every level of
        branches but the last; one target pass over all nodes (draws that coincide are not merged in this estimate); and
        what `verifier` takes, if the table knows it. Example: (4, 3, 2) takes five draft passes and a target pass over 12
        nodes.
        """
        context = context.double()[:, None]
        k, l1, l2 = SHAPES.to(context).unbind(-1)
        draft = torch.zeros(len(context), len(TREES), dtype=context.dtype)
        for step in range(int((l1 + l2).max())):
            # Pass number `step` runs the root (0), a trunk token (up to L1), or a level of K branches.
            branches = step > l1
            width = torch.where(branches, k, 1.0)
            rows = torch.where(branches, l1 + (step - l1) * k, torch.tensor(float(step), dtype=context.dtype))
            drafts = (step < l1 + l2) | torch.tensor(step == 0)
            draft += torch.where(drafts, self._draft(context + rows, width.expand_as(draft)), 0.0)
        nodes = (1 + l1 + k * l2).expand_as(draft)
        seconds = draft + self._target(context.expand_as(draft), nodes)
        if verifier in self.verify:
            seconds = seconds + bilinear([0], self.nodes, [self.verify[verifier]], torch.zeros_like(nodes), nodes)
        return seconds

    def steps_eq11(self, context: Tensor) -> Tensor:
        """[R, 233] seconds by Eq. 11 (NDE paper): every pass priced as that of one token at a longer context."""
        context = context.double()[:, None]
        k, l1, l2 = SHAPES.to(context).unbind(-1)
        seconds = self._target((context + l1 + k * l2), torch.ones(len(context), len(TREES)))
        for j in range(int(max(l1.max(), l2.max()))):
            for rows, length in ((torch.full_like(l1, float(j)), l1), (l1 + j * k, l2)):
                one = torch.ones(len(context), len(TREES))
                seconds = seconds + torch.where(j < length, self._draft(context + rows, one), 0.0)
        return seconds

    def _target(self, context: Tensor, nodes: Tensor) -> Tensor:
        return bilinear(self.contexts, self.nodes, self.target, context, nodes)

    def _draft(self, context: Tensor, width: Tensor) -> Tensor:
        return bilinear(self.contexts, self.widths, self.draft, context, width)


def sizes(model: CausalModel) -> list[int]:
    """Hidden size, layers and vocabulary, by which the models of a latency table are recognised."""
    return [model.hidden_size, model.config.num_hidden_layers, model.vocab_size]


class StepCosts:
    """A table's prices of a selector's actions (verifier, tree), at every `SPACING` tokens of context up to `longest`.

    seconds: [G, C] float32, C = verifiers x 233; passes: [G, 2], see `LatencyTable.passes`. `rule` is "table", or "eq11" for
    the NDE paper's.
    """

    def __init__(self, table: LatencyTable, verifiers: Sequence[str], longest: int, rule: str = "table"):
        self.table, self.verifiers = table, tuple(verifiers)
        contexts = torch.arange(0, longest + 2 * SPACING, SPACING).clamp(min=1)
        steps = [table.steps_eq11(contexts) if rule == "eq11" else table.steps(contexts, name) for name in verifiers]
        self.seconds = torch.cat(steps, -1).float()
        self.passes = table.passes(contexts).float()

    def at(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Seconds [R, C] and one-token passes [R, 2] at `context` [R]; beyond `longest` the last ones."""
        row = self.row(context)
        return self.seconds[row], self.passes[row]

    def row(self, context: Context) -> Context:
        """Index of the nearest context of the grid."""
        nearest = (context + SPACING // 2) // SPACING
        last = len(self.seconds) - 1
        return nearest.clamp(max=last) if isinstance(nearest, Tensor) else min(nearest, last)


def bilinear(rows: list[int], columns: list[int], values: list[list[float]], x: Tensor, y: Tensor) -> Tensor:
    """Bilinear interpolation of values [rows][columns] at (x, y), both of one shape; outside the grid, its edge counts."""
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
