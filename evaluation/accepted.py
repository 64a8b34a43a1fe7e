"""How many drafted tokens a target pass accepts: histograms, acceptance by position, and vLLM's counters. Pure functions.

A step's acceptance length here is the number of accepted drafted tokens, 0 and up. What vLLM calls mean acceptance length
counts the target's own token too, and is this project's block efficiency.
"""

from collections import Counter

from evaluation.benchmark import Record

PREFIX = "vllm:spec_decode_num"


def histogram(records: list[Record]) -> list[int]:
    """Steps by accepted drafted tokens: the entry at index n counts the steps that accepted n. Empty where nobody counted."""
    counts: Counter[int] = Counter()
    for record in records:
        counts.update({int(length): steps for length, steps in record.accepted.items()})
    return [counts[length] for length in range(max(counts) + 1)] if counts else []


def accepted_per_position(counts: list[int]) -> list[int]:
    """Steps that accepted a token at position 0, 1, ... of the path, from `histogram`: those that accepted more than that."""
    return [sum(counts[position + 1 :]) for position in range(len(counts) - 1)]


def acceptance_by_position(counts: list[int]) -> list[float]:
    """The same as a share of all steps, as vLLM reports it."""
    return [steps / sum(counts) for steps in accepted_per_position(counts)]


def vllm_counters(records: list[Record]) -> dict[str, int | list[int]]:
    """A method's counts under the names of vLLM's metrics. Draft tokens are all distinct nodes of the trees but the roots.
    Empty for a method that drafts nothing, or whose steps nobody counted."""
    counts = histogram(records)
    drafted = sum(record.nodes - record.steps for record in records)
    if not counts or drafted <= 0:
        return {}
    return {
        f"{PREFIX}_drafts": sum(counts),
        f"{PREFIX}_draft_tokens": drafted,
        f"{PREFIX}_accepted_tokens": sum(length * steps for length, steps in enumerate(counts)),
        f"{PREFIX}_accepted_tokens_per_pos": accepted_per_position(counts),
    }
