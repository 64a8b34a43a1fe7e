"""A step of a delayed tree as a few functions over fixed buffers, which CUDA graphs can hold.

    upload → advance → level, level, ... → score → table → transfer → the rule, on the host

`advance` commits what the last step accepted, runs it through the draft, and draws the first level,
or asks a policy that looks at the draft for a tree. `level` runs a level and draws the next.
`score` runs all nodes through the target. `table` finds the numbers that the rule may look at; for
a rule that goes bottom-up, `reach` finds the weights of some rows level by level before. Shapes
depend on the width of a level, the padded number of nodes and the number of slots shown. The tree
itself comes with the upload, so a few graphs serve all trees.

Draws that coincide keep rows of their own on the device. The host merges them: a node's children
are drawn from q, and verified against p, of its first row.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.arguments import Positive, checked
from nde_talf.decoding.common.errors import Advice, UserError
from nde_talf.decoding.device import blocked, upload
from nde_talf.decoding.drafters.base import DraftPoint, SessionDrafter
from nde_talf.decoding.models.static_shapes import FixedPasses, RecordedGraphs, StaticShapes
from nde_talf.decoding.policies.base import DecodingState
from nde_talf.decoding.policies.delayed import within
from nde_talf.decoding.rules.verification_table import Rows, TableNode
from nde_talf.decoding.sampling.rng import Rng, warp
from nde_talf.decoding.sampling.sampling_setting import feature_setting
from nde_talf.decoding.step import Step, Stopwatch
from nde_talf.decoding.tree import DraftTree

SIZES = (1, 4, 8, 16, 32, 48)
"""Numbers of rows that passes are padded to; the last is the most that a tree may have."""
MOST = SIZES[-1]
# Lines of what is uploaded. SCALARS: slot of the first token that the last step committed, their
# number, and the root's slot. Then a number for each of these tokens (FROM: the row of the last
# tree before it), or for each row (SEES: bit i is 1 where it sees row i).
SCALARS, TOKENS, FROM, PARENTS, DEPTHS, SEES, DRAWS, LAST_DRAWS = range(8)


@lru_cache(None)
def layout(action: Action) -> tuple[DraftTree, list[int], list[int]]:
    """Return an action's tree if no draws are merged, level by level.

    Returns:
        The tree, of each row the bits of what it sees, and the width of each level.
    """
    tree, ends, widths = DraftTree.rooted(0), [0], [1]
    for level in range(action.depth):
        if level == action.l1:
            ends = action.k * ends
        ends = [tree.add(end, len(tree)) for end in ends]
        widths.append(len(ends))
    sees = [1 + sum(1 << node for node in tree.path(row)) for row in range(len(tree))]
    return tree, sees, widths


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


class RecordedShapes(StaticShapes):
    """Static shapes whose passes are recorded as CUDA graphs, and with them steps of delayed trees.

    Rules take their numbers from one table. No GPU has run it yet.
    """

    recorded = True

    @checked
    def __init__(self, context: Positive, rows: Positive = 128):
        super().__init__(context, max(rows, MOST))  # slots for a step's rows of padding
        self.rows, self.sizes = rows, sorted({*SIZES, rows})
        self.steps: dict[Any, RecordedSteps] = {}

    def recorder(self, decoder: Any) -> Callable[..., Iterator[Step]] | None:
        """See `Shapes.recorder`; None, after a line that says why, for other decoders."""
        why = why_not(decoder)
        row = decoder.target.vocab_size * max(4, decoder.target.dtype.itemsize)
        self.tell_size(decoder, 0 if why else 2 * MOST * row)
        if not why:
            return partial(self.record, decoder)
        message = f"static shapes: passes are recorded one by one, and no whole steps: {why}."
        warnings.warn(message, Advice, stacklevel=4)
        return None

    def record(
        self, decoder: Any, state: DecodingState, rng: Rng, session: Any, drafter: Any, last: Tensor
    ) -> Iterator[Step]:
        """Yield a decoder's steps after a prefill; last: [W], the target's states at its end."""
        sessions = [session] if drafter is None else [session, drafter.session]
        passes = tuple(each.passes for each in sessions)
        with torch.inference_mode():
            hidden = last[:0] if drafter is None else drafter.previous.hidden
            if passes not in self.steps:
                self.steps[passes] = RecordedSteps(passes, state.p_previous, last, hidden)
            steps = self.steps[passes]
            steps.states[0], steps.hidden[0], steps.p[0] = last, hidden, state.p_previous
        return steps.steps(decoder, state, rng, sessions, drafter)


SHAPES = {"compiled": StaticShapes, "recorded": RecordedShapes}
"""By `nde_talf.decoding.names.GRAPHS`."""


class RecordedSteps:
    """Buffers and graphs of a pair, which serve one sequence at a time.

    Args:
        passes: the target's, and the draft's.
        p: [V], the target's distribution at a token.
        states: [W], the target's there.
        hidden: [H_q], the draft's, or nothing.
    """

    def __init__(self, passes: tuple[FixedPasses, ...], p: Tensor, states: Tensor, hidden: Tensor):
        self.passes, self.device = passes, p.device
        try:
            self.p, self.q = p.new_zeros(2, MOST, len(p))
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"static shapes: distributions of {MOST} nodes need"
                f" {2 * MOST * p.nbytes / 2**30:.2f} GiB, more than the device has left. Give a"
                " smaller context, or model.graphs=compiled."
            ) from error
        self.states, self.hidden = (each.new_zeros(MOST, len(each)) for each in (states, hidden))
        self.make_rows()

    def make_rows(self) -> None:
        """Make the buffers of rows and of what is uploaded."""
        self.graphs = RecordedGraphs(self.device)
        self.sent = torch.zeros(8, MOST, dtype=torch.float64, device=self.device)
        self.whole = self.sent.long()
        # Of each row its token, the first row that coincides with it, and see `Rows`.
        self.tokens, self.first, self.above = self.whole.new_zeros(3, MOST)
        self.weights = self.sent.new_zeros(MOST)
        self.row = self.whole.new_zeros(1)  # the next one to be drawn, or to be verified

    def steps(
        self,
        decoder: Any,
        state: DecodingState,
        rng: Rng,
        sessions: list[Any],
        drafter: SessionDrafter | None,
    ) -> Iterator[Step]:
        """Yield a decoder's steps after the prefill, until the context is full."""
        self.decoder, self.state, self.rng, self.drafter = decoder, state, rng, drafter
        policy, static = decoder.policy, decoder.static
        self.kind = state.setting, drafter and drafter.setting, policy.choice
        tokens, rows = [state.root], [0]
        while state.room >= 0:
            watch, numbers = Stopwatch(decoder.tick), np.zeros(self.sent.shape)
            count, root = len(tokens), state.context - 1
            shown = static.shown(root + MOST)
            numbers[SCALARS, :3] = root + 1 - count, count, root
            numbers[[TOKENS, FROM], :count] = tokens, rows
            with torch.inference_mode(), ExitStack() as turns:
                for session in sessions:
                    turns.enter_context(session.passes.turn(session))
                if (action := policy.delayed_tree(state)) is not None:
                    action = within(action, state.room)
                width = self._send(numbers, action)
                chosen = self._run(self.advance, static.size(count), width, shown)
                if action is None:
                    action = within(policy.chosen(int(chosen)), state.room)
                    if width := self._send(numbers, action):
                        self._run(self.draw, width)
                shape, _, widths = layout(action)
                for level, below in pairwise(widths[1:]):
                    self._run(self.level, level, below, shown)
                watch.charge("draft")
                self._run(self.score, static.size(len(shape)), shown)
                watch.charge("target")
                tree, row = self.drafted(state.root, action)
                end, token = decoder.verify(tree, rng)
                accepted = tree.commit(end, token)
                tokens, rows = accepted.tokens, [0, *(row[node] for node in accepted.path)]
                # What the policy looks at stays on the device.
                state = state.after(tokens, state.p_previous, state.h_previous)
                watch.charge("verify")
            yield Step(tokens, len(tree), watch.seconds)

    def _run(self, function: Any, *arguments: Any) -> Any:
        """Run a function as a graph; its arguments, and what the decoder is, say which."""
        key = function.__name__, self.kind, *arguments
        return self.graphs(key, partial(function, *arguments))

    def _send(self, numbers: np.ndarray, action: Action | None) -> int | None:
        """Upload tokens, and a tree's rows and uniform numbers; return its first level's width."""
        width = None
        if action is not None:
            tree, sees, widths = layout(action)
            count, width = len(tree), sum(widths[1:2])
            uniforms = self.rng.ahead(count), self.rng.ahead(count)
            numbers[PARENTS:, :count] = tree.parents, tree.depth, sees, *uniforms
        self.sent.copy_(upload(torch.from_numpy(numbers), self.device))
        self.whole.copy_(self.sent)
        return width

    def advance(self, count: int, width: int | None, shown: int) -> Tensor | None:
        """Commit the accepted tokens, find q at the new root, and draw the first level.

        Args:
            count: the accepted tokens, padded.
            width: rows of the first level; None: the policy chooses the tree, and its index in
                TREES, [1], is returned.
            shown: slots that rows see.
        """
        self.above.fill_(-1)
        self.weights.fill_(1)
        self.row.fill_(1)
        start, kept = self.whole[SCALARS, :2].split(1)
        tokens, rows = self.whole[TOKENS : FROM + 1, :count]
        order = torch.arange(count, device=self.device)
        # The tree's root comes before the first of the tokens.
        self.passes[0].move(start - 1 + rows, start - 1 + order)
        self.tokens[:1] = tokens[kept - 1]
        if (drafter := self.drafter) is None:
            return None
        known, features = self.decoder.target.parts(self.states[rows], self.decoder.layers)
        at = start - drafter.lag, order, order, (2 << order) - 1
        states = self._pass(1, tokens, at, shown, **drafter.inputs(features, drafted=False))
        around = torch.cat([kept - 1, kept])
        hidden = torch.cat([self.hidden[:1], states])[around]
        q = drafter.distribution(hidden, []).to(self.q)
        self.hidden[:1], self.q[:1] = hidden[1:], q[1:]
        if width:
            self.draw(width)
        if width is not None:
            return None
        drafter.previous, drafter.root = (
            DraftPoint(of.clone, row.clone) for of, row in zip(hidden, q, strict=True)
        )
        last, look = known[kept - 1], feature_setting(self.state.setting)
        p = self.p[rows[kept - 1]]
        if look is not self.state.setting:
            p = warp(self.decoder.target.logits(last), look)
        now = replace(self.state, context=start + kept, p_previous=p[0], h_previous=last[0])
        return self.decoder.policy.choice(now, drafter)

    def draw(self, width: int) -> None:
        """Draw the next `width` rows."""
        rows = self.row + torch.arange(width, device=self.device)
        above = self.first[self.whole[PARENTS, rows]]
        drawn = self.rng.rows(self.q[above], self.sent[DRAWS, rows])
        same = (above[:, None] == above) & (drawn[:, None] == drawn)
        self.tokens[rows], self.above[rows] = drawn, above
        self.first[rows] = self.row + same.int().argmax(1)
        self.row.add_(width)

    def level(self, width: int, below: int, shown: int) -> None:
        """Find q at the last `width` rows, and draw `below` rows below them."""
        rows = self.row - width + torch.arange(width, device=self.device)
        drafter: Any = self.drafter
        inputs = drafter.inputs(self.hidden[self.above[rows]])
        at = self.whole[SCALARS, 2:3] - drafter.lag, rows, *self.whole[DEPTHS : SEES + 1, rows]
        states = self._pass(1, self.tokens[rows], at, shown, **inputs)
        self.hidden[rows] = states
        self.q[rows] = drafter.distribution(states, []).to(self.q)
        self.draw(below)

    def score(self, nodes: int, shown: int) -> None:
        """Run the target on all rows."""
        rows = torch.arange(nodes, device=self.device)
        at = self.whole[SCALARS, 2:3], rows, *self.whole[DEPTHS : SEES + 1, :nodes]
        states = self._pass(0, self.tokens[:nodes], at, shown)
        target = self.decoder.target
        logits = target.logits(target.parts(states, self.decoder.layers)[0])
        self.p[:nodes], self.states[:nodes] = warp(logits, self.state.setting), states
        self.row.fill_(1)

    def reach(self, width: int) -> None:
        """Find the weights of the next `width` rows, for Traversal."""
        draws = self.row + torch.arange(width, device=self.device)
        self._rows(MOST).reach(draws, width)  # all may be below one row
        self.row.add_(width)

    def table(self, nodes: int, most: int) -> Tensor:
        """Return all that the host gets: see `Rows.table`."""
        return self._rows(nodes).table(self.sent[LAST_DRAWS, :nodes], most)

    def _rows(self, count: int) -> Rows:
        buffers = self.p, self.q, self.weights, self.tokens, self.above
        return Rows(*(each[:count] for each in buffers))

    def drafted(self, root: int, action: Action) -> tuple[DraftTree, dict[int, int]]:
        """Bring the table to the host; return the tree of its draws, and each node's first row."""
        shape, _, widths = layout(action)
        offered, bottom_up = self.decoder.verify.table
        for width in widths[1:] if bottom_up else ():
            self._run(self.reach, width)
        most = min(max(widths[1:], default=0), MOST if offered is None else offered)
        lines = self._run(self.table, self.decoder.static.size(len(shape)), most).tolist()
        tree, nodes, row = DraftTree.rooted(root), [0], {0: 0}
        for at in range(1, len(shape)):
            nodes.append(tree.add(nodes[shape.parents[at]], int(lines[at][0])))
            row.setdefault(nodes[at], at)
        tree.nodes = partial(TableNode, lines, self.q, tree, row)
        return tree, row

    def _pass(
        self, model: int, tokens: Tensor, at: tuple[Tensor, ...], shown: int, **inputs: Tensor
    ) -> Tensor:
        """Run rows over the first `shown` slots.

        Args:
            model: 0 for the target, 1 for the draft.
            tokens: [n].
            at: the slot [1] before which rows see all; of each row [n] its slot and position from
                there on, and the bits of what it sees.
            shown: number of slots.
            **inputs: of the rows, besides tokens.
        """
        passes, (start, rows, depths, sees) = self.passes[model], at
        column = torch.arange(shown, device=self.device) - start
        seen = (column < 0) | ((sees[:, None] >> column.clamp(0, 62)) & 1 == 1)
        mask = torch.where(seen, 0.0, blocked(passes.dtype)).to(passes.dtype)[None, None]
        passes.cache.write_to(start + rows, shown)
        return passes.forward(tokens[None], (start + depths)[None], mask, passes.cache, **inputs)[0]
