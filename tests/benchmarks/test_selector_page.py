"""The mean over settings on the page of what selectors win."""

import pytest

from benchmarks.selector import speed_ratios
from tests.evaluation.timed import record


def test_a_mean_over_settings_resamples_prompts_jointly():
    """One setting gains exactly what the other loses, prompt by prompt: with the same prompts in
    both the mean is always 1.
    """
    varied = [record("a", i, 10, 2.0 if i % 2 else 0.5) for i in range(6)]
    even = [record("b", i, 10, 1.0) for i in range(6)]
    (first, _), mean = speed_ratios([(varied, even), (even, varied)])
    assert first[1] < 0.7 and first[2] > 1.1 and mean == pytest.approx([1, 1, 1])
