"""The speculative decoding loop: draft a tree, score it in one pass, verify, commit, repeat.

The loop keeps the order of things and the clock; trees, rules and distributions are the policy's,
the drafter's and the verifier's. Whatever they choose, the committed tokens follow the target's
distribution.
"""

import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.common.arguments import Positive, checked
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.device import synchronised
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.generation import Generation, Stream, stop_ids
from nde_talf.decoding.models.base import Model
from nde_talf.decoding.models.tree_session import Shapes, TreeSession
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.rules.check import check_policys_tree
from nde_talf.decoding.sampling.logits_processing import LogitsProcess, Processed
from nde_talf.decoding.sampling.rng import Rng, SamplingSetting
from nde_talf.decoding.sampling.sampling_setting import (
    AUTO,
    MATCH,
    drafted_under,
    read_draft_temperature,
)
from nde_talf.decoding.step import (
    MOST_SLOTS,
    TREE_SLOTS,
    Record,
    Step,
    Stopwatch,
    TokenIds,
    checked_prompt,
    record_of,
)
from nde_talf.decoding.threads import choose_threads
from nde_talf.decoding.tree import WarpedRows
from nde_talf.decoding.verifier import Verifier, check_compatible


@checked
@dataclass(eq=False)
class SpeculativeDecoder:
    """Decodes sequences, each one on its own.

    Streams of one decoder, or of decoders that share a drafter, a policy or models, can be read in
    turn and by several threads: each gives the text that it gives alone from the same rng. Static
    shapes hold one sequence a model; there the stream begun last continues, and reading an earlier
    one raises UserError.

    Raises:
        UserError: models that do not fit each other, or a verifier that is not lossless on the
            policy's trees; while decoding, a tree that is malformed or not of the policy's kind.
    """

    target: Model
    drafter: Drafter | None
    """None for a policy that drafts nothing."""
    policy: TreePolicy
    verifier: Verifier | str
    """A rule, or its name."""
    draft_setting: SamplingSetting | str | float | None = None
    """Warping of the draft: a setting, "match" (the target's), "raw", a temperature, or
    "auto" (None): what fits the policy's trees (`drafted_under`)."""
    static: Shapes | None = None
    """Shapes of the target's passes (`nde_talf.decoding.models.static_shapes.StaticShapes`)."""
    timed: bool = False
    """Wait for the device after every phase, so that each is charged its own work."""
    clock: Callable[[], float] = time.perf_counter
    process: LogitsProcess | None = None
    """Changes logits by the text before them."""
    record: Record = ""
    """Record of the target to keep at every committed token."""

    def __post_init__(self) -> None:
        target, drafter = self.target, self.drafter
        rule = VERIFIERS[self.verifier] if isinstance(self.verifier, str) else self.verifier
        self.verify = rule
        self.layers = () if drafter is None else drafter.feature_layers
        self._check_models()
        check_compatible(self.policy.trees, rule)
        self.draft_setting = setting = self._asked_setting()
        own = None if setting in (AUTO, MATCH) else setting
        self.policy.check_decoder(target, drafter, own)
        if drafter is None and self.policy.trees != "none":
            raise UserError(
                f"drafter=None: the policy drafts '{self.policy.trees}' trees. Give a drafter, or"
                " the policy Autoregressive()."
            )
        self._recorder = None if self.static is None else self.static.recorder(self)
        contexts = [model.max_context for model in (target, drafter) if model is not None]
        self.max_context = min([*contexts, self.static.context] if self.static else contexts)
        self.tick = synchronised(self.clock, target.device) if self.timed else self.clock
        if "OMP_NUM_THREADS" not in os.environ:
            choose_threads(target)

    def _check_models(self) -> None:
        target, drafter = self.target, self.drafter
        if drafter is not None and drafter.vocab_size != target.vocab_size:
            raise UserError(
                f"the drafter's vocabulary has {drafter.vocab_size} tokens and the target's"
                f" {target.vocab_size}: speculative decoding needs the same tokenizer for both. If"
                " they share one and differ in padding alone, call match(target.vocab_size) on the"
                " draft model before its drafter is made."
            )
        model = None if drafter is None else drafter.model
        if model is not None and model.device != target.device:
            raise UserError(
                f"the draft is on {model.device} and the target on {target.device}: load both on"
                " one device."
            )
        if self.static:
            self.static.check_layers(target, self.layers)

    def _asked_setting(self) -> SamplingSetting | str:
        asked = AUTO if self.draft_setting is None else self.draft_setting
        if isinstance(asked, SamplingSetting):
            return asked
        return read_draft_temperature(asked, "draft_setting")

    def generate(
        self,
        prompt: TokenIds,
        max_new_tokens: int,
        setting: SamplingSetting,
        rng: Rng,
        stop_tokens: Collection[int] = (),
    ) -> Generation:
        """Generate `max_new_tokens`, or fewer.

        It ends with the first of `stop_tokens`, or when the shorter context, the target's or the
        draft's, is full.
        """
        stream = self.blocks(prompt, max_new_tokens, setting, rng, stop_tokens)
        for _ in stream:
            pass
        return stream.generation

    @checked
    def blocks(
        self,
        prompt: TokenIds,
        max_new_tokens: Positive,
        setting: SamplingSetting,
        rng: Rng,
        stop_tokens: Any = (),
    ) -> Stream:
        """Generate a block at a time; stop_tokens: ids, or one, that end it.

        Raises UserError for bad input at once, not at the first block.
        """
        tokens = checked_prompt(prompt, self.target.vocab_size, self.max_context)
        stops, slots = stop_ids(stop_tokens), min(max_new_tokens, MOST_SLOTS) + TREE_SLOTS
        steps = self.stream(tokens, setting, rng, len(tokens) + slots, stops)
        return Stream(steps, max_new_tokens, stops, self.target.device)

    @checked
    def stream(
        self,
        prompt: TokenIds,
        setting: SamplingSetting,
        rng: Rng,
        expected: int = 0,
        stops: frozenset[int] = frozenset(),
    ) -> Iterator[Step]:
        """Yield the prefill with the first token, then a step for every later target pass.

        It ends when the context is full. expected: slots of the target's cache made at the start.
        stops: tokens after which `process` is not asked.
        """
        tokens = checked_prompt(prompt, self.target.vocab_size, self.max_context)
        watch = Stopwatch(self.tick)
        session = self.target.session(self.layers, self.static)
        session.reset(min(expected, self.max_context + TREE_SLOTS))
        drafter = None if self.drafter is None else self.drafter.fork()
        self.drafting = drafter  # of the sequence begun last
        with torch.inference_mode():
            state, logged, last = self._prefill(tokens, setting, rng, session, drafter, stops)
            step = self._step
            if self._recorder is not None:
                step = self._recorder(state, session, drafter, last)
        watch.charge("other")
        yield Step([state.root], 1, watch.seconds, logged)
        while state.room >= 0:
            with torch.inference_mode():
                done, state = step(state, rng, session, drafter)
            yield done

    def _prefill(
        self,
        prompt: list[int],
        setting: SamplingSetting,
        rng: Rng,
        session: TreeSession,
        drafter: Drafter | None,
        stops: frozenset[int],
    ) -> tuple[DecodingState, list[Any], Tensor]:
        """Run the prompt, sample the first root, and begin the draft.

        Returns the state, the record and the target's states [W] at the prompt's end.
        """
        states = session.append(prompt)
        hidden, features = self.target.parts(states, self.layers)
        raw = logits = self.target.logits(hidden[-1:])
        processed = None
        if self.process is not None:
            processed = Processed(self.process, [*prompt], stops, len(prompt))
            logits = processed([prompt], raw)
        rows = WarpedRows(logits, setting)
        token = rng.categorical(rows[0])
        if processed is not None:
            processed.text.append(token)
        if drafter is not None:
            drafter.processed = None if processed is None else processed.for_draft()
            asked: Any = self.draft_setting
            drafter.start(prompt, token, features, drafted_under(asked, setting, self.policy.trees))
        context = len(prompt) + 1
        room = self.max_context - context
        state = DecodingState(token, context, room, setting, rows.seen(0), hidden[-1])
        state.processed = processed
        return state, record_of(raw, [token], self.record), states[-1]

    def _step(
        self, state: DecodingState, rng: Rng, session: TreeSession, drafter: Drafter | None
    ) -> tuple[Step, DecodingState]:
        watch = Stopwatch(self.tick)
        tree = self.policy.draft(state, drafter, rng)
        check_policys_tree(self.policy, tree, state, self.target.vocab_size)
        watch.charge("draft", policy=self.policy.seconds)

        states = session.grow(tree.tokens, tree.parents)
        hidden, features = self.target.parts(states, self.layers)
        raw = logits = self.target.logits(hidden)
        processed = state.processed
        if processed is not None:
            logits = processed(processed.texts(tree, range(len(tree))), raw)
        rows = tree.score(logits, state.setting)
        watch.charge("target")

        end, token = self.verify(tree, rng)
        accepted = tree.commit(end, token)
        if processed is not None:
            processed.text += accepted.tokens
        session.commit([0, *accepted.path])
        watch.charge("verify")

        tokens = accepted.tokens
        state = state.after(tokens, rows.seen(end), hidden[end])
        if drafter is not None and state.room >= 0:  # else the new root has no position left
            of_path = accepted.of(features) if drafter.takes_features else features
            drafter.advance(accepted, of_path)
            watch.charge("draft")
        logged = record_of(accepted.of(raw) if self.record else raw, tokens, self.record)
        watch.charge("other")
        return Step(tokens, len(tree), watch.seconds, logged), state
