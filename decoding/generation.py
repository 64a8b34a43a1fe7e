"""Generations: steps of the decode loop go in, blocks of tokens and figures come out."""

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import torch

from nde_talf.decoding.common.errors import ArgumentError, UserError
from nde_talf.decoding.models.end_tokens import up_to_end
from nde_talf.decoding.step import PHASES, Step


@dataclass
class Stats:
    """Figures of a generation, or of several.

    Attributes:
        block_efficiency: mean tau + 1 over the steps.
        tokens_per_pass: generated tokens over target passes, the prefill's included.
        nodes: how many trees had how many nodes, the root included.
        seconds: by phase, summed over the steps.
        ttft: seconds until the first token.
        tpot: seconds a later token.
        peak_bytes: largest memory in use; on a GPU what torch allocated there during the
            generation, elsewhere what the process has ever held.
    """

    block_efficiency: float
    tokens_per_pass: float
    nodes: dict[int, int]
    seconds: dict[str, float]
    ttft: float
    tpot: float
    peak_bytes: int

    @property
    def mean_nodes(self) -> float:
        """Mean number of nodes of a tree, the root included."""
        return sum(size * count for size, count in self.nodes.items()) / max(
            1, sum(self.nodes.values())
        )


@dataclass
class Generation:
    """Generated token ids (prompt excluded), and how they came about.

    prefill_seconds: until the first token, which the prefill gives; steps: everything after. The
    last step is complete even where `tokens` was cut at the most tokens asked for; it ends at a
    stop token, since what a pass gives after that is no text. recorded: of every token that a
    decoder with `record` committed, in the order of `tokens`, what `Record` says; where `tokens`
    was cut there are more.
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
        """Summarise what was accepted, in the JSON shape of vLLM's `SpeculativeDecodingMetrics`.

        Example: of two steps that draft 3 tokens and accept 1 and 3, acceptance_histogram is [0, 1,
        0, 1].

        Returns:
            mean_acceptance_length (block efficiency), draft_acceptance_rate (a tree's accepted
            tokens over its nodes), acceptance_histogram (by number of accepted tokens, how many
            steps), acceptance_per_position (by position of a draft, the fraction of steps that
            accepted it; not in vLLM's shape), num_spec_steps, num_accepted_draft_tokens,
            num_draft_tokens, num_spec_tokens (the largest draft of a step, of a tree all its nodes
            but the root).
        """
        steps = self.steps
        accepted, drafted = [step.tau for step in steps], [step.nodes - 1 for step in steps]
        counts, largest = Counter(accepted), max(drafted, default=0)
        histogram = [counts[number] for number in range(largest + 1)]
        return {
            "mean_acceptance_length": 1 + sum(accepted) / max(1, len(steps)),
            "draft_acceptance_rate": sum(accepted) / max(1, sum(drafted)),
            "acceptance_histogram": histogram,
            "acceptance_per_position": [
                sum(histogram[at + 1 :]) / len(steps) for at in range(max(accepted, default=0))
            ],
            "num_spec_steps": len(steps),
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": sum(drafted),
            "num_spec_tokens": largest,
        }

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
    def stats(self) -> Stats:
        """Figures of this generation."""
        return Stats(
            block_efficiency=self.block_efficiency,
            tokens_per_pass=(self.decoded + bool(self.tokens))
            / max(1, len(self.steps) + bool(self.tokens)),
            nodes=dict(sorted(Counter(step.nodes for step in self.steps).items())),
            seconds={
                phase: sum(step.seconds[phase] for step in self.steps)
                for phase in (*PHASES, "other")
            },
            ttft=self.prefill_seconds,
            tpot=self.decode_seconds / max(1, self.decoded),
            peak_bytes=self.peak_bytes,
        )


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

    @property
    def ended(self) -> bool:
        """Tell if a stop token ended the text, and not the number of tokens or the context."""
        tokens = self.generation.tokens
        return bool(tokens) and tokens[-1] in self.stop_tokens

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
                step.recorded, accepted = [], step.tau
                step.tokens = up_to_end(step.tokens, self.stop_tokens)
                tokens = step.tokens[: self.max_new_tokens - len(generation.tokens)]
                generation.tokens += tokens
                yield Block(tokens, min(accepted, len(tokens)))
                if self.ended or len(generation.tokens) == self.max_new_tokens:
                    return
        finally:  # asking takes as long as a small pass of a model
            generation.peak_bytes = peak_bytes(device)


def stop_ids(tokens: Any) -> frozenset[int]:
    """Return end tokens, or the only one, as a set. Raises ArgumentError for what is no id."""
    tokens = tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens
    listed = [*tokens] if isinstance(tokens, Iterable) else [tokens]
    if not all(isinstance(token, (int, np.integer)) and token >= 0 for token in listed):
        raise ArgumentError(
            f"stop_tokens={tokens!r}: it should be token ids, integers of at least 0."
        )
    return frozenset(map(int, listed))


def peak_bytes(device: torch.device) -> int:
    """Return `Stats.peak_bytes`; on a GPU since `torch.cuda.reset_peak_memory_stats`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not there on Windows

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else 1024 * held
