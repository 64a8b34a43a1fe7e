"""Choosing among methods by the clock, on a few prompts."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from nde_talf.evaluation.benchmark import Generate

WARM_UP = 8  # tokens decoded before a method is timed

Tried = TypeVar("Tried", bound=Hashable)


def fastest(
    tried: Sequence[Tried],
    make: Callable[[Tried, int], Generate],
    new_tokens: int,
    prompts: list[list[int]],
) -> Tried:
    """The one of `tried` with the most tokens per second. make: its method that writes so many
    tokens.

    Successive halving: the prompts are dealt to as many rounds as halving needs, or to one a prompt
    where they are fewer. After a warm-up all are tried on the prompts of the first round; after
    each round the faster half goes on to the next, and after the last the fastest is taken.
    Example: 12 trees and 24 prompts: 12 trees on 6 prompts, 6, 3 and 2 on 6 others each.
    """
    if len(tried) == 1:
        return tried[0]
    for one in tried:
        make(one, min(WARM_UP, new_tokens))(prompts[0], 0, "")
    methods, left = {one: make(one, new_tokens) for one in tried}, list(tried)
    totals: dict[Tried, list[float]] = {one: [0.0, 0.0] for one in tried}
    rounds = min(len(prompts), halvings(len(tried)))
    for number in range(rounds):
        for index in range(number, len(prompts), rounds):
            for one in left:
                record = methods[one](prompts[index], index + 1, "")
                totals[one][0] += record.tokens
                totals[one][1] += record.seconds
        left.sort(
            key=lambda one: totals[one][1] / totals[one][0] if totals[one][0] else float("inf")
        )
        left = left[: -(-len(left) // 2)] if number + 1 < rounds else left[:1]
    return left[0]


def halvings(count: int) -> int:
    """How often a number has to be halved, rounded up, until one is left; at least 1."""
    return max(1, (count - 1).bit_length())


def trial_count(count: int, prompts: int) -> int:
    """Generations of a `fastest` of so many, without the warm-up."""
    rounds, left, total = min(prompts, halvings(count)), count, 0
    for number in range(rounds):
        total += left * len(range(number, prompts, rounds))
        left = -(-left // 2)
    return total if count > 1 else 0
