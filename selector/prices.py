"""The latency table: seconds of a step's parts, and of whole steps by tree.

Eq. 11 (NDE paper) prices a pass by its context length alone. Verifying n tokens is not one token at
a longer context, so the table has two dimensions: t_p(context, nodes) and t_q(context, width), in
seconds, bilinearly interpolated. The first draft pass of a step has its own time: the target ran
before it, so the draft's weights are not in the caches.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator, Field
from scipy.ndimage import map_coordinates
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nde_talf.decoding.actions import K_MAX, L2_MAX, TREES
from nde_talf.decoding.common.arguments import Positive, checked
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import write_sealed
from nde_talf.decoding.common.formats import Format
from nde_talf.decoding.common.json_validation import typed
from nde_talf.decoding.models.causal_model import CausalModel

NODES = (1, 2, 4, 8, 12, 20, 33, 41)
WIDTHS = (1, 2, 3, 4)
AGREE = 0.1
"""Largest trusted difference of prices between two repeats of a measurement, relative."""
SHAPES = torch.tensor(TREES)  # [233, 3]


def sizes(model: CausalModel) -> list[int]:
    """Return hidden size, layers and vocabulary, which identify the models of a latency table."""
    return [model.hidden_size, model.config.num_hidden_layers, model.vocab_size]


def _rising(axis: list[int]) -> list[int]:
    if axis != sorted(set(axis)):
        raise ValueError(f"the axis {axis} does not rise")
    return axis


Knots = Annotated[
    list[Annotated[int, Field(ge=1, le=1 << 30)]], AfterValidator(_rising), Field(min_length=1)
]
Line = list[Annotated[float, Field(gt=0, le=1e6)]]
Grid = list[Line]


@dataclass(frozen=True)
class LatencyTable:
    """Seconds of the parts of a step.

    Raises ValueError, naming it, for a grid of another size than its axes.

    Attributes:
        contexts: committed tokens at which steps were timed, rising, as are `nodes` and `widths`.
        nodes: sizes of the trees.
        widths: sizes of the levels.
        target: [contexts, nodes], a pass over a tree.
        draft: [contexts, widths], a pass over one level and its draws; with warm caches if `first`
            is given.
        verify: by verifier, [nodes], the rest of a step: warping, rule, commits.
        models: sizes of the measured pair; empty for a table of no particular pair.
        machine: conditions of the measurement.
        first: [contexts], the step's first draft pass, which commits the root; empty: as a pass
            over one token.
        second: [contexts], extra seconds of the second draft pass over later ones; empty: none.
        autoregressive: [contexts], a step of plain decoding; empty: the target's pass over one
            token and verification.
        branches: [K, depth], mean number of distinct nodes at each depth of K branches, K = 1, 2,
            ...; empty: K, as without merging equal draws.
        disagreement: largest relative difference of prices between two repeats of the measurement.
        by_branches: the target runs every path from the root by itself: K (1 + L1 + L2) nodes.
    """

    contexts: Knots
    nodes: Knots
    widths: Knots
    target: Grid
    draft: Grid
    verify: dict[str, Line] = field(default_factory=dict)
    models: dict[Literal["target", "draft"], list[Positive]] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    first: Line = field(default_factory=list)
    second: Line = field(default_factory=list)
    autoregressive: Line = field(default_factory=list)
    branches: Grid = field(default_factory=list)
    disagreement: Annotated[float, Field(ge=0)] = 0.0
    by_branches: bool = False

    def __post_init__(self) -> None:
        for k, line in enumerate(self.branches, 1):
            if not 1 <= min(line) <= max(line) <= k:
                raise ValueError(f"'branches' of {k} are not 1 to {k} nodes wide")
        contexts, nodes, widths = map(len, (self.contexts, self.nodes, self.widths))
        grids: dict[str, tuple[int, ...]] = {
            "target": (contexts, nodes),
            "draft": (contexts, widths),
            "first": (contexts,),
            "second": (contexts,),
            "autoregressive": (contexts,),
            "branches": (K_MAX, L2_MAX),
        }
        for name, shape in grids.items():
            if getattr(self, name) or name in ("target", "draft"):
                _check_grid(name, getattr(self, name), *shape)
        for rule, seconds in self.verify.items():
            _check_grid(f"verify.{rule}", seconds, nodes)

    def save(self, path: str | Path) -> None:
        """Write the table with a checksum."""
        write_sealed(Path(path), {"format": FORMAT.number, **asdict(self)})

    @classmethod
    @checked
    def load(cls, path: str | Path) -> "LatencyTable":
        """Read a table.

        Raises:
            UserError: `path` holds no complete table, or was changed after `save`.
        """
        table: LatencyTable = typed(FORMAT.load(Path(path)), cls)
        return table

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
        """Return seconds [R, 2] of one-token passes of draft and target at `context` [R].

        They are features of the selector.
        """
        return torch.stack([self._draft(context, 1), self._target(context, 1)], -1)

    def steps(
        self, context: Tensor, verifier: str | None = None, shapes: Tensor = SHAPES
    ) -> Tensor:
        """Return seconds [R, A] of a step with the trees `shapes` [A, 3] at `context` [R] tokens.

        A first draft pass at the root, which also feeds the selector, then one for every trunk
        token and every level of branches but the last; one target pass over all nodes; and
        `verifier`, if the table has it. Equal draws are merged as often as in `branches`. Example
        without merging: (4, 3, 2) takes a first and four later draft passes and a target pass over
        12 nodes.
        """
        context = context.double()[:, None]
        branches = self.branches or [[k] * L2_MAX for k in range(1, K_MAX + 1)]
        widths = [level_widths(tree, branches) for tree in shapes.tolist()]
        tensors = [torch.tensor(levels, dtype=torch.float64) for levels in widths]
        levels = pad_sequence(tensors, batch_first=True)  # [A, deepest]
        drafted, depth = levels.cumsum(-1), shapes[:, 1:].sum(-1)
        seconds = self._line(self.first, context) if self.first else self._draft(context, 1)
        if self.second:
            seconds = seconds + (depth > 1) * self._line(self.second, context)
        for level in range(levels.shape[1] - 1):
            later = self._draft(context + drafted[:, level], levels[:, level])
            seconds = seconds + torch.where(depth > level + 1, later, 0.0)
        nodes = 1 + levels.sum(-1)
        seconds = seconds + self._target(context, rows_run(shapes) if self.by_branches else nodes)
        if verifier in self.verify:
            seconds = seconds + linear(self.nodes, self.verify[verifier], nodes)
        return seconds

    def steps_eq11(self, context: Tensor) -> Tensor:
        """Return seconds [R, A] by Eq. 11 (NDE paper): a pass as one token, further on."""
        context = context.double()[:, None]
        k, l1, l2 = SHAPES.double().unbind(-1)
        seconds = self._target(context + l1 + k * l2, 1)
        for j in range(int(SHAPES[:, 1:].max())):
            for rows, length in ((j, l1), (l1 + j * k, l2)):
                seconds = seconds + torch.where(j < length, self._draft(context + rows, 1), 0.0)
        return seconds

    def plain(self, context: Tensor) -> Tensor:
        """Return seconds [R] of a step of plain decoding.

        If not measured: the target's pass over the root, and the cheapest verification.
        """
        if self.autoregressive:
            return self._line(self.autoregressive, context)
        verify = min((times[0] for times in self.verify.values()), default=0.0)
        return self._target(context, 1) + verify

    def _line(self, values: Line, context: Tensor) -> Tensor:
        return linear(self.contexts, values, context)

    def _target(self, context: Tensor, nodes: Tensor | int) -> Tensor:
        return bilinear(self.contexts, self.nodes, self.target, context, nodes)

    def _draft(self, context: Tensor, width: Tensor | int) -> Tensor:
        return bilinear(self.contexts, self.widths, self.draft, context, width)


FORMAT = Format("latency table", "measure it again (stage=latency force=true)", LatencyTable)


def level_widths(shape: Sequence[int], branches: Sequence[Sequence[float]]) -> list[float]:
    """Return mean numbers of nodes at depth 1, 2, ... of a tree, by `LatencyTable.branches`."""
    k, l1, l2 = shape
    return [1.0] * l1 + ([1.0] * l2 if k == 1 else [*branches[k - 1][:l2]])


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


def linear(knots: list[int], values: list[float], x: Tensor) -> Tensor:
    """Interpolate values [knots] linearly at x, clamped to the knots."""
    return torch.from_numpy(np.interp(x, knots, values))


def bilinear(
    rows: list[int], columns: list[int], values: Grid, x: Tensor, y: Tensor | int
) -> Tensor:
    """Interpolate values [rows][columns] bilinearly at (x, y), broadcast, clamped to the grid."""
    places = (np.interp(at, axis, range(len(axis))) for at, axis in ((x, rows), (y, columns)))
    grid, at = np.array(values, float), np.broadcast_arrays(*places)
    return torch.from_numpy(map_coordinates(grid, at, order=1, mode="nearest"))
