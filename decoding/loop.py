"""The speculative decoding loop: draft a tree, score it with the target in one pass, verify, commit, repeat.

It knows the order of things and the clock; trees, rules and distributions are the policy's, the drafter's and the
verifier's. Whatever those choose, the committed tokens follow the target's distribution.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from decoding.drafter import Drafter
from decoding.errors import UserError
from decoding.model import CausalModel
from decoding.policies.base import DecodingState, TreePolicy
from decoding.sampling import Coins, SamplingSetting, warp
from decoding.session import TreeSession
from decoding.tree import WarpedRows
from decoding.verification import Verifier, check_compatible

PHASES = ("draft", "target", "verify", "policy")


@dataclass
class Step:
    """One target pass: the tokens it committed (tau accepted + 1), its tree's nodes with the root, seconds a phase."""

    tokens: list[int]
    nodes: int
    seconds: dict[str, float]

    @property
    def tau(self) -> int:
        return len(self.tokens) - 1


@dataclass
class Generation:
    """Generated token ids (prompt excluded), and how they came about.

    prefill_seconds: until the first token, which the prefill gives; steps: everything after.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    prefill_seconds: float = 0.0

    @property
    def block_efficiency(self) -> float:
        """Mean tau + 1 over the steps."""
        return sum(len(step.tokens) for step in self.steps) / max(1, len(self.steps))

    @property
    def decode_seconds(self) -> float:
        return sum(sum(step.seconds.values()) for step in self.steps)

    @property
    def decoded(self) -> int:
        """Tokens committed by the steps (the prefill's one not counted)."""
        return sum(len(step.tokens) for step in self.steps)


class SpeculativeDecoder:
    """Decodes one sequence at a time.

    drafter may be None for a policy that drafts nothing. draft_setting: what the draft's distributions are warped with
    (None: like the target's). Raises UserError for models that do not fit each other, or a verifier that is not lossless
    on the policy's trees.
    """

    def __init__(
        self,
        target: CausalModel,
        drafter: Drafter | None,
        policy: TreePolicy,
        verifier: Verifier,
        draft_setting: SamplingSetting | None = None,
    ):
        if drafter is not None and drafter.vocab_size != target.vocab_size:
            raise UserError(
                f"the drafter's vocabulary has {drafter.vocab_size} tokens and the target's {target.vocab_size}: "
                "speculative decoding needs the same tokenizer for both."
            )
        check_compatible(policy.trees, verifier)
        self.target, self.drafter, self.policy, self.verify = target, drafter, policy, verifier
        self.draft_setting = draft_setting
        self.session = TreeSession(target.hidden, target.device, target.dtype)
        self.max_context = min(target.max_context, drafter.max_context if drafter else target.max_context)

    def generate(
        self,
        prompt: list[int],
        max_new_tokens: int,
        setting: SamplingSetting,
        coins: Coins,
        stop_token: int | None = None,
    ) -> Generation:
        """Generate up to `max_new_tokens`, or to `stop_token` (kept), or until the context is full."""
        generation = Generation()
        for step in self.stream(prompt, setting, coins):
            if isinstance(step, Step):
                generation.steps.append(step)
                generation.tokens += step.tokens
            else:
                token, generation.prefill_seconds = step
                generation.tokens.append(token)
            if stop_token is not None and stop_token in generation.tokens:
                del generation.tokens[generation.tokens.index(stop_token) + 1 :]
                break
            if len(generation.tokens) >= max_new_tokens:
                break
        del generation.tokens[max_new_tokens:]
        return generation

    @torch.inference_mode()
    def stream(self, prompt: list[int], setting: SamplingSetting, coins: Coins) -> Iterator[tuple[int, float] | Step]:
        """First (token, seconds) of the prefill, then a `Step` for every target pass until the context is full."""
        self._check_prompt(prompt)
        clock = self._clock
        started = clock()
        self.session.reset()
        features = self.session.append(prompt)
        p_previous = warp(self.target.logits(features[-1]), setting)
        token = coins.draw(p_previous)
        if self.drafter is not None:
            self.drafter.start(prompt, token, features, self.draft_setting or setting)
        state = DecodingState(token, len(prompt) + 1, 0, setting, p_previous, features[-1])
        yield token, clock() - started

        while (room := self.max_context - state.context) >= 0:
            state.room = room
            t0 = clock()
            tree = self.policy.draft(state, self.drafter, coins)
            t1 = clock()
            features = self.session.grow(tree.tokens, tree.parents)
            tree.p = WarpedRows(self.target.logits(features), setting)
            t2 = clock()
            path, token = self.verify(tree, coins)
            accepted = [0, *path]
            self.session.keep(accepted)
            last = accepted[-1]
            t3 = clock()
            if self.drafter is not None:
                self.drafter.advance(tree, path, token, features[accepted])
            t4 = clock()
            choosing = getattr(self.policy, "seconds", 0.0)
            seconds = {
                "draft": t1 - t0 - choosing + t4 - t3,
                "target": t2 - t1,
                "verify": t3 - t2,
                "policy": choosing,
            }
            tokens = [*(tree.tokens[node] for node in path), token]
            state = DecodingState(token, state.context + len(tokens), 0, setting, tree.p[last], features[last], len(path))
            yield Step(tokens, len(tree), seconds)

    def _clock(self) -> float:
        """Seconds; on a GPU only once it has done what was asked, so that a phase is charged its own work."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise UserError("prompt: it is empty; give at least one token.")
        if len(prompt) >= self.max_context:
            raise UserError(
                f"prompt: it has {len(prompt)} tokens, but the context of the models holds {self.max_context}: shorten "
                "the prompt or use models with a longer context."
            )
        if max(prompt) >= self.target.vocab_size or min(prompt) < 0:
            raise UserError(
                f"prompt: token {max(prompt)} lies outside the vocabulary of {self.target.vocab_size}: it was encoded "
                "with another tokenizer."
            )
