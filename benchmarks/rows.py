"""Figures of one method from its benchmark records, with 95 % bootstrap intervals over prompts.

Pure functions.
"""

import numpy as np

from nde_talf.decoding.common.bootstrap import ratio_of_totals, times
from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.protocol import BASELINE, CONTROL, NOT_TRUSTED, trusted
from nde_talf.evaluation.speed import speed_ratio


def rate(records: list[Record], above: str, below: str) -> list[float]:
    """Sum of one field over the sum of another."""
    return ratio_of_totals(
        np.array(
            [[getattr(record, above), getattr(record, below)] for record in records], dtype=float
        )
    )


def doubts(records: list[Record]) -> list[str]:
    """A line for every setting whose A/A control does not hold 1."""
    found = []
    for setting in dict.fromkeys(record.setting for record in records):
        here = [record for record in records if record.setting == setting]
        ratio = speed_ratio(
            *([r for r in here if r.method == name] for name in (CONTROL, BASELINE))
        )
        if ratio and not trusted(ratio):
            found.append(
                f"{setting}: {NOT_TRUSTED} (plain decoding against itself: {times(ratio)}); it"
                " supports no claim."
            )
    return found
