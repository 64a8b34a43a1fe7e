"""A step of a delayed tree as a few functions over fixed buffers, which CUDA graphs can hold.

    upload → advance → level, level, ... → target → table → transfer → the rule, on the host

`advance` commits what the last step accepted and runs it through the draft; `level` draws the
tokens of a level and runs them; `target` scores all nodes; `table` finds the numbers that the rule
may look at. Their shapes depend on the width of a level, the padded number of nodes and the number
of slots shown; the table's on the tree. So a few graphs serve all trees.

Draws that coincide keep rows of their own on the device. The host merges them: a node's children
are drawn from q, and verified against p, of its first row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.device import blocked, upload
from nde_talf.decoding.drafters.base import DraftPoint, SessionDrafter
from nde_talf.decoding.models.static_shapes import FixedPasses, RecordedGraphs
from nde_talf.decoding.policies.base import DecodingState
from nde_talf.decoding.policies.delayed import within
from nde_talf.decoding.rules.verification_table import draws_of, look_up, nodes_in
from nde_talf.decoding.sampling.device_rng import inverse_cdf
from nde_talf.decoding.sampling.rng import Rng, warp
from nde_talf.decoding.sampling.sampling_setting import feature_setting
from nde_talf.decoding.step import Step, Stopwatch
from nde_talf.decoding.tree import DraftTree

NODES = (1, 2, 4, 8, 16, 32, 48)
"""Numbers of rows that passes are padded to; the last is the most that a tree may have."""
MOST = NODES[-1]
# Lines of what is uploaded: three numbers, then one number a committed token or a row of the tree.
# ROWS: rows of the last tree before the tokens; SEES: bit i is 1 where the row sees row i.
SCALARS, TOKENS, ROWS, PARENTS, DEPTHS, SEES, DRAWS, LAST_DRAWS = range(8)


class Layout(NamedTuple):
    """Rows of a delayed tree whose draws all have one: level by level, the root first."""

    parents: list[int]
    depths: list[int]
    sees: list[int]
    levels: list[tuple[slice, int]]
    """Rows of each level but the last, and how many draws one of them may have."""
    widths: list[int]


@lru_cache(None)
def layout(action: Action) -> Layout:
    """Return the rows of an action's tree."""
    found, ends = Layout([-1], [0], [1], [], []), [0]
    for level in range(action.depth):
        branched = level >= action.l1 and action.k > 1
        found.levels.append((slice(ends[0], ends[-1] + 1), action.k if branched else 1))
        parents = action.k * ends if level == action.l1 else ends
        ends = list(range(len(found.parents), len(found.parents) + len(parents)))
        found.widths.append(len(ends))
        for row, parent in zip(ends, parents, strict=True):
            found.parents.append(parent)
            found.depths.append(level + 1)
            found.sees.append(found.sees[parent] | 1 << row)
    return found


def why_not(decoder: Any) -> str:
    """Return why a decoder's steps cannot be recorded; empty where they can."""
    policy, drafter = decoder.policy, decoder.drafter
    action = None if policy.looks else policy.delayed_tree(None, None)
    if action is None and not policy.looks:
        return "the policy drafts no delayed trees"
    if action is not None and action.nodes > MOST:
        return f"a tree has {action.nodes} nodes, and buffers hold {MOST}"
    if decoder.verify.table is None:
        return f"verifier={decoder.verify.name} looks at whole rows"
    if decoder.process is not None or decoder.record:
        return "logits are changed or recorded"
    if drafter is not None and not isinstance(drafter, SessionDrafter):
        return "the drafter runs no model"
    if decoder.target.native is None or not (drafter is None or drafter.native):
        return "a model has no native pass, and others may use hooks or hold states"
    return ""


