"""A step of a delayed tree as a few functions over fixed buffers, which CUDA graphs can hold.

    upload → advance → level, level, ... → score → table → transfer → the rule, on the host

`advance` commits what the last step accepted, runs it through the draft, and asks a policy that
looks at the draft for a tree; `level` draws the tokens of a level and runs them; `score` runs all
nodes through the target; `table` finds the numbers that the rule may look at. Their shapes depend
on the width of a level, the padded number of nodes and the number of slots shown; so a few graphs
serve all trees. Only the table, which holds no pass of a model, has a graph for each tree.

Draws that coincide keep rows of their own on the device. The host merges them: a node's children
are drawn from q, and verified against p, of its first row.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.arguments import Positive, checked
from nde_talf.decoding.common.errors import Advice, UserError
from nde_talf.decoding.device import blocked, upload
from nde_talf.decoding.drafters.base import DraftPoint, SessionDrafter
from nde_talf.decoding.models.base import Model
from nde_talf.decoding.models.static_shapes import FixedPasses, RecordedGraphs, StaticShapes
from nde_talf.decoding.policies.base import DecodingState
from nde_talf.decoding.policies.delayed import within
from nde_talf.decoding.rules.verification_table import draws_of, look_up, nodes_in
from nde_talf.decoding.sampling.rng import Rng, warp
from nde_talf.decoding.sampling.sampling_setting import feature_setting
from nde_talf.decoding.step import Step, Stopwatch
from nde_talf.decoding.tree import DraftTree

SIZES = (1, 2, 4, 8, 16, 32, 48)
"""Numbers of rows that passes are padded to; the last is the most that a tree may have."""
MOST = SIZES[-1]
# Lines of what is uploaded. SCALARS: position of the first token that the last step committed,
# their number, the rows of the tree, and the root's position. Then a number for each of these
# tokens (FROM: the row of the last tree before it), or for each row (SEES: bit i is 1 where it sees
# row i).
SCALARS, TOKENS, FROM, PARENTS, DEPTHS, SEES, DRAWS, LAST_DRAWS = range(8)


@lru_cache(None)
def layout(action: Action) -> tuple[np.ndarray, list[tuple[slice, int]]]:
    """Return the rows of an action's tree if no draws are merged, level by level.

    Returns:
        Parent, depth and bits of what it sees, of each row [3, N]; then of each level its rows, and
        how many draws one of them may have.
    """
    rows, ends, levels = [(-1, 0, 1)], [0], list[tuple[slice, int]]()
    for level in range(action.depth + 1):
        branched = action.l1 <= level < action.depth
        levels.append((slice(ends[0], ends[-1] + 1), action.k if branched else 1))
        if level == action.depth:
            break
        parents = action.k * ends if level == action.l1 else ends
        ends = list(range(len(rows), len(rows) + len(parents)))
        for row, parent in zip(ends, parents, strict=True):
            rows.append((parent, level + 1, rows[parent][2] | 1 << row))
    return np.array(rows).T, levels


def why_not(decoder: Any) -> str:
    """Return why a decoder's steps cannot be recorded; empty where they can."""
    policy, drafter, rule = decoder.policy, decoder.drafter, decoder.verify
    action = None if policy.choice else policy.delayed_tree(None)
    if not policy.choice and (action is None or action.nodes > MOST):
        return f"the policy drafts no delayed trees of up to {MOST} nodes"
    if rule.table is None:
        return f"verifier={rule.name} looks at whole rows"
    if decoder.process is not None or decoder.record:
        return "logits are changed or recorded"
    if decoder.target.native is None or not (drafter is None or drafter.native):
        return "target or draft has no native pass, and may have hooks or states"
    return ""


def rows_of(target: Model) -> tuple[torch.dtype, int]:
    """Return the type of distributions, and the bytes of all p and q of a tree."""
    kind = torch.float64 if target.dtype == torch.float64 else torch.float32
    return kind, 2 * MOST * target.vocab_size * kind.itemsize


