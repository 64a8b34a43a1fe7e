"""Figures of a generation: pure functions of its steps."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

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
"""Record of the target at every committed token: nothing, the token's log-probability under the
model (neither processed nor warped, as vLLM's raw_logprobs), or the full row of logits [V].
"""


def record_of(logits: Tensor, tokens: list[int], record: Record) -> list[Any]:
    """The entries of `tokens`, whose rows are `logits` [len(tokens), V]."""
    if record == "logprobs":
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return wide.log_softmax(-1)[range(len(tokens)), tokens].tolist()
    return list(logits.clone()) if record else []  # a view would hold the rows of the full tree


class First(NamedTuple):
    """Prefill's result: a token, the seconds until it, and what was recorded of it."""

    token: int
    seconds: float
    recorded: list[Any]


@dataclass
class Step:
    """One target pass: committed tokens, nodes of the tree, seconds a phase, records of each token.

    It commits tau accepted tokens and one more; the nodes include the root.
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
        steps = max(1, len(self.steps))
        accepted = [step.tau for step in self.steps]
        drafted = [step.nodes - 1 for step in self.steps]
        counts, largest = Counter(accepted), max(drafted, default=0)
        histogram = [counts[number] for number in range(largest + 1)]
        return {
            "mean_acceptance_length": 1 + sum(accepted) / steps,
            "draft_acceptance_rate": sum(accepted) / max(1, sum(drafted)),
            "acceptance_histogram": histogram,
            "acceptance_per_position": [
                sum(histogram[at + 1 :]) / steps for at in range(max(accepted, default=0))
            ],
            "num_spec_steps": len(accepted),
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


def peak_bytes(device: torch.device) -> int:
    """See `Stats.peak_bytes`; on a GPU since `torch.cuda.reset_peak_memory_stats`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not there on Windows

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else 1024 * held
