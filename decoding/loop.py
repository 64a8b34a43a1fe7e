"""The speculative decoding loop: draft a tree, score it with the target in one pass, verify,
commit, repeat.

It knows the order of things and the clock; trees, rules and distributions are the policy's, the
drafter's and the verifier's. Whatever those choose, the committed tokens follow the target's
distribution.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from nde_talf.decoding.captured import Captures
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.device import asynchronous
from nde_talf.decoding.device_tree import DeviceAccepted, DeviceTree
from nde_talf.decoding.drafter import Drafter
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.base import Chooser, DecodingState, Outlook, TreePolicy
from nde_talf.decoding.processing import LogitsProcess, Processed
from nde_talf.decoding.prompt import TokenIds, token_ids
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.rules.check import check_drafted, check_draws
from nde_talf.decoding.sampling import Rng, SamplingSetting, warp
from nde_talf.decoding.session import TreeSession
from nde_talf.decoding.setting import (
    AUTO,
    MATCH,
    drafted_under,
    feature_setting,
    read_draft_temperature,
)
from nde_talf.decoding.static import CudaGraphs, StaticShapes, unrecorded
from nde_talf.decoding.stats import (
    PHASES,
    First,
    Generation,
    Record,
    Step,
    Stopwatch,
    peak_bytes,
    record_of,
)
from nde_talf.decoding.tree import Accepted, DraftTree
from nde_talf.decoding.verifier import Verifier, check_compatible

__all__ = ["PHASES", "Block", "Generation", "SpeculativeDecoder", "Step", "Stream"]
_TREE = 64  # slots for a tree in flight, after the tokens asked for


@dataclass
class Block:
    """Tokens committed at once: the first `accepted` were drafted, the rest is the target's own."""

    tokens: list[int]
    accepted: int


@dataclass
class Stream:
    """Iterate for the blocks of a generation, which `generation` holds as far as it has come.

    Each stream has its own cache and its own fork of the drafter, so that several can be read in
    turn; see `SpeculativeDecoder`.
    """

    blocks: Iterator[Block]
    generation: Generation

    def __iter__(self) -> Iterator[Block]:
        return self.blocks


