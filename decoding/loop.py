"""The speculative decoding loop: draft a tree, score it with the target in one pass, verify, commit, repeat.

It knows the order of things and the clock; trees, rules and distributions are the policy's, the drafter's and the
verifier's. Whatever those choose, the committed tokens follow the target's distribution.
"""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from decoding.common.errors import UserError
from decoding.device import asynchronous, upload
from decoding.drafter import Drafter
from decoding.model import CausalModel
from decoding.policies.base import Chooser, DecodingState, Outlook, TreePolicy
from decoding.ranked import RankedTree
from decoding.sampling import Rng, SamplingSetting, warp
from decoding.static import StaticShapes, session
from decoding.stats import PHASES, Generation, Step, Stopwatch, peak_bytes
from decoding.tree import DraftTree, Verdict, WarpedRows
from decoding.turns import own
from decoding.unread import UnreadTree
from decoding.verification import Verifier, check_compatible
from decoding.verification import verifier as rule_called
from decoding.verification.check import check_drafted, check_draws

__all__ = ["PHASES", "Block", "Generation", "SpeculativeDecoder", "Step", "Stream"]
_TREE = 64  # slots for a tree in flight, behind the tokens asked for


@dataclass
class Block:
    """Tokens committed at once: the first `accepted` were drafted, the rest is the target's own."""

    tokens: list[int]
    accepted: int


@dataclass
class Stream:
    """Iterate for the blocks of a generation, which `generation` holds as far as it has come. Each stream has its own cache and
    its own place in the drafter, so that several can be read in turn; see `SpeculativeDecoder`."""

    blocks: Iterator[Block]
    generation: Generation = field(default_factory=Generation)

    def __iter__(self) -> Iterator[Block]:
        return self.blocks


