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
from nde_talf.decoding.drafters.base import DraftPoint
from nde_talf.decoding.models.static_shapes import RecordedGraphs, StaticShapes
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
# Lines of what is uploaded. SCALARS: slot of the first token that the last step committed, the
# number of the last one, which is the root, and its slot. Then a number for each of these tokens
# (FROM: the row of the last tree before it), or for each row (SEES: bit i is 1 where it sees i).
SCALARS, TOKENS, FROM, PARENTS, DEPTHS, SEES, DRAWS, LAST_DRAWS = range(8)


@lru_cache(None)
def layout(action: Action) -> tuple[DraftTree, list[int]]:
    """Return an action's tree if no draws are merged, level by level.

    Of each row also the bits of what it sees.
    """
    tree, ends = DraftTree.rooted(0), [0]
    for width in action.widths:
        ends = [tree.add(ends[at % len(ends)], len(tree)) for at in range(width)]
    return tree, [1 + sum(1 << node for node in tree.path(row)) for row in range(len(tree))]


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

    def recorder(self, decoder: Any) -> Any:
        """See `Shapes.recorder`; None, after a line that says why, for other decoders."""
        why = why_not(decoder)
        row = decoder.target.vocab_size * max(4, decoder.target.dtype.itemsize)
        self.tell_size(decoder, 0 if why else 2 * MOST * row)
        if not why:
            return partial(self.begin, decoder)
        message = f"static shapes: passes are recorded one by one, and no whole steps: {why}."
        warnings.warn(message, Advice, stacklevel=4)
        return None

    def begin(
        self, decoder: Any, state: DecodingState, session: Any, drafter: Any, last: Tensor
    ) -> Any:
        """Return a decoder's step after a prefill; last: [W], the target's states at its end."""
        draft = session if drafter is None else drafter.session
        hidden = last if drafter is None else drafter.previous.hidden
        passes = session.passes, draft.passes
        if passes not in self.steps:
            self.steps[passes] = RecordedSteps(state.p_previous, last, hidden)
        steps = self.steps[passes]
        steps.states[0], steps.hidden[0], steps.rows.p[0] = last, hidden, state.p_previous
        steps.decoder, steps.accepted = decoder, ([state.root], [0])
        return steps.step


SHAPES = {"compiled": StaticShapes, "recorded": RecordedShapes}
"""By `nde_talf.decoding.names.GRAPHS`."""


