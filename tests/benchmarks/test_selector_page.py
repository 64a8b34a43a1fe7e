"""The page of what selectors win, from runs of known speeds."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.selector import (
    GREEDY,
    IN_CPU_TIME,
    MAIN,
    MEAN,
    TRAVERSAL,
    Campaign,
    Decoded,
    speed_ratios,
)
from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.pipelines.stage import BEGUN
from tests.evaluation.timed import record

SPEEDS = {
    BASELINE: 100.0,
    CONTROL: 100.0,
    TRAVERSAL: 200.0,
    "Traversal, by domain": 220.0,
    "n-gram": 90.0,
    MAIN: 250.0,
}


def run(folder: Path, setting: str, **changed: float) -> Decoded:
    """An evaluation of four prompts under one setting.

    The best static tree is called after the setting; n-grams are the same method as plain decoding
    would be under another name.
    """
    speeds = SPEEDS | changed
    report = folder / "report"
    report.mkdir(parents=True)
    made = {"seed": 0, "evaluation": {"new_tokens": 20, "calibration_prompts": 3}}
    (report / BEGUN).write_text(json.dumps({"settings": made}))
    roles = {role: f"{role} ({setting})" if role == TRAVERSAL else role for role in speeds}
    plan = {
        "setting": setting,
        "roles": {**roles, "BV, best static": "BV (1, 0, 4)"},
        "same": {"BV (1, 0, 4)": roles[TRAVERSAL]},
    }
    (report / "roles-any.json").write_text(json.dumps(plan))
    lines = [
        Record(
            setting,
            roles[role],
            f"p{i}",
            "code",
            20,
            10,
            40,
            20 / speed,
            {"policy": 0.01, "target": 0.99},
            cpu_seconds=20 / speed,
        ).line()
        for i in range(4)
        for role, speed in speeds.items()
    ]
    (report / "records.jsonl").write_text("\n".join(lines) + "\n")
    return Decoded(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Decoded]:
    folder = tmp_path_factory.mktemp("runs")
    return [
        run(folder / "a", "T=0.6"),
        run(folder / "b", "T=1", **{TRAVERSAL: 300.0, CONTROL: 130.0}),
        run(folder / "c", GREEDY, **{"n-gram": 500.0}),
    ]


def test_every_role_is_compared_over_all_settings_though_its_methods_have_other_names(runs):
    campaign = Campaign.of(runs)
    over = campaign.over(MAIN, TRAVERSAL)
    assert list(over) == ["T=0.6", "T=1", MEAN, IN_CPU_TIME, GREEDY] and over[
        IN_CPU_TIME
    ] == pytest.approx(over[MEAN])
    del over[IN_CPU_TIME]
    assert [over[key][0] for key in over] == pytest.approx(
        [1.25, 250 / 300, math.sqrt(1.25 * 250 / 300), 1.25]
    )
    same = campaign.over(MAIN, "BV, best static")  # decoded once, as Traversal's
    assert same.items() >= over.items()


def test_the_best_rival_is_what_is_fastest_of_all_that_is_not_learned(runs):
    campaign = Campaign.of(runs)
    assert [*campaign.best_rivals().values()] == [
        "Traversal, by domain",
        TRAVERSAL,
        "n-gram",
    ]
    assert campaign.one_rival() == TRAVERSAL and set(campaign.roles(learned=True)) == {MAIN}
    assert CONTROL not in campaign.roles(learned=False)


def test_a_mean_over_settings_resamples_prompts_jointly():
    """One setting gains exactly what the other loses, prompt by prompt: with the same prompts in
    both the mean is always 1.
    """
    slow = [2.0 if i % 2 else 0.5 for i in range(6)]
    varied = [record("a", i, 10, seconds) for i, seconds in enumerate(slow)]
    even = [record("b", i, 10, 1.0) for i in range(6)]
    (first, _), mean = speed_ratios([(varied, even), (even, varied)])
    assert first[1] < 0.7 and first[2] > 1.1 and mean == pytest.approx([1, 1, 1])
