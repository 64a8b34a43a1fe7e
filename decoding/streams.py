"""Steps and generations: a prompt goes into the loop, blocks of tokens come out."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, cast

import numpy as np
import torch
from pydantic import PlainValidator
from torch import Tensor

from nde_talf.decoding.common.errors import UserError

if TYPE_CHECKING:
    from nde_talf.decoding.stats import Stats

TREE_SLOTS = 64
"""Slots for a tree in flight, after the tokens asked for."""
# Of a step: drafting (the drafter catching up included), the target's pass, verification with the
# clean-up of its cache, the policy's own choosing; what is left is "other". On a GPU they are the
# host's, unless the decoder is `timed`.
PHASES = ("draft", "target", "verify", "policy")


class Stopwatch:
    """seconds: by phase, as far as they were charged. clock: returns the time in seconds."""

    def __init__(self, clock: Callable[[], float]):
        self.clock, self.last = clock, clock()
        self.seconds = dict.fromkeys((*PHASES, "other"), 0.0)

    def charge(self, phase: str, policy: float = 0.0) -> None:
        """Add to `phase` the time since the last charge, less what the `policy` took of it."""
        now = self.clock()
        self.seconds[phase] += now - self.last - policy
        self.seconds["policy"] += policy
        self.last = now


Record = Literal["", "logprobs", "logits"]
"""What is noted of the target at every committed token: nothing, the token's log-probability under
the model (neither processed nor warped, as vLLM's raw_logprobs), or the full row of logits [V].
"""


def record_of(logits: Tensor, tokens: list[int], record: Record) -> list[Any]:
    """The entries of `tokens`, whose rows are `logits` [len(tokens), V]."""
    if record == "logprobs":
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return wide.log_softmax(-1)[range(len(tokens)), tokens].tolist()
    return list(logits.clone()) if record else []  # a view would hold the rows of the full tree


@dataclass
class Step:
    """One target pass: committed tokens, nodes of the tree, seconds a phase, records of each token.

    It commits tau accepted tokens and one more; the nodes include the root. The prefill is one too,
    of the root alone, with all its seconds as "other".
    """

    tokens: list[int]
    nodes: int
    seconds: dict[str, float]
    recorded: list[Any] = field(default_factory=list)

    @property
    def tau(self) -> int:
        """Number of accepted draft tokens."""
        return len(self.tokens) - 1


@dataclass
class Generation:
    """Generated token ids (prompt excluded), and how they came about.

    prefill_seconds: until the first token, which the prefill gives; steps: everything after. The
    last step is complete even where `tokens` was cut at a stop token or at the most tokens asked
    for. recorded: of every token that a decoder with `record` committed, in the order of `tokens`,
    what `Record` says; where `tokens` was cut there are more.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    prefill_seconds: float = 0.0
    peak_bytes: int = 0
    recorded: list[Any] = field(default_factory=list)

    @property
    def logprobs(self) -> list[float]:
        """Log-probability of every token of `tokens`, for a decoder with record="logprobs"."""
        return self.recorded[: len(self.tokens)]

    def acceptance(self) -> dict[str, Any]:
        """See `nde_talf.decoding.stats.acceptance`."""
        from nde_talf.decoding.stats import acceptance

        return acceptance(self.steps)

    @property
    def block_efficiency(self) -> float:
        """Mean tau + 1 over the steps."""
        return self.decoded / max(1, len(self.steps))

    @property
    def decode_seconds(self) -> float:
        """Seconds of all steps after the prefill."""
        return sum(sum(step.seconds.values()) for step in self.steps)

    @property
    def decoded(self) -> int:
        """Tokens committed by the steps (the prefill's one not counted)."""
        return sum(len(step.tokens) for step in self.steps)

    @property
    def stats(self) -> "Stats":
        """Figures of this generation."""
        from nde_talf.decoding.stats import stats_of

        return stats_of(self)


@dataclass
class Block:
    """Tokens committed at once: the first `accepted` were drafted, the rest is the target's own."""

    tokens: list[int]
    accepted: int


class Stream:
    """Iterate for the blocks of a generation, which `generation` holds as far as it has come.

    Each stream has its own cache and its own fork of the drafter, so that several can be read in
    turn; see `nde_talf.decoding.loop.SpeculativeDecoder`. One thread at a time reads a stream.

    Args:
        steps: of a decoder, cut into blocks that end at a stop token or at `max_new_tokens`.
        max_new_tokens: the most tokens of the generation.
        stop_tokens: each of them ends it.
        device: the target's.
    """

    def __init__(
        self,
        steps: Iterator[Step],
        max_new_tokens: int,
        stop_tokens: Collection[int],
        device: torch.device,
    ):
        self.steps, self.device, self.generation = steps, device, Generation()
        self.max_new_tokens, self.stop_tokens = max_new_tokens, stop_tokens
        self._blocks, self._reading = self._cut(), Lock()

    def __iter__(self) -> Iterator[Block]:
        return self

    def __next__(self) -> Block:
        if not self._reading.acquire(blocking=False):
            raise UserError(
                "Another thread reads this stream: give each thread a stream of the decoder, or"
                " read it in one."
            )
        try:
            return next(self._blocks)
        finally:
            self._reading.release()

    def _cut(self) -> Iterator[Block]:
        generation, device = self.generation, self.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            for step in self.steps:
                if generation.tokens:
                    generation.steps.append(step)
                else:
                    generation.prefill_seconds = step.seconds["other"]
                    generation.peak_bytes = peak_bytes(device)
                generation.recorded += step.recorded
                tokens = step.tokens[: self.max_new_tokens - len(generation.tokens)]
                stops = [index for index, token in enumerate(tokens) if token in self.stop_tokens]
                tokens = tokens[: stops[0] + 1] if stops else tokens
                generation.tokens += tokens
                yield Block(tokens, min(step.tau, len(tokens)))
                if stops or len(generation.tokens) == self.max_new_tokens:
                    return
        finally:  # asking takes as long as a small pass of a model
            generation.peak_bytes = peak_bytes(device)


def token_ids(prompt: "TokenIds") -> list[int]:
    """Return a prompt's token ids as a list.

    Args:
        prompt: integers in a list, a tuple, a tensor or an array, [n], or [1, n] as tokenizers
            return them.

    Raises:
        UserError: it is something else, such as a text or a batch of several prompts.
    """
    if isinstance(prompt, (Tensor, np.ndarray)):
        nested = prompt.ndim == 2 and len(prompt) == 1
        prompt = cast("Sequence[int]", (prompt[0] if nested else prompt).tolist())
    is_list = isinstance(prompt, (list, tuple, range))
    if not is_list or not all(
        isinstance(token, (int, np.integer)) and not isinstance(token, bool) for token in prompt
    ):
        kind = "list of something else" if is_list else type(prompt).__name__
        raise UserError(
            "prompt: it has to be integers, the token ids of one text (a list, tensor or array of"
            f" them), and is a {kind}. Encode a text with the target's tokenizer; decode several"
            " prompts one after the other."
        )
    return [int(token) for token in prompt]


TokenIds: TypeAlias = Annotated[Sequence[int] | Tensor | np.ndarray, PlainValidator(token_ids)]


def stop_ids(tokens: Any) -> frozenset[int]:
    """Return end tokens, or the only one, as a set. Raises ValueError for what is no token id."""
    listed = [*tokens] if isinstance(tokens, Iterable) else [tokens]
    if not all(isinstance(token, (int, np.integer)) and token >= 0 for token in listed):
        raise ValueError("it should be token ids, integers of at least 0")
    return frozenset(map(int, listed))


StopTokens: TypeAlias = Annotated[Collection[int], PlainValidator(stop_ids)]


def checked_prompt(prompt: "TokenIds", vocabulary: int, context: int) -> list[int]:
    """Return a prompt's token ids. Raises UserError if models of these sizes cannot take them."""
    tokens = token_ids(prompt)
    if not tokens:
        raise UserError("prompt: it is empty; give at least one token.")
    if len(tokens) >= context:
        raise UserError(
            f"prompt: it has {len(tokens)} tokens, but the context of the models (or of their"
            f" static shapes) holds {context}: shorten the prompt or use a longer context."
        )
    outside = [token for token in tokens if not 0 <= token < vocabulary]
    if outside:
        raise UserError(
            f"prompt: token {outside[0]} lies outside the vocabulary of {vocabulary}: it was"
            " encoded with another tokenizer."
        )
    return tokens


def peak_bytes(device: torch.device) -> int:
    """Return `Stats.peak_bytes`; on a GPU since `torch.cuda.reset_peak_memory_stats`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not there on Windows

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else 1024 * held
