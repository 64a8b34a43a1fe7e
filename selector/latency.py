"""Prices of draft trees: the times of a step's parts, measured or modelled, and every tree's time.

Eq. 11 (NDE paper) prices a pass by its context length alone. Verifying n tokens is not one token at
a longer context, so the table has two dimensions: t_p(context, nodes) and t_q(context, width), in
seconds, bilinearly interpolated. The first draft pass of a step has a time of its own: the target
ran before it, so the draft's weights are not in the caches.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from nde_talf.decoding.actions import K_MAX, L2_MAX, TREES
from nde_talf.decoding.common.arguments import Positive, checked
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import write_sealed
from nde_talf.decoding.common.formats import Format
from nde_talf.decoding.common.typed import typed
from nde_talf.decoding.model import CausalModel
from nde_talf.selector.fingerprint import sizes

FORMAT = Format("latency table", "measure it again (stage=latency force=true)")
NODES = (1, 2, 4, 8, 12, 20, 33, 41)
WIDTHS = (1, 2, 3, 4)
SEQUENCES = (1, 2, 4, 8, 16)
AGREE = 0.1
"""Largest relative difference of prices between two repeats of a measurement that is trusted."""
SPACING = 16  # tokens between the contexts at which steps are priced
LONGEST = 1 << 14  # tokens of context up to which a decoder prices steps one by one
SHAPES = torch.tensor(TREES)  # [233, 3]

Context = TypeVar("Context", Tensor, int)
Axis = list[Annotated[int, Field(ge=0, le=1 << 30)]]
Line = list[Annotated[float, Field(gt=0, le=1e6)]]
Grid = list[Line]


@dataclass(frozen=True)
class LatencyTable:
    """Seconds of the parts of a step.

    Attributes:
        contexts: committed tokens at which steps were timed, rising, as are `nodes`, `widths` and
            `sequences`.
        nodes: sizes of the trees.
        widths: sizes of the levels.
        target: [contexts, nodes], a pass over a tree.
        draft: [contexts, widths], a pass over one level and the draws from it. If `first` is given,
            with warm caches.
        verify: by verifier, [nodes], all else in a step: warping, the rule, commits.
        models: sizes of the pair that it was measured on; empty in a table of no pair in
            particular.
        machine: what it was measured on, and with what.
        first: [contexts], the step's first draft pass, which commits the root; empty: as a pass
            over one token.
        second: [contexts], what the first later draft pass takes more than the others; empty:
            nothing.
        autoregressive: [contexts], a step of plain decoding; empty: the target's pass over one
            token and verification.
        branches: [K, depth], mean number of distinct nodes at each depth of K branches, K = 1, 2,
            ...; empty: K, since equal draws are not merged.
        sequences: numbers of sequences in a batch.
        target_batch: [sequences, contexts, nodes], a pass over one tree of each sequence, padded to
            so many nodes. For engines that decode in batches; the loop decodes one sequence.
        draft_batch: [sequences, contexts, widths], likewise.
        disagreement: the largest relative difference of prices between the last two repeats of the
            measurement.
        by_branches: the target runs every path from the root on for itself, so that its pass counts
            K (1 + L1 + L2) nodes.
    """

    contexts: Axis
    nodes: Axis
    widths: Axis
    target: Grid
    draft: Grid
    verify: dict[str, Line] = field(default_factory=dict)
    models: dict[Literal["target", "draft"], list[Positive]] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    first: Line = field(default_factory=list)
    second: Line = field(default_factory=list)
    autoregressive: Line = field(default_factory=list)
    branches: Grid = field(default_factory=list)
    sequences: Axis = field(default_factory=list)
    target_batch: list[Grid] = field(default_factory=list)
    draft_batch: list[Grid] = field(default_factory=list)
    disagreement: Annotated[float, Field(ge=0)] = 0.0
    by_branches: bool = False

    def save(self, path: str | Path) -> None:
        """Write the table with a checksum."""
        write_sealed(Path(path), {"format": FORMAT.number, **asdict(self)})

    @classmethod
    @checked
    def load(cls, path: str | Path) -> "LatencyTable":
        """Read a table.

        Raises:
            UserError: `path` holds no complete table, or not what `save` wrote there.
        """
        content = FORMAT.load(Path(path))
        content.pop("format")
        try:
            table: LatencyTable = typed(content, cls)
            table._check()
        except ValueError as error:
            raise UserError(
                f"{path}: it is no complete latency table ({error}): {FORMAT.again}."
            ) from error
        return table

    def _check(self) -> None:
        """Raise ValueError, naming it, for an axis that does not rise or a grid of another size."""
        axes = (self.sequences, self.contexts, self.nodes, self.widths)
        for axis in axes:
            if axis != sorted(set(axis)):
                raise ValueError(f"the axis {axis} does not rise")
        for k, line in enumerate(self.branches, 1):
            if not 1 <= min(line) <= max(line) <= k:
                raise ValueError(f"'branches' of {k} are not 1 to {k} nodes wide")
        if 0 in self.widths or 0 in self.nodes:
            raise ValueError("one of 'nodes' and 'widths' holds 0")
        sequences, contexts, nodes, widths = map(len, axes)
        if not contexts or not nodes or not widths:
            raise ValueError("one of 'contexts', 'nodes' and 'widths' is empty")
        grids: dict[str, tuple[int, ...]] = {
            "target": (contexts, nodes),
            "draft": (contexts, widths),
            "first": (contexts,),
            "second": (contexts,),
            "autoregressive": (contexts,),
            "branches": (K_MAX, L2_MAX),
            "target_batch": (sequences, contexts, nodes),
            "draft_batch": (sequences, contexts, widths),
        }
        batched = ("target_batch", "draft_batch") if sequences else ()
        for name, shape in grids.items():
            if getattr(self, name) or name in ("target", "draft", *batched):
                _check_grid(name, getattr(self, name), *shape)
        for rule, seconds in self.verify.items():
            _check_grid(f"verify.{rule}", seconds, nodes)

    def check_quiet(self, path: str | Path) -> None:
        """Raise UserError, naming `path`, if two repeats of the measurement disagreed."""
        if self.disagreement > AGREE:
            raise UserError(
                f"{path}: the latency table was measured on a machine under load: two repeats of it"
                f" disagree by {self.disagreement:.0%}, and a selector would learn that noise."
                " Measure it again when nothing else runs (stage=latency force=true), or take it"
                " as it is with latency.accept_noise=true."
            )

    def check_models(self, target: CausalModel, draft: CausalModel, path: str | Path) -> None:
        """Raise UserError if the table was measured on a pair of other sizes."""
        for name, model in (("target", target), ("draft", draft)):
            if name in self.models and self.models[name] != sizes(model):
                raise UserError(
                    f"{path}: its {name} has (hidden size, layers, vocabulary)"
                    f" {tuple(self.models[name])} and the pair's {tuple(sizes(model))}: it is of"
                    " another pair. Measure this one: stage=latency."
                )

    def passes(self, context: Tensor) -> Tensor:
        """[R, 2] seconds of one draft and one target pass over one token at `context` [R].

        They are features of the selector.
        """
        one = torch.ones_like(context)
        return torch.stack([self._draft(context, one), self._target(context, one)], -1)

    def steps(
        self, context: Tensor, verifier: str | None = None, shapes: Tensor = SHAPES
    ) -> Tensor:
        """[R, A] seconds of a step with each of the trees `shapes` [A, 3] at `context` [R] tokens.

        A first draft pass at the root, which also feeds the selector, then one for every trunk
        token and every level of branches but the last; one target pass over all nodes; and what
        `verifier` takes, if the table knows it. Draws that coincide are merged as often as in
        `branches`. Example without merging: (4, 3, 2) takes a first and four later draft passes and
        a target pass over 12 nodes.
        """
        context = context.double()[:, None]
        l1, l2 = shapes[:, 1:].to(context).unbind(-1)
        merged = torch.tensor(
            self.branches or [[k] * L2_MAX for k in range(1, K_MAX + 1)], dtype=context.dtype
        )
        deepest = int((l1 + l2).max())
        wide_by_k = F.pad(merged, (0, deepest - L2_MAX), value=1.0)  # a path is 1 wide
        width = wide_by_k[shapes[:, 0] - 1]  # [A, depth after the trunk]
        rows = F.pad(width.cumsum(-1), (1, 0))
        one = torch.ones_like(context)
        first = self._line(self.first, context) if self.first else self._draft(context, one)
        second = self._line(self.second, context) if self.second else 0.0
        draft = first + (l1 + l2 > 1) * second
        for step in range(1, deepest):
            # Pass number `step` runs a trunk token (up to L1), or a level of branches.
            below = (step - l1).clamp(min=0).long()[:, None]
            wide = torch.where(step > l1, width.gather(1, (below - 1).clamp(min=0))[:, 0], 1.0)
            there = l1.clamp(max=step) + rows.gather(1, below)[:, 0]
            draft += torch.where(
                step < l1 + l2, self._draft(context + there, wide.expand_as(draft)), 0.0
            )
        nodes = (1 + l1 + rows.gather(1, shapes[:, 2:])[:, 0]).expand_as(draft)
        run = rows_run(shapes).expand_as(draft) if self.by_branches else nodes
        seconds = draft + self._target(context.expand_as(draft), run)
        if verifier in self.verify:
            seconds = seconds + bilinear(
                [0], self.nodes, [self.verify[verifier]], torch.zeros_like(nodes), nodes
            )
        return seconds

    def steps_eq11(self, context: Tensor) -> Tensor:
        """[R, 233] seconds by Eq. 11 (NDE paper): each pass as one token at a longer context."""
        context = context.double()[:, None]
        k, l1, l2 = SHAPES.to(context).unbind(-1)
        one = torch.ones(len(context), len(TREES))
        seconds = self._target(context + l1 + k * l2, one)
        for j in range(int(max(l1.max(), l2.max()))):
            for rows, length in ((torch.full_like(l1, float(j)), l1), (l1 + j * k, l2)):
                seconds = seconds + torch.where(j < length, self._draft(context + rows, one), 0.0)
        return seconds

    def plain(self, context: Tensor) -> Tensor:
        """[R] seconds of a step of plain decoding.

        Without a measurement, the target's pass over the root, and verification as cheap as any.
        """
        if self.autoregressive:
            return self._line(self.autoregressive, context.double())
        verify = min((times[0] for times in self.verify.values()), default=0.0)
        return self._target(context.double(), torch.ones_like(context)) + verify

    def batched(self, sequences: int) -> "LatencyTable":
        """Prices of a step in which so many sequences draft and verify together, as in an engine.

        Passes were measured over several sequences (`target_batch`, `draft_batch`); between two
        measured numbers prices are linear. What is known of one sequence alone grows as a pass over
        one token of each sequence does: the first draft passes as the draft's, verification and
        plain decoding as the target's.

        Raises:
            UserError: so many were not measured.
        """
        measured = self.sequences or [1]
        if not 1 <= sequences <= measured[-1]:
            raise UserError(
                f"{sequences} sequences: this latency table knows 1 to {measured[-1]}. Measure it:"
                " stage=latency."
            )
        if sequences == 1:
            return self
        at = float(np.interp(sequences, measured, range(len(measured))))
        low, high = int(at), min(int(at) + 1, len(measured) - 1)

        def between(batches: list[Grid]) -> np.ndarray:
            grid = np.array(batches)
            return grid[low] + (at - low) * (grid[high] - grid[low])

        target, draft = between(self.target_batch), between(self.draft_batch)
        growth_of_target = target[:, 0] / np.array(self.target)[:, 0]
        growth_of_draft = draft[:, 0] / np.array(self.draft)[:, 0]
        return replace(
            self,
            target=target.tolist(),
            draft=draft.tolist(),
            verify={
                rule: _scaled(seconds, growth_of_target.mean())
                for rule, seconds in self.verify.items()
            },
            first=_scaled(self.first, growth_of_draft),
            second=_scaled(self.second, growth_of_draft),
            autoregressive=_scaled(self.autoregressive, growth_of_target),
            sequences=[],
            target_batch=[],
            draft_batch=[],
        )

    def _line(self, values: list[float], context: Tensor) -> Tensor:
        return bilinear(
            self.contexts, [1], [[x] for x in values], context, torch.ones_like(context)
        )

    def _target(self, context: Tensor, nodes: Tensor) -> Tensor:
        return bilinear(self.contexts, self.nodes, self.target, context, nodes)

    def _draft(self, context: Tensor, width: Tensor) -> Tensor:
        return bilinear(self.contexts, self.widths, self.draft, context, width)


class StepCosts:
    """A table's prices of the 233 trees under a verifier, every `SPACING` tokens of context.

    seconds: [G, C] float32, up to `longest` tokens; passes: [G, 2], see
    `LatencyTable.passes`. `rule` is "table", or "eq11" for the NDE paper's.
    """

    def __init__(self, table: LatencyTable, verifier: str, longest: int, rule: str = "table"):
        self.table, self.verifier, self.rule = table, verifier, rule
        contexts = grid_context(torch.arange(-(-longest // SPACING) + 2))
        self.seconds = self._price(contexts).float()
        self.passes = table.passes(contexts).float()

    def _price(self, contexts: Tensor) -> Tensor:
        if self.rule == "eq11":
            return self.table.steps_eq11(contexts)
        return self.table.steps(contexts, self.verifier)

    def at(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Seconds [R, C] and one-token passes [R, 2] at `context` [R].

        Beyond `longest` the last ones count.
        """
        row = self.row(context)
        return self.seconds[row], self.passes[row]

    def row(self, context: Context) -> Context:
        """Index of the nearest context of the grid."""
        nearest = (context + SPACING // 2) // SPACING
        last = len(self.seconds) - 1
        return nearest.clamp(max=last) if isinstance(nearest, Tensor) else min(nearest, last)

    def mean(self, counts: Tensor) -> Tensor:
        """[C]: mean seconds over the contexts that `context_counts` counted, however long."""
        seen = counts.nonzero()[:, 0]  # of the others an infinite price would not count as zero
        return counts[seen].double() @ self._price(grid_context(seen)) / counts.sum()


def grid_context(row: Tensor) -> Tensor:
    """Context at which row number `row` of `StepCosts` is priced."""
    return (SPACING * row).clamp(min=1)


def context_counts(context: Tensor) -> Tensor:
    """[G]: how many of the contexts [R] are nearest to each row of the grid."""
    return ((context + SPACING // 2) // SPACING).bincount()


def rows_run(shapes: Tensor) -> Tensor:
    """Count the rows of trees `shapes` [A, 3] whose paths each run from the root on."""
    k, l1, l2 = shapes.double().unbind(-1)
    return torch.where(l2 > 0, k, 1) * (1 + l1 + l2)


def _check_grid(name: str, values: list[Any], *shape: int) -> None:
    """Raise ValueError unless `values` are nested lists of this shape."""
    try:
        fits = np.shape(values) == shape
    except ValueError:  # rows of several lengths
        fits = False
    if not fits:
        raise ValueError(f"'{name}' has to be a grid of {' x '.join(map(str, shape))} numbers")


def _scaled(seconds: Line, factor: np.ndarray) -> Line:
    return (factor * np.array(seconds)).tolist() if seconds else []


def bilinear(
    rows: list[int], columns: list[int], values: list[list[float]], x: Tensor, y: Tensor
) -> Tensor:
    """Interpolate values [rows][columns] bilinearly at (x, y), both of one shape.

    Outside the grid, its edge counts.
    """
    table = torch.tensor(values, dtype=torch.float64)

    def locate(grid: list[int], at: Tensor) -> tuple[Tensor, Tensor]:
        knots = torch.tensor(grid, dtype=torch.float64)
        if len(grid) == 1:
            return torch.zeros_like(at, dtype=torch.long), torch.zeros_like(at, dtype=torch.float64)
        low = (torch.searchsorted(knots, at.double().contiguous(), right=True) - 1).clamp(
            0, len(grid) - 2
        )
        return low, ((at - knots[low]) / (knots[low + 1] - knots[low])).clamp(0, 1)

    (i, u), (j, v) = locate(rows, x), locate(columns, y)
    i_next, j_next = (i + 1).clamp(max=len(rows) - 1), (j + 1).clamp(max=len(columns) - 1)
    near = table[i, j] * (1 - v) + table[i, j_next] * v
    far = table[i_next, j] * (1 - v) + table[i_next, j_next] * v
    return near * (1 - u) + far * u