class SpeculativeDecoder:
    """Decodes sequences, each one on its own.

    Streams of one decoder, or of decoders that share a drafter, a policy or models, can be read in turn and by several threads:
    each gives the text that it gives alone from the same rng. Static shapes hold one sequence a model; there the stream begun
    last goes on, and reading an earlier one raises UserError. `session` is that of the sequence begun last, `drafting` its fork
    of the drafter.

    drafter may be None for a policy that drafts nothing. verifier: a rule, or the name of one. draft_setting: what the draft's
    distributions are warped with (None: like the target's). static: the target's passes are of these shapes (the drafter's are
    its own affair). timed: wait for the device at the end of every phase, so that each is charged its own work; otherwise what
    a GPU has not done yet is charged to the phase that needs its numbers, verification. unread: leave drafted tokens on the
    device until the end of the step, as far as policy and verifier can (None: on a device that works asynchronously). Raises
    UserError for models that do not fit each other, or a verifier that is not lossless on the policy's trees; while decoding,
    for a tree that is malformed or not of the policy's kind.
    """

    def __init__(
        self,
        target: CausalModel,
        drafter: Drafter | None,
        policy: TreePolicy,
        verifier: Verifier | str,
        draft_setting: SamplingSetting | None = None,
        static: StaticShapes | None = None,
        timed: bool = False,
        unread: bool | None = None,
    ):
        if drafter is not None and drafter.vocab_size != target.vocab_size:
            raise UserError(
                f"the drafter's vocabulary has {drafter.vocab_size} tokens and the target's {target.vocab_size}: "
                "speculative decoding needs the same tokenizer for both."
            )
        verifier = rule_called(verifier) if isinstance(verifier, str) else verifier
        check_compatible(policy.trees, verifier)
        self.target, self.drafter, self.policy, self.verify = target, drafter, policy, verifier
        self.draft_setting = draft_setting
        self._layers: tuple[int, ...] = getattr(drafter, "feature_layers", ())
        if static is not None and self._layers:
            raise UserError(
                f"static shapes: the drafter takes features of the target's layers {', '.join(map(str, self._layers))}, which "
                "hooks collect outside a graph. Switch static shapes off, or use a head with draft.features=final."
            )
        reader = target.reader(self._layers)
        self._new_session = partial(session, reader, target.device, target.dtype, target.layers, static)
        self.session, self.drafting = self._new_session(), drafter
        contexts = [model.max_context for model in (target, drafter) if model is not None]
        self.max_context = min([*contexts, static.context] if static else contexts)
        self.timed = timed
        self.unread = (asynchronous(target.device) if unread is None else unread) and verifier.on_device is not None

    def generate(
        self,
        prompt: list[int],
        max_new_tokens: int,
        setting: SamplingSetting,
        rng: Rng,
        stop_tokens: Collection[int] = (),
    ) -> Generation:
        """Generate `max_new_tokens`, or less: up to the first of `stop_tokens` (kept), or until the context is full."""
        stream = self.blocks(prompt, max_new_tokens, setting, rng, stop_tokens)
        for _ in stream:
            pass
        return stream.generation

    def blocks(
        self,
        prompt: list[int],
        max_new_tokens: int,
        setting: SamplingSetting,
        rng: Rng,
        stop_tokens: Collection[int] = (),
    ) -> Stream:
        """The same, a block at a time. Raises UserError for bad input at once, not at the first block."""
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens={max_new_tokens}: it must be at least 1.")
        self._check_prompt(prompt)
        stream = Stream(iter(()))
        stream.blocks = self._cut(prompt, max_new_tokens, setting, rng, frozenset(stop_tokens), stream.generation)
        return stream

    def _cut(
        self,
        prompt: list[int],
        max_new_tokens: int,
        setting: SamplingSetting,
        rng: Rng,
        stop_tokens: frozenset[int],
        generation: Generation,
    ) -> Iterator[Block]:
        if self.target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.target.device)
        for step in self.stream(prompt, setting, rng, len(prompt) + max_new_tokens + _TREE):
            if isinstance(step, Step):
                generation.steps.append(step)
                tokens, accepted = step.tokens, step.tau
            else:
                tokens, accepted, generation.prefill_seconds = [step[0]], 0, step[1]
            tokens = tokens[: max_new_tokens - len(generation.tokens)]
            stops = [index for index, token in enumerate(tokens) if token in stop_tokens]
            tokens = tokens[: stops[0] + 1] if stops else tokens
            generation.tokens += tokens
            generation.peak_bytes = peak_bytes(self.target.device)
            yield Block(tokens, min(accepted, len(tokens)))
            if stops or len(generation.tokens) == max_new_tokens:
                return

    @torch.inference_mode()
    def stream(
        self, prompt: list[int], setting: SamplingSetting, rng: Rng, expected: int = 0
    ) -> Iterator[tuple[int, float] | Step]:
        """First (token, seconds) of the prefill, then a `Step` for every target pass until the context is full, however much
        that is. expected: slots of the target's cache made at the start."""
        self._check_prompt(prompt)
        watch = Stopwatch(self._clock)
        self.session = session = self._new_session()
        self.drafting = drafter = None if self.drafter is None else own(self.drafter)
        session.reset(min(expected, self.max_context + _TREE))
        hidden, features = self.target.parts(session.append(prompt), self._layers)
        p_previous = warp(self.target.logits(hidden[-1]), setting)
        token = rng.categorical(p_previous)
        if drafter is not None:
            drafter.start(prompt, token, features, self.draft_setting or setting)
        state = DecodingState(token, len(prompt) + 1, 0, setting, p_previous, hidden[-1])
        if self.unread:
            context = upload(torch.tensor([state.context]), hidden.device)
            choice = self._choice(Outlook(context, setting, p_previous, hidden[-1]), drafter)
            state.choice = None if choice is None else int(choice)
        watch.charge("other")
        yield token, watch.seconds["other"]

        while (room := self.max_context - state.context) >= 0:
            watch = Stopwatch(self._clock)
            state.room, state.unread = room, self.unread
            tree = self.policy.draft(state, drafter, rng)
            unread, choice = isinstance(tree, UnreadTree | RankedTree), None
            if not unread:
                self._check_tree(tree, state)
            watch.charge("draft", policy=getattr(self.policy, "seconds", 0.0))
            above = tree.sees if isinstance(tree, RankedTree) else tree.parents
            hidden, features = self.target.parts(session.grow(tree.tokens, above), self._layers)
            logits = self.target.logits(hidden)
            watch.charge("target")
            if unread:
                tree.p = warp(logits, setting)
                tree, rows, (end, token), choice = self._read(tree, hidden, features, state, drafter, rng, watch)
                path = tree.way(end)
            else:
                tree.p, rows = WarpedRows(logits, setting), range(len(tree))
                end, token = self.verify(tree, rng)
                path = tree.way(end)
            accepted = [rows[node] for node in (0, *path)]
            session.keep(accepted)
            watch.charge("verify")
            tokens = [*(tree.tokens[node] for node in path), token]
            context = state.context + len(tokens)
            if drafter is not None and context <= self.max_context:  # else the new root has no position left
                if unread:
                    drafter.settle(len(tokens))
                else:
                    drafter.advance(tree, path, token, _rows(features, accepted))
            watch.charge("draft")
            p_previous, h_previous = tree.p[path[-1] if path else 0], hidden[accepted[-1]]
            state = DecodingState(
                token, context, 0, setting, p_previous, h_previous, len(path), choice=choice, memory=state.memory
            )
            watch.charge("other")
            yield Step(tokens, len(tree), watch.seconds)

    def _read(
        self,
        tree: UnreadTree | RankedTree,
        hidden: Tensor,
        features: Tensor,
        state: DecodingState,
        drafter: Drafter,
        rng: Rng,
        watch: Stopwatch,
    ) -> tuple[DraftTree, list[int], Verdict, int | None]:
        """Verify, let the drafter go on and the policy choose, and only then read; see `UnreadTree.read`. hidden, features:
        [N, ...] of the target at the tree's nodes."""
        end, token = self.verify(tree, rng)
        choice = None
        watch.charge("verify")
        # Not beyond the context: where all of so deep a tree is accepted, nothing comes behind.
        if most := min(len(tree.levels), state.room):
            nodes, tokens, root = tree.committed(end, token)
            drafter.advance_unread(tokens[:most], root.clamp(max=most - 1), features.index_select(0, nodes[:most]))
            watch.charge("draft")
            p_previous, h_previous = (rows.index_select(0, end)[0] for rows in (tree.p, hidden))
            choice = self._choice(Outlook(root + (state.context + 1), state.setting, p_previous, h_previous), drafter)
            watch.charge("policy")
        read, rows, verdict, choice = tree.read(end, token, choice)
        if verdict.token < 0:
            self.verify(read, rng)  # which says what is wrong
            raise ValueError("weights: a distribution of the target or the draft has no positive, finite sum.")
        return read, rows, verdict, choice

    def _choice(self, outlook: Outlook, drafter: Drafter | None) -> Tensor | None:
        return self.policy.choice(outlook, drafter) if isinstance(self.policy, Chooser) else None

    def _check_tree(self, tree: DraftTree, state: DecodingState) -> None:
        """Raise UserError for a tree that the policy should not have drafted. Of a sequence's first tree the distributions are
        looked at too."""
        kind, vocabulary = self.policy.trees, self.target.vocab_size
        try:
            check_drafted(tree, kind, state.root, state.room, vocabulary)
            if state.tau is None:
                check_draws(tree, vocabulary, drawn=kind != "chosen")
        except ValueError as error:
            raise UserError(
                f"policy {type(self.policy).__name__} drafted a tree of kind '{kind}' that no verifier can take: {error} See "
                "'A policy of your own' in docs/decoding.md."
            ) from error

    def _clock(self) -> float:
        """Seconds; where phases are `timed`, once the device has done what was asked."""
        if self.timed and self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise UserError("prompt: it is empty; give at least one token.")
        if len(prompt) >= self.max_context:
            raise UserError(
                f"prompt: it has {len(prompt)} tokens, but the context of the models (or of their static shapes) holds "
                f"{self.max_context}: shorten the prompt or use a longer context."
            )
        outside = [token for token in prompt if not 0 <= token < self.target.vocab_size]
        if outside:
            raise UserError(
                f"prompt: token {outside[0]} lies outside the vocabulary of {self.target.vocab_size}: it was encoded with "
                "another tokenizer."
            )


def _rows(states: Tensor, rows: list[int]) -> Tensor:
    """states[rows]: a view where they are the first ones."""
    if rows == list(range(len(rows))):
        return states[: len(rows)]
    return states.index_select(0, upload(torch.tensor(rows), states.device))