class RecordedShapes(StaticShapes):
    """Static shapes whose passes are recorded as CUDA graphs, and with them steps of delayed trees.

    Rules take their numbers from one table. No GPU has run it yet.
    """

    recorded = True

    @checked
    def __init__(self, context: Positive, rows: Positive = 128):
        super().__init__(context, rows)
        self.steps: dict[Any, RecordedSteps] = {}

    def recorder(self, decoder: Any) -> Callable[..., Iterator[Step]] | None:
        """See `Shapes.recorder`; None, after a line that says why, for other decoders."""
        why = why_not(decoder)
        self.tell_size(decoder, 0 if why else rows_of(decoder.target)[1])
        if not why:
            return partial(recorded_steps, decoder)
        message = f"static shapes: passes are recorded one by one, and no whole steps: {why}."
        warnings.warn(message, Advice, stacklevel=4)
        return None


SHAPES = {"compiled": StaticShapes, "recorded": RecordedShapes}
"""By `nde_talf.decoding.names.GRAPHS`."""


class RecordedSteps:
    """Buffers and graphs of a pair, which serve one sequence at a time.

    Args:
        decoder: one whose steps can be recorded (`why_not` returns nothing).
        passes: the target's, and the draft's.
        states: [W], the target's at a token.
        hidden: [H_q], the draft's, or nothing.
    """

    def __init__(self, decoder: Any, passes: list[FixedPasses], states: Tensor, hidden: Tensor):
        self.target, self.layers, self.static = decoder.target, decoder.layers, decoder.static
        self.passes, self.device = passes, states.device
        zeros = partial(torch.zeros, device=self.device)
        kind, size = rows_of(self.target)
        try:
            self.p, self.q = zeros(2, MOST, self.target.vocab_size, dtype=kind)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"static shapes: distributions of {MOST} nodes need {size / 2**30:.2f} GiB, more"
                " than the device has left. Give a smaller context, or model.graphs=compiled."
            ) from error
        self.states = zeros(MOST, len(states), dtype=states.dtype)
        self.hidden = zeros(MOST, len(hidden), dtype=hidden.dtype)
        self.make_rows()

    def make_rows(self) -> None:
        """Make the buffers of rows and of what is uploaded."""
        self.graphs = RecordedGraphs(self.device, self._idle)
        self.sent = torch.zeros(8, MOST, dtype=torch.float64, device=self.device)
        self.whole = self.sent.long()
        self.tokens, self.above, self.first = torch.zeros_like(self.whole[:3])
        self.row = torch.zeros_like(self.tokens[:1])  # the next one to be drawn

    def begin(self, decoder: Any, state: DecodingState, drafter: SessionDrafter | None) -> None:
        """Begin a sequence after its prefill."""
        self.rule, self.policy = decoder.verify.table, decoder.policy
        self.state, self.setting, self.drafter = state, state.setting, drafter
        self.kind = self.rule, self.setting, drafter and drafter.setting, self.policy.choice

    def steps(self, decoder: Any, rng: Rng, sessions: list[Any]) -> Iterator[Step]:
        """Yield a decoder's steps, until the context is full."""
        state, policy = self.state, self.policy
        tokens, rows = [state.root], [0]
        while state.room >= 0:
            watch, numbers = Stopwatch(decoder.tick), np.zeros(self.sent.shape)
            count, shown = len(tokens), self.static.shown(state.context + MOST)
            numbers[SCALARS, [0, 1, 3]] = state.context - count, count, state.context - 1
            numbers[[TOKENS, FROM], :count] = tokens, rows
            with torch.inference_mode(), ExitStack() as turns:
                for session in sessions:
                    turns.enter_context(session.passes.turn(session))
                if (action := policy.delayed_tree(state)) is not None:
                    action = self._plan(numbers, action, state.room, rng)
                self._send(numbers)
                chosen = self._run(self.advance, _padded(count), shown, action is None)
                if action is None:
                    action = self._plan(numbers, policy.chosen(int(chosen)), state.room, rng)
                    self._send(numbers)
                size, levels = layout(action)[0].shape[1], layout(action)[1]
                for level, _ in levels[1:]:
                    width = level.stop - level.start
                    self._run(self.level, rng, width, shown, level.stop == size)
                watch.charge("draft")
                self._run(self.score, _padded(size), shown)
                watch.charge("target")
                tree, row = self._merged(state.root, action, *self._run(self.table, action))
                end, token = decoder.verify(tree, rng)
                accepted = tree.commit(end, token)
                tokens, rows = accepted.tokens, [0, *(row[node] for node in accepted.path)]
                # What the policy looks at stays on the device.
                state = state.after(tokens, state.p_previous, state.h_previous)
                watch.charge("verify")
            yield Step(tokens, len(tree), watch.seconds)

    def _run(self, function: Any, *arguments: Any) -> Any:
        """Run a function as a graph; its arguments, and what the decoder is, say which."""
        key = function.__name__, self.kind, *(x for x in arguments if not isinstance(x, Rng))
        return self.graphs(key, partial(function, *arguments))

    def _plan(self, numbers: np.ndarray, chosen: Any, room: int, rng: Rng) -> Action:
        """Write the rows of a tree, as deep as there is room, and its uniform numbers."""
        action = within(chosen, room)
        rows, _ = layout(action)
        count = rows.shape[1]
        self.static.size(count)
        numbers[SCALARS, 2], numbers[PARENTS : SEES + 1, :count] = count, rows
        numbers[DRAWS, 1:count] = rng.ahead(count - 1)
        numbers[LAST_DRAWS, :count] = rng.ahead(count)
        return action

    def _send(self, numbers: np.ndarray) -> None:
        self.sent.copy_(upload(torch.from_numpy(numbers), self.device))
        self.whole.copy_(self.sent)

    def advance(self, width: int, shown: int, choosing: bool) -> Tensor | None:
        """Keep what was accepted, up to `width` tokens, and draft at the root.

        Returns the tree's index in TREES, [1], where the policy is `choosing` one.
        """
        start, count = self.whole[SCALARS, :2].split(1)
        tokens, rows = self.whole[TOKENS, :width], self.whole[FROM, :width]
        at, target = torch.arange(width, device=self.device), self.passes[0]
        slots = torch.where(at < count, at, target.nowhere)
        if width > 1:  # the tree's root comes before the first of the tokens
            before = torch.where(at < count, rows, target.nowhere), slots
            target.move(*((start - 1 + each).clamp(max=target.nowhere) for each in before))
        self.tokens[:1] = tokens.index_select(0, count - 1)
        self.row.fill_(1)
        if (drafter := self.drafter) is None:
            return None
        known, features = self.target.parts(self.states.index_select(0, rows), self.layers)
        inputs = drafter.inputs(features, drafted=False)
        sees = torch.bitwise_left_shift(torch.full_like(at, 2), at) - 1
        begin = start - drafter.lag
        states = self._pass(self.passes[1], begin, tokens, (slots, at, sees), inputs, shown)
        around = torch.cat([count - 1, count])
        hidden = torch.cat([self.hidden[:1], states]).index_select(0, around)
        q = drafter.distribution(hidden, []).to(self.q)
        self.hidden[:1], self.q[:1] = hidden[1:], q[1:]
        if not choosing:
            return None
        drafter.previous, drafter.root = (
            DraftPoint(of.clone, row.clone) for of, row in zip(hidden, q, strict=True)
        )
        last, look = known.index_select(0, count - 1), feature_setting(self.setting)
        p = self.p.index_select(0, rows.index_select(0, count - 1))
        if look is not self.setting:
            p = warp(self.target.logits(last), look)
        now = replace(self.state, context=start + count, p_previous=p[0], h_previous=last[0])
        return self.policy.choice(now, drafter)

    def level(self, rng: Rng, width: int, shown: int, last: bool) -> None:
        """Draw the next `width` rows and, unless they are the `last` ones, find q there."""
        rows = self.row + torch.arange(width, device=self.device)
        parents, depths, sees = self.whole[PARENTS : SEES + 1].index_select(1, rows)
        above = self.first.index_select(0, parents)
        uniforms = self.sent[DRAWS].index_select(0, rows)
        drawn = rng.rows(self.q.index_select(0, above), uniforms)
        same = (above[:, None] == above) & (drawn[:, None] == drawn)
        first = self.row + same.int().argmax(1)
        for buffer, values in ((self.tokens, drawn), (self.above, above), (self.first, first)):
            buffer.index_copy_(0, rows, values)
        self.row += width
        if last or (drafter := self.drafter) is None:
            return
        inputs = drafter.inputs(self.hidden.index_select(0, above))
        begin = self.whole[SCALARS, 3:4] - drafter.lag
        states = self._pass(self.passes[1], begin, drawn, (rows, depths, sees), inputs, shown)
        self.hidden.index_copy_(0, rows, states)
        self.q.index_copy_(0, rows, drafter.distribution(states, []).to(self.q))

    def score(self, nodes: int, shown: int) -> None:
        """Run the target on all rows."""
        at, passes = torch.arange(nodes, device=self.device), self.passes[0]
        count, root = self.whole[SCALARS, 2:4].split(1)
        slots = torch.where(at < count, at, passes.nowhere)
        rows = slots, self.whole[DEPTHS, :nodes], self.whole[SEES, :nodes]
        states = self._pass(passes, root, self.tokens[:nodes], rows, {}, shown)
        logits = self.target.logits(self.target.parts(states, self.layers)[0])
        self.p[:nodes], self.states[:nodes] = warp(logits, self.setting), states

    def table(self, action: Action) -> tuple[Tensor, Tensor, tuple[int, int]]:
        """Return all that the host gets: `look_up`'s numbers and the tokens; then the weights.

        Last the shape of the table, (M, K). The weights take q's place, which is needed no more.
        """
        (*levels, (leaves, _)), (offered, bottom_up) = layout(action)[1], self.rule
        count, inner = leaves.stop, leaves.start
        most = max((draws for _, draws in levels), default=0)
        if offered is not None:
            most = min(most, offered)
        inner = inner if most else 0
        tokens = self.tokens[:count]
        draws = draws_of(tokens, self.above[:count], inner, most)
        if not bottom_up:
            levels = [(slice(0, inner), most)]
        found, weights = look_up(
            self.p[:count],
            self.q[:inner],
            draws,
            levels if most else [],
            bottom_up,
            self.sent[LAST_DRAWS, :count],
        )
        self.q[:count] = weights
        return torch.cat([found, tokens.double()]), self.q[:count], (inner, most)

    def _merged(
        self, root: int, action: Action, found: Tensor, weights: Tensor, shape: tuple[int, int]
    ) -> tuple[DraftTree, dict[int, int]]:
        """Bring a table to the host; return the tree of its draws, and each node's first row."""
        values, parents = found.tolist(), layout(action)[0][0].tolist()
        tree, nodes, row = DraftTree.rooted(root), [0], {0: 0}
        tokens = values[len(values) - len(parents) :]
        for at in range(1, len(parents)):
            nodes.append(tree.add(nodes[parents[at]], int(tokens[at])))
            row.setdefault(nodes[at], at)
        tree.nodes = nodes_in(values, weights, tree, row, shape)
        return tree, row

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
        slots, positions = ((start + each).clamp(max=passes.nowhere) for each in (slots, depths))
        passes.cache.write_to(slots, shown)
        return passes.forward(tokens[None], positions[None], mask, passes.cache, **inputs)[0]

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Let a function write where nothing is kept."""
        kept = [(each, each.clone()) for each in (self.whole, self.row, self.hidden, self.q)]
        self.whole.zero_()
        self.whole[SCALARS] = self.passes[0].nowhere
        self.whole[SCALARS, 1].fill_(1)
        self.whole[SCALARS, 2].fill_(0)
        yield
        for buffer, content in kept:
            buffer.copy_(content)
        for passes in self.passes:
            passes.cache.clear(passes.nowhere)


def _padded(count: int) -> int:
    return next(size for size in SIZES if size >= count)


def recorded_steps(
    decoder: Any,
    state: DecodingState,
    rng: Rng,
    session: Any,
    drafter: Any,
    features: Tensor,
) -> Iterator[Step]:
    """Yield a decoder's steps after a prefill, over the buffers of its static shapes.

    features: [n, W], the target's at the prompt.
    """
    sessions = [session] if drafter is None else [session, drafter.session]
    passes = [each.passes for each in sessions]
    with torch.inference_mode():
        states = features[-1]
        if decoder.layers:
            states = torch.cat([state.h_previous, states])
        hidden = states[:0] if drafter is None else drafter.previous.hidden
        known = decoder.static.steps
        if (*passes,) not in known:
            known[(*passes,)] = RecordedSteps(decoder, passes, states, hidden)
        steps: RecordedSteps = known[(*passes,)]
        steps.states[0], steps.hidden[0], steps.p[0] = states, hidden, state.p_previous
    steps.begin(decoder, state, drafter)
    return steps.steps(decoder, rng, sessions)