class RecordedSteps:
    """Buffers and graphs of a pair, which serve one sequence at a time.

    Args:
        p: [V], the target's distribution at a token.
        states: [W], the target's there.
        hidden: [H_q], the draft's.
    """

    decoder: Any
    accepted: tuple[list[int], list[int]]
    """Tokens that the last step committed, and the row of its tree before each."""

    def __init__(self, p: Tensor, states: Tensor, hidden: Tensor):
        self.device = p.device
        try:
            targets, drafts = p.new_zeros(2, MOST, len(p))
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"static shapes: distributions of {MOST} nodes need"
                f" {2 * MOST * p.nbytes / 2**30:.2f} GiB, more than the device has left. Give a"
                " smaller context, or model.graphs=compiled."
            ) from error
        self.states, self.hidden = (each.new_zeros(MOST, len(each)) for each in (states, hidden))
        self.graphs = RecordedGraphs(self.device)
        self.sent = torch.zeros(8, MOST, dtype=torch.float64, device=self.device)
        self.whole = self.sent.long()
        tokens, above, self.first = self.whole.new_zeros(3, MOST)
        self.rows = Rows(targets, drafts, self.sent.new_ones(MOST), tokens, above)
        self.row = self.whole.new_zeros(1)  # the next one to be drawn, or to be verified

    def step(
        self, state: DecodingState, rng: Rng, session: Any, drafter: Any
    ) -> tuple[Step, DecodingState]:
        """Return a step, and the state after it, in which p and the feature stay as they were.

        What the policy looks at stays on the device.
        """
        decoder, watch = self.decoder, Stopwatch(self.decoder.tick)
        policy, static = decoder.policy, decoder.static
        draft = session if drafter is None else drafter.session
        with session.passes.turn(session), draft.passes.turn(draft):
            self.state, self.rng, self.drafter = state, rng, drafter
            self.sessions = session, draft  # the target's, and the draft's
            shown = static.shown(state.context - 1 + MOST)
            if (action := policy.delayed_tree(state)) is not None:
                action = within(action, state.room)
            width = self._send(action)
            chosen = self._run(self.advance, static.size(len(self.accepted[0])), width, shown)
            if action is None:
                action = within(policy.chosen(int(chosen)), state.room)
                if width := self._send(action):
                    self._run(self.draw, width)
            for level, below in pairwise(action.widths):
                self._run(self.level, level, below, shown)
            watch.charge("draft")
            self._run(self.score, static.size(action.nodes), shown)
            watch.charge("target")
            tree, row = self.drafted(action)
            accepted = tree.commit(*decoder.verify(tree, rng))
            self.accepted = accepted.tokens, [0, *(row[node] for node in accepted.path)]
            watch.charge("verify")
        state = state.after(accepted.tokens, state.p_previous, state.h_previous)
        return Step(accepted.tokens, len(tree), watch.seconds), state

    def _run(self, function: Any, *arguments: Any) -> Any:
        """Run a function as a graph; its arguments, and what the decoder is, say which."""
        drafter, policy = self.drafter, self.decoder.policy
        kind = self.state.setting, drafter and drafter.setting, policy.choice
        return self.graphs((function.__name__, *kind, *arguments), partial(function, *arguments))

    def _send(self, action: Action | None) -> int | None:
        """Upload tokens, and a tree's rows and uniform numbers; return its first level's width."""
        numbers, width = np.zeros(self.sent.shape), None
        count, root = len(self.accepted[0]), self.state.context - 1
        numbers[SCALARS, :3] = root + 1 - count, count - 1, root
        numbers[[TOKENS, FROM], :count] = self.accepted
        if action is not None:
            tree, sees = layout(action)
            width = sum(action.widths[:1])
            uniforms = self.rng.ahead(len(tree)), self.rng.ahead(len(tree))
            numbers[PARENTS:, : len(tree)] = tree.parents, tree.depth, sees, *uniforms
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
        self.row.fill_(1)
        self.rows.w0.fill_(1)
        self.rows.above.fill_(-1)
        start, last = self.whole[SCALARS, :2].split(1)
        tokens, rows = self.whole[TOKENS : FROM + 1, :count]
        order = torch.arange(count, device=self.device)
        # The tree's root comes before the first of the tokens.
        self.sessions[0].passes.move(start - 1 + rows, start - 1 + order)
        self.rows.tokens[:1] = tokens[last]
        if (drafter := self.drafter) is None:
            return None
        known, features = self.decoder.target.parts(self.states[rows], self.decoder.layers)
        at = start - drafter.lag, order, order, (2 << order) - 1
        states = self._pass(1, tokens, at, shown, **drafter.inputs(features, drafted=False))
        hidden = torch.cat([self.hidden[:1], states])[torch.cat([last, last + 1])]
        q = drafter.distribution(hidden, []).to(self.rows.q)
        self.hidden[:1], self.rows.q[:1] = hidden[1:], q[1:]
        if width:
            self.draw(width)
        if width is not None:
            return None
        drafter.previous, drafter.root = (
            DraftPoint(of.clone, row.clone) for of, row in zip(hidden, q, strict=True)
        )
        feature, look = known[last], feature_setting(self.state.setting)
        p = self.rows.p[rows[last]]
        if look is not self.state.setting:
            p = warp(self.decoder.target.logits(feature), look)
        context = start + last + 1
        now = replace(self.state, context=context, p_previous=p[0], h_previous=feature[0])
        return self.decoder.policy.choice(now, drafter)

    def draw(self, width: int) -> None:
        """Draw the next `width` rows."""
        rows = self.row + torch.arange(width, device=self.device)
        above = self.first[self.whole[PARENTS, rows]]
        drawn = self.rng.rows(self.rows.q[above], self.sent[DRAWS, rows])
        same = (above[:, None] == above) & (drawn[:, None] == drawn)
        self.rows.tokens[rows], self.rows.above[rows] = drawn, above
        self.first[rows] = self.row + same.int().argmax(1)
        self.row.add_(width)

    def level(self, width: int, below: int, shown: int) -> None:
        """Find q at the last `width` rows, and draw `below` rows below them."""
        rows = self.row - width + torch.arange(width, device=self.device)
        drafter: Any = self.drafter
        inputs = drafter.inputs(self.hidden[self.rows.above[rows]])
        at = self.whole[SCALARS, 2:3] - drafter.lag, rows, *self.whole[DEPTHS : SEES + 1, rows]
        states = self._pass(1, self.rows.tokens[rows], at, shown, **inputs)
        self.hidden[rows] = states
        self.rows.q[rows] = drafter.distribution(states, []).to(self.rows.q)
        self.draw(below)

    def score(self, nodes: int, shown: int) -> None:
        """Run the target on all rows."""
        rows = torch.arange(nodes, device=self.device)
        at = self.whole[SCALARS, 2:3], rows, *self.whole[DEPTHS : SEES + 1, :nodes]
        states = self._pass(0, self.rows.tokens[:nodes], at, shown)
        target = self.decoder.target
        logits = target.logits(target.parts(states, self.decoder.layers)[0])
        self.rows.p[:nodes], self.states[:nodes] = warp(logits, self.state.setting), states
        self.row.fill_(1)

    def reach(self, width: int) -> None:
        """Find the weights of the next `width` rows, for Traversal."""
        draws = self.row + torch.arange(width, device=self.device)
        self.rows.reach(draws, width)  # all may be below one row
        self.row.add_(width)

    def table(self, nodes: int, most: int) -> Tensor:
        """Return all that the host gets: see `Rows.table`."""
        rows = Rows(*(each[:nodes] for each in self.rows))
        return rows.table(self.sent[LAST_DRAWS, :nodes], most)

    def drafted(self, action: Action) -> tuple[DraftTree, dict[int, int]]:
        """Bring the table to the host; return the tree of its draws, and each node's first row."""
        offered, bottom_up = self.decoder.verify.table
        for width in action.widths if bottom_up else ():
            self._run(self.reach, width)
        most = min(max(action.widths, default=0), MOST if offered is None else offered)
        count = self.decoder.static.size(action.nodes)
        lines = self._run(self.table, count, most).tolist()
        tree, nodes, row = DraftTree.rooted(self.state.root), [0], {0: 0}
        for at, parent in enumerate(layout(action)[0].parents[1:], 1):
            nodes.append(tree.add(nodes[parent], int(lines[at][0])))
            row.setdefault(nodes[at], at)
        tree.nodes = partial(TableNode, lines, self.rows.q, tree, row)
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
        passes, (start, rows, depths, sees) = self.sessions[model].passes, at
        column = torch.arange(shown, device=self.device) - start
        seen = (column < 0) | ((sees[:, None] >> column.clamp(0, 62)) & 1 == 1)
        mask = torch.where(seen, 0.0, blocked(passes.dtype)).to(passes.dtype)[None, None]
        passes.cache.write_to(start + rows, shown)
        return passes.forward(tokens[None], (start + depths)[None], mask, passes.cache, **inputs)[0]
