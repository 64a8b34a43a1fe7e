"""Speed-ups: ratios of total tokens/s, paired by prompt, with bootstrap intervals.

The only computation of speed-ups; `nde_talf.evaluation.protocol` defines them.
"""

from collections import defaultdict

import numpy as np

from nde_talf.decoding.common.bootstrap import ratio_of_totals
from nde_talf.evaluation.benchmark import Record

WALL, CPU = "seconds", "cpu_seconds"  # fields of a record


def speed_ratio(ours: list[Record], theirs: list[Record], clock: str = WALL) -> list[float] | None:
    """Return [ratio, low, high] of total tokens/s, ours to theirs, on the blocks of both.

    None if there are none, or one side was not timed by this clock. Example: 30 tokens in 1 s
    against 20 in 2 s is 3.
    """
    sums = [*sums_by_prompt(ours, theirs, clock).values()]
    return ratio_of_totals(np.array(sums)) if sums else None


def sums_by_prompt(
    ours: list[Record], theirs: list[Record], clock: str = WALL
) -> dict[str, np.ndarray]:
    """Sum tokens and seconds of both sides by prompt, over their common passes."""
    left, right = (
        {r.block: (r.tokens, getattr(r, clock)) for r in records if r.seconds > 0}
        for records in (ours, theirs)
    )
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(4))
    for block in sorted(left.keys() & right.keys()):
        sums[block[0]] += [*left[block], *right[block]]
    timed = sum(sums.values(), np.zeros(4))
    return sums if timed[1] > 0 and timed[3] > 0 else {}
