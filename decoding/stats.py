"""Figures of a generation: pure functions of its steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nde_talf.decoding.steps import PHASES, Step
from nde_talf.decoding.streams import Generation


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


def stats_of(generation: Generation) -> Stats:
    """Return the figures of one generation."""
    steps = generation.steps
    return Stats(
        block_efficiency=generation.block_efficiency,
        tokens_per_pass=(generation.decoded + bool(generation.tokens))
        / max(1, len(steps) + bool(generation.tokens)),
        nodes=dict(sorted(Counter(step.nodes for step in steps).items())),
        seconds={phase: sum(step.seconds[phase] for step in steps) for phase in (*PHASES, "other")},
        ttft=generation.prefill_seconds,
        tpot=generation.decode_seconds / max(1, generation.decoded),
        peak_bytes=generation.peak_bytes,
    )


def acceptance(steps: Sequence[Step]) -> dict[str, Any]:
    """Summarise what was accepted, in the JSON shape of vLLM's `SpeculativeDecodingMetrics`.

    Example: of two steps that draft 3 tokens and accept 1 and 3, acceptance_histogram is [0, 1, 0,
    1].

    Args:
        steps: of one request, or of several one after the other.

    Returns:
        mean_acceptance_length (block efficiency), draft_acceptance_rate (a tree's accepted tokens
        over its nodes), acceptance_histogram (by number of accepted tokens, how many steps),
        acceptance_per_position (by position of a draft, the fraction of steps that accepted it; not
        in vLLM's shape), num_spec_steps, num_accepted_draft_tokens, num_draft_tokens,
        num_spec_tokens (the largest draft of a step, of a tree all its nodes but the root).
    """
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