class RecordedSteps:
    """Buffers and graphs of a pair, its settings and a rule; they serve one sequence at a time.

    Args:
        decoder: of which `why_not` found nothing.
        state: at a root; its setting is the target's from then on.
        passes: the target's, and the draft's.
        drafter: at the root, or None.
        features: [n, W], the target's at the prompt.
    """

    def __init__(
        self,
        decoder: Any,
        state: DecodingState,
        passes: list[FixedPasses],
        drafter: SessionDrafter | None,
        features: Tensor,
    ):
        self.target, self.layers, self.rule = decoder.target, decoder.layers, decoder.verify.table
        self.setting, self.static, self.drafter = state.setting, decoder.static, drafter
        self.passes, self.device = passes, features.device
        self.graphs = RecordedGraphs(self.device, self._idle)
        kind = torch.float64 if self.target.dtype == torch.float64 else torch.float32
        size = 2, MOST, self.target.vocab_size
        zeros = partial(torch.zeros, device=self.device)
        try:
            self.p, self.q = zeros(size, dtype=kind)
        except torch.OutOfMemoryError as error:
            needed = np.prod(size) * kind.itemsize / 2**30
            raise UserError(
                f"static shapes: distributions of {MOST} nodes need {needed:.2f} GiB, more than the"
                " device has left. Give a smaller context, or model.graphs=compiled."
            ) from error
        self.sent = zeros(8, MOST, dtype=torch.float64)
        self.tokens, self.above, self.first = zeros(3, MOST, dtype=torch.long)
        self.row = zeros(1, dtype=torch.long)  # the next one to be drawn
        self.features = zeros(MOST, features.shape[-1], dtype=features.dtype)
        self.hidden = self.features
        if drafter is not None:
            hidden = drafter.previous.hidden
            self.hidden = zeros(MOST, len(hidden), dtype=hidden.dtype)

    def steps(
        self,
        decoder: Any,
        state: DecodingState,
        rng: Rng,
        sessions: list[Any],
        drafter: SessionDrafter | None,
        features: Tensor,
    ) -> Iterator[Step]:
        """Yield a decoder's steps after the prefill of a sequence, until the context is full."""
        tokens, rows = [state.root], [0]
        with torch.inference_mode():
            self.features[0] = features[-1]
            if drafter is not None:
                self.hidden[0] = drafter.previous.hidden
        while state.room >= 0:
            watch = Stopwatch(decoder.tick)
            with torch.inference_mode(), self._turns(sessions):
                found = self._step(decoder, state, rng, drafter, tokens, rows, watch)
            state, tokens, rows, nodes = found
            watch.charge("other")
            yield Step(tokens, nodes, watch.seconds)

    def _step(
        self,
        decoder: Any,
        state: DecodingState,
        rng: Rng,
        drafter: SessionDrafter | None,
        tokens: list[int],
        rows: list[int],
        watch: Stopwatch,
    ) -> tuple[DecodingState, list[int], list[int], int]:
        """Run a step after the last one accepted `tokens`, which followed these rows of its tree.

        Returns the state after it, what it accepted likewise, and its number of nodes.
        """
        numbers, count = np.zeros(self.sent.shape), len(tokens)
        numbers[SCALARS, :2] = state.context - count, count
        numbers[[TOKENS, ROWS], :count] = tokens, rows
        policy, action = decoder.policy, None
        if not policy.looks:
            action = self._plan(numbers, policy.delayed_tree(state, drafter), state.room, rng)
        self._send(numbers)
        shown = self.static.shown(state.context + MOST)
        key = self._padded(count), shown
        points = self.graphs(("advance", *key), partial(self.advance, *key))
        if action is None:
            hidden, q = points
            assert drafter is not None
            drafter.previous, drafter.root = (
                DraftPoint(partial(hidden.__getitem__, at), partial(q.__getitem__, at))
                for at in (0, 1)
            )
            chosen = policy.delayed_tree(state, drafter)
            action = self._plan(numbers, chosen, state.room, rng)
            self._send(numbers)
        tree, depth = layout(action), action.depth
        for level, width in enumerate(tree.widths, 1):
            level_key = width, shown, level == depth
            self.graphs(("level", *level_key), partial(self.level, rng, *level_key))
        watch.charge("draft", policy=policy.seconds)
        nodes = self._padded(len(tree.parents))
        run = partial(self.score, nodes, shown)
        states, logits = self.graphs(("target", nodes, shown), run)
        watch.charge("target")

        found, weights, shape = self.graphs(("table", action), partial(self.table, tree))
        drafted, row = self._merged(state.root, tree.parents, found.tolist(), weights, shape)
        end, token = decoder.verify(drafted, rng)
        accepted = drafted.commit(end, token)
        look, last = feature_setting(self.setting), row[end]
        seen = self.p[last] if look is self.setting else warp(logits[last], look)
        after = state.after(accepted.tokens, seen, states[last])
        watch.charge("verify")
        return after, accepted.tokens, [0, *(row[node] for node in accepted.path)], len(drafted)

    def _plan(self, numbers: np.ndarray, chosen: Any, room: int, rng: Rng) -> Action:
        """Write the rows of a tree, as deep as there is room, and its uniform numbers."""
        action: Action = within(chosen, room)
        tree = layout(action)
        count = len(tree.parents)
        self.static.size(count)
        numbers[SCALARS, 2] = count
        numbers[[PARENTS, DEPTHS, SEES], :count] = tree.parents, tree.depths, tree.sees
        numbers[DRAWS, 1:count] = rng.ahead(count - 1)
        numbers[LAST_DRAWS, :count] = rng.ahead(count)
        return action

    def _send(self, numbers: np.ndarray) -> None:
        self.sent.copy_(upload(torch.from_numpy(numbers), self.device))

    @staticmethod
    def _padded(count: int) -> int:
        return next(size for size in NODES if size >= count)

    @staticmethod
    def _merged(
        root: int, parents: list[int], values: list[float], weights: Tensor, shape: tuple[int, int]
    ) -> tuple[DraftTree, dict[int, int]]:
        """Return the tree of the draws at the end of `values`, and the first row of each node."""
        tree, nodes, drafted = DraftTree.rooted(root), [0], len(parents) - 1
        tokens = values[len(values) - drafted :]
        for parent, token in zip(parents[1:], tokens, strict=True):
            nodes.append(tree.add(nodes[parent], int(token)))
        row: dict[int, int] = {}
        for at, node in enumerate(nodes):
            row.setdefault(node, at)
        tree.nodes = nodes_in(values, weights, tree, row, shape)
        return tree, row

    def _line(self, line: int, rows: Any = slice(None)) -> Tensor:
        """Return whole numbers that were uploaded."""
        return self.sent[line].long()[rows]

    def advance(self, width: int, shown: int) -> tuple[Tensor, Tensor] | None:
        """Keep what was accepted, up to `width` tokens, and draft at the root.

        Returns the draft's hidden states [2, H] and q [2, V] before the root and at it.
        """
        start, count, _ = self._line(SCALARS, slice(3)).split(1)
        tokens, rows = self._line(TOKENS, slice(width)), self._line(ROWS, slice(width))
        at = torch.arange(width, device=self.device)
        used, target = at < count, self.passes[0]
        if width > 1:  # the tree's root lies before the first of the tokens
            slots = (torch.where(used, start - 1 + each, target.nowhere) for each in (rows, at))
            target.cache.move(*slots)
        last = (count - 1).clamp(min=0)
        self.tokens[:1] = tokens.index_select(0, last)
        self.row.fill_(1)
        if self.drafter is None:
            return None
        inputs = self.drafter.inputs(self.features.index_select(0, rows), drafted=False)
        sees = torch.bitwise_left_shift(torch.full_like(at, 2), at) - 1
        begin = start - self.drafter.lag
        slots = torch.where(used, at, self.passes[1].nowhere)
        states = self._pass(self.passes[1], begin, tokens, (slots, at, sees), inputs, shown)
        both = torch.cat([last, count])
        hidden = torch.cat([self.hidden[:1], states]).index_select(0, both)
        q = self.drafter.distribution(hidden, []).to(self.q)
        self.hidden[:1], self.q[:1] = hidden[1:], q[1:]
        return hidden, q

    def level(self, rng: Rng, width: int, shown: int, last: bool) -> None:
        """Draw the next `width` rows, and unless they are the last ones find q there."""
        rows = self.row + torch.arange(width, device=self.device)
        above = self.first.index_select(0, self._line(PARENTS).index_select(0, rows))
        uniforms = self.sent[DRAWS].index_select(0, rows)
        drawn = rng.rows(self.q.index_select(0, above), uniforms)
        same = (above[:, None] == above) & (drawn[:, None] == drawn)
        first = self.row + same.int().argmax(1)
        for buffer, values in ((self.tokens, drawn), (self.above, above), (self.first, first)):
            buffer.index_copy_(0, rows, values)
        self.row += width
        if last:
            return
        drafter = self.drafter
        assert drafter is not None
        inputs = drafter.inputs(self.hidden.index_select(0, above))
        depths, sees = (self._line(line).index_select(0, rows) for line in (DEPTHS, SEES))
        begin = self._root - drafter.lag
        states = self._pass(self.passes[1], begin, drawn, (rows, depths, sees), inputs, shown)
        self.hidden.index_copy_(0, rows, states)
        self.q.index_copy_(0, rows, drafter.distribution(states, []).to(self.q))

    def score(self, nodes: int, shown: int) -> tuple[Tensor, Tensor]:
        """Run the target on all rows; return its hidden states and logits."""
        at, target = torch.arange(nodes, device=self.device), self.passes[0]
        slots = torch.where(at < self._line(SCALARS, slice(2, 3)), at, target.nowhere)
        rows = slots, self._line(DEPTHS, slice(nodes)), self._line(SEES, slice(nodes))
        states = self._pass(target, self._root, self.tokens[:nodes], rows, {}, shown)
        hidden, features = self.target.parts(states, self.layers)
        logits = self.target.logits(hidden)
        self.p[:nodes], self.features[:nodes] = warp(logits, self.setting), features
        return hidden, logits

    def table(self, tree: Layout) -> tuple[Tensor, Tensor, tuple[int, int]]:
        """Return all that the host gets: `nodes_in`'s numbers and the tokens; then the weights."""
        count, (offered, bottom_up) = len(tree.parents), self.rule
        tokens, uniforms = self.tokens[:count], self.sent[LAST_DRAWS, :count]
        levels = tree.levels if offered != 0 else []
        inner = levels[-1][0].stop if levels else 0
        most = max((draws for _, draws in levels), default=0)
        draws = draws_of(tokens, self.above[:count], self.first[:count], inner, most)
        if offered:
            most = min(most, offered)
            draws = draws._replace(
                tokens=draws.tokens[:, :most],
                entered=draws.entered[:, :most],
                counts=draws.counts.clamp(max=most),
            )
        if levels and not bottom_up:
            levels = [(slice(0, inner), most)]
        found, weights = look_up(self.p[:count], self.q[:inner], draws, levels, bottom_up)
        ahead = inverse_cdf(weights, uniforms[:, None])[:, 0]
        values = torch.cat([found, ahead.double(), tokens.double()])
        return values, weights, (inner, most)

    @property
    def _root(self) -> Tensor:
        """The root's position [1], and its slot in the target's cache."""
        return self._line(SCALARS, slice(1)) + self._line(SCALARS, slice(1, 2)) - 1

    def _pass(
        self,
        passes: FixedPasses,
        start: Tensor,
        tokens: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        inputs: dict[str, Tensor],
        shown: int,
    ) -> Tensor:
        """Run rows, which see the slots before `start` and of those after it what they say.

        rows: of each the slot and the position, both after `start`, and the bits of what it sees. A
        slot that there is not is none.
        """
        slots, depths, sees = rows
        column = torch.arange(shown, device=self.device) - start
        seen = (column < 0) | ((sees[:, None] >> column.clamp(0, 62)) & 1 == 1)
        mask = torch.zeros(seen.shape, dtype=passes.dtype, device=self.device)
        mask = mask.masked_fill(~seen, blocked(passes.dtype))[None, None]
        passes.cache.write_to((start + slots).clamp(max=passes.nowhere), shown)
        positions = (start + depths)[None]
        return passes.forward(tokens[None], positions, mask, passes.cache, **inputs)[0]

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Let a function write where nothing is kept."""
        kept = [(each, each.clone()) for each in (self.sent, self.row, self.hidden)]
        self.sent.zero_()
        self.sent[SCALARS, 0] = self.passes[0].nowhere
        self.sent[SCALARS, 1] = 1
        yield
        for buffer, content in kept:
            buffer.copy_(content)

    @contextmanager
    def _turns(self, sessions: list[Any]) -> Iterator[None]:
        """Hold the caches of the sequence's sessions."""
        target, *others = sessions
        with target.passes.turn(target):
            if not others:
                yield
                return
            with others[0].passes.turn(others[0]):
                yield
