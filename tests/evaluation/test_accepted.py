"""Acceptance lengths by hand; `test_ends.py` has them as the loops count them."""

from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.table import acceptance_by_position, histogram


def test_counts_by_hand():
    records = [
        Record("T=1", "m", "a", "code", 7, 3, 15, 1.0, accepted={"0": 1, "2": 2}),
        Record("T=1", "m", "b", "code", 4, 2, 10, 1.0, accepted={"0": 1, "2": 1}),
    ]
    assert histogram(records) == [2, 0, 3]
    assert acceptance_by_position([2, 0, 3]) == [0.6, 0.6]
    assert histogram([Record("T=1", "m", "a", "code", 7, 3, 15, 1.0)]) == []  # not counted