class SpeculativeDecoder:
    """Decodes sequences, each one on its own.

    Streams of one decoder, or of decoders that share a drafter, a policy or models, can be read in
    turn and by several threads: each gives the text that it gives alone from the same rng. Static
    shapes hold one sequence a model; there the stream begun last goes on, and reading an earlier
    one raises UserError. `session` is that of the sequence begun last, `drafting` its fork of the
    drafter.

    drafter may be None for a policy that drafts nothing. verifier: a rule, or the name of one.
    draft_setting: what the draft's distributions are warped with: a setting, "match" (the
    target's), "raw" (temperature 1, top-p 1), a temperature, or "auto" (None), which is what fits
    the policy's trees (`nde_talf.decoding.setting.drafted_under`). A policy with an attribute
    draft_setting, as a trained selector has, gets that in place of "auto" (None there: the
    target's). The output's law is the target's with any. static: the target's passes are of these
    shapes (a drafter has its own). timed: wait for the device at the end of every phase, so that
    each is charged its own work; otherwise what a GPU has not done yet is charged to the phase that
    needs its numbers, verification. device: leave drafted tokens on the device until the end of the
    step, as far as policy and verifier can (None: on a device that works asynchronously). clock:
    returns seconds; what phases are timed with. process: changes logits by the text before them;
    the output's law is the target's so processed, a drafter that is a model is processed alike, and
    where texts count trees are drafted on the host. record: what to note of the target at every
    committed token, see `nde_talf.decoding.stats.Record`. A policy with a method
    check_decoder(target, drafter, draft_setting) is asked whether it fits. Raises UserError for
    models that do not fit each other, or a verifier that is not lossless on the policy's trees;
    while decoding, for a tree that is malformed or not of the policy's kind.
    """

    def __init__(
        self,
        target: CausalModel,
        drafter: Drafter | None,
        policy: TreePolicy,
        verifier: Verifier | str,
        draft_setting: SamplingSetting | str | float | None = None,
        static: StaticShapes | None = None,
        timed: bool = False,
        device: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
        process: LogitsProcess | None = None,
        record: Record = "",
    ):
        if drafter is not None and drafter.vocab_size != target.vocab_size:
            raise UserError(
                f"the drafter's vocabulary has {drafter.vocab_size} tokens and the target's"
                f" {target.vocab_size}: speculative decoding needs the same tokenizer for both. If"
                " they share one and differ in padding alone, call match(target.vocab_size) on the"
                " draft model first."
            )
        verifier = VERIFIERS[verifier] if isinstance(verifier, str) else verifier
        self.kind = policy.trees
        check_compatible(self.kind, verifier)
        self.target, self.drafter, self.policy, self.verify = target, drafter, policy, verifier
        wanted = AUTO if draft_setting is None else draft_setting
        if not isinstance(wanted, SamplingSetting):
            wanted = read_draft_temperature(wanted, "draft_setting")
        self.draft_setting = (policy.draft_setting or MATCH) if wanted == AUTO else wanted
        policy.check_decoder(
            target, drafter, None if self.draft_setting == MATCH else self.draft_setting
        )
        self._layers: tuple[int, ...] = () if drafter is None else drafter.feature_layers
        if static is not None and self._layers and target.native is None:
            raise UserError(
                "static shapes: the drafter takes features of the target's layers"
                f" {', '.join(map(str, self._layers))}, which hooks collect outside a graph. Switch"
                " static shapes off, or use a head with draft.features=final."
            )
        self._features: bool = drafter is not None and drafter.takes_features
        reader = target.reader(self._layers)
        self._new_session = partial(
            TreeSession, reader, target.device, target.dtype, target.layers, static
        )
        self.session, self.drafting = self._new_session(), drafter
        contexts = [model.max_context for model in (target, drafter) if model is not None]
        self.max_context = min([*contexts, static.context] if static else contexts)
        self.timed, self.clock, self.process, self.record = timed, clock, process, record
        self._clock = self._clock_of_device if timed and target.device.type == "cuda" else clock
        on_device = asynchronous(target.device) if device is None else device
        fits = drafter is None or drafter.on_device
        fits &= process is None or process.textless
        self.device = on_device and verifier.on_device is not None and fits
        self._asks = policy if self.device and isinstance(policy, Chooser) else None
        self._captures: Captures | None = None
        shapes = [action for action in policy.shapes if static and action.nodes <= static.rows]
        if static and self.device and shapes and hasattr(drafter, "distribution"):
            recorder = static.record or (
                CudaGraphs() if target.device.type == "cuda" else unrecorded
            )
            rules = getattr(policy, "rules", ()) if verifier.of_tree else [verifier]
            self._captures = Captures(shapes, static.size, rules, recorder)

    def generate(
        self,
        prompt: TokenIds,
        max_new_tokens: int,
        setting: SamplingSetting,
        rng: Rng,
        stop_tokens: Collection[int] = (),
    ) -> Generation:
        """Generate `max_new_tokens`, or less: up to and with the first of `stop_tokens`, or until
        the context is full.
        """
        stream = self.blocks(prompt, max_new_tokens, setting, rng, stop_tokens)
        for _ in stream:
            pass
        return stream.generation

    def blocks(
        self,
        prompt: TokenIds,
        max_new_tokens: int,
        setting: SamplingSetting,
        rng: Rng,
        stop_tokens: Collection[int] = (),
    ) -> Stream:
        """The same, a block at a time.

        Raises UserError for bad input at once, not at the first block.
        """
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens={max_new_tokens}: it must be at least 1.")
        prompt = self._checked(prompt)
        generation = Generation()
        steps = self.stream(prompt, setting, rng, len(prompt) + max_new_tokens + _TREE)
        return Stream(
            self._cut(steps, max_new_tokens, frozenset(stop_tokens), generation), generation
        )

    def _cut(
        self,
        steps: Iterator[First | Step],
        max_new_tokens: int,
        stop_tokens: frozenset[int],
        generation: Generation,
    ) -> Iterator[Block]:
        if self.target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.target.device)
        try:
            for step in steps:
                if isinstance(step, Step):
                    generation.steps.append(step)
                    tokens, accepted = step.tokens, step.tau
                else:
                    tokens, accepted, generation.prefill_seconds = [step.token], 0, step.seconds
                    generation.peak_bytes = peak_bytes(self.target.device)
                generation.recorded += step.recorded
                tokens = tokens[: max_new_tokens - len(generation.tokens)]
                stops = [index for index, token in enumerate(tokens) if token in stop_tokens]
                tokens = tokens[: stops[0] + 1] if stops else tokens
                generation.tokens += tokens
                yield Block(tokens, min(accepted, len(tokens)))
                if stops or len(generation.tokens) == max_new_tokens:
                    return
        finally:  # asking takes as long as a small pass of a model
            generation.peak_bytes = peak_bytes(self.target.device)

    def stream(
        self, prompt: TokenIds, setting: SamplingSetting, rng: Rng, expected: int = 0
    ) -> Iterator[First | Step]:
        """The `First` token, of the prefill, then a `Step` for every target pass until the context
        is full, however much that is. expected: slots of the target's cache made at the start.
        """
        prompt = self._checked(prompt)
        without_gradients, watch = torch.inference_mode(), Stopwatch(self._clock)
        self.session = session = self._new_session()
        drafter = cast(
            "Drafter", None if self.drafter is None else self.drafter.fork()
        )  # None where nothing is drafted
        self.drafting = drafter
        session.reset(min(expected, self.max_context + _TREE))
        with without_gradients:
            state, recorded = self._prefill(prompt, setting, rng, session, drafter)
        watch.charge("other")
        yield First(state.root, watch.seconds["other"], recorded)
        while state.room >= 0:
            with without_gradients:
                step, state = self._step(state, rng, session, drafter)
            yield step

    def _prefill(
        self,
        prompt: list[int],
        setting: SamplingSetting,
        rng: Rng,
        session: TreeSession,
        drafter: Drafter,
    ) -> tuple[DecodingState, list[Any]]:
        hidden, features = self.target.parts(session.append(prompt), self._layers)
        logits = raw = self.target.logits(hidden[-1])
        processed = None if self.process is None else Processed(self.process, [*prompt])
        if processed is not None:
            logits = processed([prompt], raw[None])[0]
        p_previous = warp(logits, setting)
        token = rng.categorical(p_previous)
        if processed is not None:
            processed.append([token])
            if drafter is not None:
                drafter.processed = Processed(processed.process, processed.text)
        if feature_setting(setting) != setting:
            p_previous = warp(logits, feature_setting(setting))
        if drafter is not None:
            drafter.start(
                prompt, token, features, drafted_under(self.draft_setting, setting, self.kind)
            )
        context = len(prompt) + 1
        state = DecodingState(
            token,
            context,
            self.max_context - context,
            setting,
            p_previous,
            hidden[-1],
            device=self.device,
        )
        state.processed = processed
        if self._captures and processed is None and hasattr(rng, "uniforms"):
            self._captures.begin(drafter, setting, logits)
            state.captures = self._captures
        if self._asks is not None:
            choice = self._asks.choice(Outlook(context, setting, p_previous, hidden[-1]), drafter)
            state.choice = None if choice is None else int(choice)
        return state, record_of(raw[None], [token], self.record)

    def _step(
        self, state: DecodingState, rng: Rng, session: TreeSession, drafter: Drafter
    ) -> tuple[Step, DecodingState]:
        watch, room, setting, processed = (
            Stopwatch(self._clock),
            state.room,
            state.setting,
            state.processed,
        )
        tree = self.policy.draft(state, drafter, rng)
        if not tree.on_device:
            self._check_tree(tree, state)
        watch.charge("draft", policy=self.policy.seconds)
        hidden, features = self.target.parts(session.grow(tree.tokens, tree.topology), self._layers)
        raw, choice = self.target.logits(hidden), None
        logits = (
            raw if processed is None else processed(processed.texts(tree, range(len(tree))), raw)
        )
        watch.charge("target")
        accepted: Accepted | DeviceAccepted | None = None
        if state.captures:
            rule = tree.rule if self.verify.of_tree and tree.rule else self.verify
            accepted = state.captures.verified(tree, logits, rule, rng)
        if accepted is None:
            tree.score(logits, setting)
            accepted = tree.commit(*self.verify(tree, rng))
        watch.charge("verify")
        if processed is not None:
            processed.append(accepted.tokens)
        ahead, last = accepted.within(room), accepted.last(hidden)
        if drafter is not None and ahead is not None:
            drafter.advance(ahead, ahead.of(features) if self._features else features)
            watch.charge("draft")
            if self._asks is not None:
                outlook = Outlook(accepted.root + (state.context + 1), setting, *last)
                choice = self._asks.choice(outlook, drafter)
                watch.charge("policy")
        step = accepted.read(choice)  # on a device, the one wait of the step
        if step.tokens[-1] < 0:
            raise self._no_token(tree, rng)
        session.commit(step.rows)
        watch.charge("verify")
        count = len(step.tokens)
        room -= count
        if drafter is not None and room >= 0:  # else the new root has no position left
            drafter.commit(count)
            watch.charge("draft")
        context = state.context + count
        then = DecodingState(
            *(step.tokens[-1], context, room, setting, *last, count - 1, self.device, step.choice),
            state.captures,
            state.memory,
        )
        then.processed = processed
        recorded = (
            record_of(accepted.of(raw)[:count], step.tokens, self.record) if self.record else []
        )
        watch.charge("other")
        return Step(step.tokens, step.nodes, watch.seconds, recorded), then

    def _no_token(self, tree: DraftTree | DeviceTree, rng: Rng) -> Exception:
        """Why the rule found no token on the device.

        The rule on the host says it better, where it fails too.
        """
        if isinstance(tree, DeviceTree) and len(tree.p):
            self.verify(tree.to_host(), rng)
        return ValueError(
            "weights: a distribution of the target or the draft has no positive, finite sum."
        )

    def _check_tree(self, tree: DraftTree, state: DecodingState) -> None:
        """Raise UserError for a tree that the policy should not have drafted.

        Of a sequence's first tree the distributions are looked at too.
        """
        kind, vocabulary = self.kind, self.target.vocab_size
        try:
            check_drafted(tree, kind, state.root, state.room, vocabulary)
            if state.tau is None:
                check_draws(tree, vocabulary, drawn=kind != "top_k")
        except ValueError as error:
            raise UserError(
                f"policy {type(self.policy).__name__} drafted a tree of kind '{kind}' that no"
                f" verifier can take: {error} See docs/write_a_policy.md."
            ) from error

    def _clock_of_device(self) -> float:
        """Seconds, once the device has done what was asked."""
        torch.cuda.synchronize(self.target.device)
        return self.clock()

    def _checked(self, prompt: TokenIds) -> list[int]:
        """A prompt's token ids. Raises UserError if the models cannot decode after them."""
        prompt = token_ids(prompt)
        if not prompt:
            raise UserError("prompt: it is empty; give at least one token.")
        if len(prompt) >= self.max_context:
            raise UserError(
                f"prompt: it has {len(prompt)} tokens, but the context of the models (or of their"
                f" static shapes) holds {self.max_context}: shorten the prompt or use a longer"
                " context."
            )
        outside = [token for token in prompt if not 0 <= token < self.target.vocab_size]
        if outside:
            raise UserError(
                f"prompt: token {outside[0]} lies outside the vocabulary of"
                f" {self.target.vocab_size}: it was encoded with another tokenizer."
            )
        return prompt
