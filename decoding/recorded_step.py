"""A step of a delayed tree as a few functions over fixed buffers, which CUDA graphs can hold.

    upload → advance → level, level, ... → score → table → transfer → the rule, on the host

`advance` commits what the last step accepted, runs it through the draft, and draws the first level,
or asks a policy that looks at the draft for a tree. `level` runs a level and draws the next.
`score` runs all nodes through the target. `table` finds the numbers that the rule may look at; for
a rule that goes bottom-up, `reject` finds some of them level by level before. Shapes depend on the
width of a level, the padded number of nodes and the number of slots shown. The tree itself comes
with the upload, so a few graphs serve all trees.

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
from nde_talf.decoding.rules.verification_table import TableNode, VerificationTable
from nde_talf.decoding.sampling.rng import Rng, warp
from nde_talf.decoding.sampling.sampling_setting import feature_setting
from nde_talf.decoding.step import Step, Stopwatch
from nde_talf.decoding.tree import DraftTree

SIZES = (1, 4, 8, 16, 32, 48)
"""Numbers of rows that passes are padded to; the last is the most that a tree may have."""
MOST = SIZES[-1]
# Lines of what is uploaded. SCALARS: slot of the first token that the last step committed, their
# number, and the root's slot. Then a number for each of these tokens (FROM: the row of the last
# tree before it; TO: its slot), or for each row (SEES: bit i is 1 where it sees row i).
SCALARS, TOKENS, FROM, TO, PARENTS, SLOTS, POSITIONS, SEES, DRAWS, LAST_DRAWS = range(10)


@lru_cache(None)
def layout(action: Action) -> tuple[np.ndarray, list[int]]:
    """Return the rows of an action's tree if no draws are merged, level by level.

    Returns:
        Parent, depth and bits of what it sees, of each row [3, N]; then the width of each level.
    """
    rows, widths = [(-1, 0, 1)], [1] * (action.l1 + 1) + [action.k] * action.l2
    for depth, (above, width) in enumerate(pairwise(widths), 1):
        first = len(rows) - above
        for at in range(width):
            parent = first + at % above
            rows.append((parent, depth, rows[parent][2] | 1 << len(rows)))
    return np.array(rows).T, widths


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
        super().__init__(context, rows)
        self.steps: dict[Any, RecordedSteps] = {}

    def recorder(self, decoder: Any) -> Callable[..., Iterator[Step]] | None:
        """See `Shapes.recorder`; None, after a line that says why, for other decoders."""
        why = why_not(decoder)
        row = decoder.target.vocab_size * (8 if decoder.target.dtype == torch.float64 else 4)
        self.tell_size(decoder, 0 if why else 2 * MOST * row)
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
        self.sent = torch.zeros(10, MOST, dtype=torch.float64, device=self.device)
        self.whole = self.sent.long()
        # Of each row its token, and the first row that coincides with it.
        self.tokens, self.first = self.whole.new_zeros(2, MOST)
        self.row = self.whole.new_zeros(1)  # the next one to be drawn, or to be verified
        self.numbers = VerificationTable(self.tokens, self.whole.new_zeros(MOST, MOST))

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
        policy, rule = decoder.policy, decoder.verify.table
        self.kind = rule, state.setting, drafter and drafter.setting, policy.choice
        tokens, rows = [state.root], [0]
        while state.room >= 0:
            watch, numbers = Stopwatch(decoder.tick), np.zeros(self.sent.shape)
            count, root = len(tokens), state.context - 1
            shown, start = decoder.static.shown(root + MOST), root + 1 - count
            numbers[[TO, SLOTS]] = decoder.static.capacity - 1  # where padded rows write
            numbers[SCALARS, :3] = start, count, root
            numbers[[TOKENS, FROM, TO], :count] = tokens, rows, range(start, root + 1)
            with torch.inference_mode(), ExitStack() as turns:
                for session in sessions:
                    turns.enter_context(session.passes.turn(session))
                if (action := policy.delayed_tree(state)) is not None:
                    action = within(action, state.room)
                width = self._send(numbers, action)
                chosen = self._run(self.advance, _padded(count), width, shown)
                if action is None:
                    action = within(policy.chosen(int(chosen)), state.room)
                    if width := self._send(numbers, action):
                        self._run(self.draw, width)
                widths = layout(action)[1]
                for level, below in pairwise(widths[1:]):
                    self._run(self.level, level, below, shown)
                watch.charge("draft")
                self._run(self.score, _padded(sum(widths)), shown)
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
            (parents, depths, sees), widths = layout(action)
            count, root, width = len(parents), numbers[SCALARS, 2], sum(widths[1:2])
            self.decoder.static.size(count)
            rows = parents, root + np.arange(count), root + depths, sees
            numbers[PARENTS : SEES + 1, :count] = rows
            numbers[DRAWS, 1:count] = self.rng.ahead(count - 1)
            numbers[LAST_DRAWS, :count] = self.rng.ahead(count)
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
        self.numbers.clear()
        self.row.fill_(1)
        start, kept = self.whole[SCALARS, :2].split(1)
        tokens, rows, slots = self.whole[TOKENS : TO + 1, :count]
        # The tree's root comes before the first of the tokens.
        self.passes[0].move(start - 1 + rows, slots - 1)
        self.tokens[:1] = tokens.index_select(0, kept - 1)
        if (drafter := self.drafter) is None:
            return None
        known, features = self.decoder.target.parts(
            self.states.index_select(0, rows), self.decoder.layers
        )
        inputs = drafter.inputs(features, drafted=False)
        order = torch.arange(count, device=self.device)
        at = start, slots, start + order, (2 << order) - 1
        states = self._pass(self.passes[1], tokens, at, shown, inputs, drafter.lag)
        around = torch.cat([kept - 1, kept])
        hidden = torch.cat([self.hidden[:1], states]).index_select(0, around)
        q = drafter.distribution(hidden, []).to(self.q)
        self.hidden[:1], self.q[:1] = hidden[1:], q[1:]
        if width:
            self.draw(width)
        if width is not None:
            return None
        drafter.previous, drafter.root = (
            DraftPoint(of.clone, row.clone) for of, row in zip(hidden, q, strict=True)
        )
        last, look = known.index_select(0, kept - 1), feature_setting(self.state.setting)
        p = self.p.index_select(0, rows.index_select(0, kept - 1))
        if look is not self.state.setting:
            p = warp(self.decoder.target.logits(last), look)
        now = replace(self.state, context=start + kept, p_previous=p[0], h_previous=last[0])
        return self.decoder.policy.choice(now, drafter)

    def draw(self, width: int) -> None:
        """Draw the next `width` rows."""
        rows = self.row + torch.arange(width, device=self.device)
        above = self.first.index_select(0, self.whole[PARENTS].index_select(0, rows))
        uniforms = self.sent[DRAWS].index_select(0, rows)
        drawn = self.rng.rows(self.q.index_select(0, above), uniforms)
        siblings = above[:, None] == above
        first = self.row + (siblings & (drawn[:, None] == drawn)).int().argmax(1)
        self.tokens.index_copy_(0, rows, drawn)
        self.first.index_copy_(0, rows, first)
        place = above * MOST + siblings.tril(-1).sum(1)
        self.numbers.children.view(-1).index_copy_(0, place, rows)
        self.row.add_(width)

    def level(self, width: int, below: int, shown: int) -> None:
        """Find q at the last `width` rows, and draw `below` rows below them."""
        rows = self.row - width + torch.arange(width, device=self.device)
        parents, *places = self.whole[PARENTS : SEES + 1].index_select(1, rows)
        tokens, above = self.tokens.index_select(0, rows), self.first.index_select(0, parents)
        drafter: Any = self.drafter
        inputs = drafter.inputs(self.hidden.index_select(0, above))
        at = self.whole[SCALARS, 2:3], *places
        states = self._pass(self.passes[1], tokens, at, shown, inputs, drafter.lag)
        self.hidden.index_copy_(0, rows, states)
        self.q.index_copy_(0, rows, drafter.distribution(states, []).to(self.q))
        self.draw(below)

    def score(self, nodes: int, shown: int) -> None:
        """Run the target on all rows."""
        at = self.whole[SCALARS, 2:3], *self.whole[SLOTS : SEES + 1, :nodes]
        states = self._pass(self.passes[0], self.tokens[:nodes], at, shown)
        target = self.decoder.target
        logits = target.logits(target.parts(states, self.decoder.layers)[0])
        self.p[:nodes], self.states[:nodes] = warp(logits, self.state.setting), states
        self.row.zero_()

    def reject(self, width: int, most: int) -> None:
        """Find the numbers of the next `width` rows, of up to `most` draws each, for Traversal."""
        rows = self.row + torch.arange(width, device=self.device)
        p, q = (each.index_select(0, rows) for each in (self.p, self.q))
        self.numbers.reject(p, q, rows, most, bottom_up=True)
        self.row.add_(width)

    def table(self, nodes: int, most: int) -> tuple[Tensor, Tensor]:
        """Return all that the host gets, and the weights: see `VerificationTable.finish`.

        The weights take q's place, which is needed no more.
        """
        p, q = self.p[:nodes], self.q[:nodes]
        if most and not self.decoder.verify.table[1]:
            rows = torch.arange(nodes, device=self.device)
            self.numbers.reject(p, q, rows, most, bottom_up=False)
        found, weights = self.numbers.finish(p, q, most, self.sent[LAST_DRAWS, :nodes])
        return found, q.copy_(weights)

    def drafted(self, root: int, action: Action) -> tuple[DraftTree, dict[int, int]]:
        """Bring the table to the host; return the tree of its draws, and each node's first row."""
        (parents, *_), widths = layout(action)
        offered, bottom_up = self.decoder.verify.table
        for width, below in pairwise(widths if bottom_up else ()):
            self._run(self.reject, width, below)  # all may be drawn below one row
        most = min(max(widths[1:], default=0), MOST if offered is None else offered)
        found, weights = self._run(self.table, _padded(len(parents)), most)
        lines = found.tolist()
        tree, nodes, row = DraftTree.rooted(root), [0], {0: 0}
        for at in range(1, len(parents)):
            nodes.append(tree.add(nodes[parents[at]], int(lines[at][2])))
            row.setdefault(nodes[at], at)
        tree.nodes = partial(TableNode, lines, weights, tree, row)
        return tree, row

    def _pass(
        self,
        passes: FixedPasses,
        tokens: Tensor,
        at: tuple[Tensor, ...],
        shown: int,
        inputs: dict[str, Tensor] | None = None,
        lag: int = 0,
    ) -> Tensor:
        """Run rows over the first `shown` slots.

        Args:
            passes: the model's.
            tokens: [n].
            at: the slot [1] before which rows see all; of each row [n] its slot and position, and
                the bits of what it sees from there on.
            shown: number of slots.
            inputs: of the rows, besides tokens.
            lag: number of slots that the model is behind the text.
        """
        start, slots, positions = (each - lag for each in at[:3])
        column = torch.arange(shown, device=self.device) - start
        seen = (column < 0) | ((at[3][:, None] >> column.clamp(0, 62)) & 1 == 1)
        mask = torch.where(seen, 0.0, blocked(passes.dtype)).to(passes.dtype)[None, None]
        passes.cache.write_to(slots, shown)
        return passes.forward(tokens[None], positions[None], mask, passes.cache, **inputs or {})[0]


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
    passes, known = tuple(each.passes for each in sessions), decoder.static.steps
    with torch.inference_mode():
        states = features[-1]
        if decoder.layers:
            states = torch.cat([state.h_previous, states])
        hidden = states[:0] if drafter is None else drafter.previous.hidden
        if passes not in known:
            known[passes] = RecordedSteps(passes, state.p_previous, states, hidden)
        steps: RecordedSteps = known[passes]
        steps.states[0], steps.hidden[0], steps.p[0] = states, hidden, state.p_previous
    return steps.steps(decoder, state, rng, sessions, drafter)
