"""Speed-ups: one figure everywhere, prompts and passes paired, settings resampled jointly."""

from dataclasses import replace

import pytest

from nde_talf.evaluation.protocol import BASELINE, CONTROL, NOT_TRUSTED, trusted
from nde_talf.evaluation.speed import speed_ratio
from nde_talf.evaluation.table import tabulate
from nde_talf.evaluation.verdict import DO_NOT, verdict
from tests.evaluation.timed import record


def test_a_ratio_is_total_tokens_over_total_seconds_on_the_blocks_of_both():
    ours = [record("a", 0, 30, 1.0), record("a", 1, 10, 1.0), record("a", 9, 99, 0.1)]
    theirs = [record("b", 1, 10, 2.0), record("b", 0, 10, 1.0)]
    # The median of 3 and 2 would be 2.5.
    assert speed_ratio(ours, theirs)[0] == pytest.approx((40 / 2) / (20 / 3))
    second = [record("a", 0, 30, 4.0, 1), record("b", 0, 10, 1.0, 1)]
    value, low, high = speed_ratio([*ours, second[0]], [*theirs, second[1]])
    assert value == pytest.approx((70 / 6) / (30 / 4)) and low <= value <= high
    one_side = speed_ratio([*ours, second[0]], theirs)  # a pass that theirs does not have
    assert one_side[0] == speed_ratio(ours, theirs)[0]
    assert speed_ratio(ours, []) is None


def rows(control, **methods):
    """A table of ten prompts; speeds relative to plain decoding, without noise."""
    speeds = {BASELINE: 1.0, CONTROL: control, **methods}
    return tabulate(
        [record(name, i, 20, 1 / speed) for name, speed in speeds.items() for i in range(10)]
    )["T=1"]


def test_a_control_is_one_within_a_tenth_or_narrower_than_the_effect():
    assert trusted([1.01, 0.99, 1.02]) and not trusted([1.02, 1.01, 1.03]) and trusted(None) is None
    wide = [0.5, 0.38, 1.03]
    assert not trusted(wide) and not trusted([1.0, 0.95, 1.11]) and trusted([1.0, 0.9, 1.1])
    assert trusted(wide, [3.1, 3.0, 3.2]) and trusted(wide, [0.3, 0.2, 0.33])
    assert not trusted(wide, [2.9, 2.6, 3.2])


def test_an_untrusted_clock_supports_no_claim():
    bare = [row for row in rows(1.0, fast=3.0) if row.method != CONTROL]
    for table, clock in ((rows(1.05, fast=3.0), NOT_TRUSTED), (bare, "no control")):
        judged = verdict("T=1", table, "batch size 1")
        assert judged.clock == clock and judged.speculate is None and NOT_TRUSTED in judged.sentence
        assert "fast" not in judged.sentence and "3.00" not in judged.sentence


@pytest.mark.parametrize(
    "methods,speculate,best,words",
    [
        ({"fast": 1.5, "slow": 0.5}, True, "fast", "decodes 1.50× [1.50, 1.50] as fast as plain"),
        ({"slow": 0.5, "better": 0.9}, False, "better", DO_NOT),
        ({"other": 1.0}, None, "other", "no method is measurably faster"),
        ({}, None, None, "only plain decoding was measured"),
    ],
)
def test_a_trusted_clock_names_the_winner(methods, speculate, best, words):
    judged = verdict("T=0.6, top-p=0.9", rows(1.0, **methods), "float32, a machine")
    assert (judged.speculate, judged.best, judged.clock) == (speculate, best, "trusted")
    assert words in judged.sentence and "temperature 0.6, top-p 0.9" in judged.sentence
    assert best is None or "float32, a machine" in judged.sentence


def raced(*seconds, prompts=40, control=1.0):
    """The verdict on plain decoding, its control and two methods, of which b takes `seconds` in
    turn and a one second.
    """
    runs = []
    for i in range(prompts):
        speeds = {BASELINE: 2.0, CONTROL: 2.0 / control, "a": 1.0, "b": seconds[i % len(seconds)]}
        runs += [record(name, i, 20, speed) for name, speed in speeds.items()]
    elsewhere = [replace(record("b", 0, 20, 0.1), setting="T=9")]  # does not count
    return verdict("T=1", tabulate(runs)["T=1"], "", runs + elsewhere)


def test_the_runner_up_is_compared_with_the_fastest_prompt_by_prompt():
    apart, alike = raced(1.25), raced(0.5, 1.6)
    assert "The runner-up, b, is slower: 0.80 [0.80, 0.80] of that." in apart.sentence
    assert "b, is at 0.95 [" in alike.sentence and "cannot be told apart" in alike.sentence
    for judged in (raced(1.25, control=1.1), verdict("T=1", rows(1.0, a=2.0), "", [])):
        assert "runner-up" not in judged.sentence
