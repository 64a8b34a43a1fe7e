"""The benchmark's records, the table made of them and the report: laws of the numbers, and what a reader opens."""

import json
import struct

import pytest

from decoding.loop import PHASES
from decoding.sampling import SamplingSetting
from evaluation.benchmark import Record, finished_prompts, read_records, run_benchmark, together
from evaluation.report import ReportData, cells, markdown_table, render_table, render_versus, write_report
from evaluation.table import BASELINE, tabulate
from evaluation.versus import MEAN, versus

SETTING = SamplingSetting(0.6)
OWN = {"selector": [1.02, 1.0, 1.04], "worst_5_percent": 0.8, "worst_quantiles": [0.7, 0.8, 0.9, 1.0, 1.1]}
ABLATIONS = {
    name: {"group": group, "value": value, "training_roots": roots, "tables": {"measured": OWN}}
    for name, group, value, roots in (("full", "", 0, 90), ("s = 1", "super-trees", 1, 90), ("half", "prompts", 0.5, 45))
}
PROMPTS = [(f"p{i}", "code", [1, 2, i]) for i in range(5)]


def methods(calls: list | None = None, fail_at: int | None = None) -> dict:
    """Methods of known speed: autoregressive at 100 tokens/s, a fast one at 250."""

    def make(name: str, rate: float, per_step: int):
        def generate(prompt: list[int], seed: int, kind: str) -> Record:
            if calls is not None:
                if fail_at is not None and len(calls) == fail_at:
                    raise KeyboardInterrupt
                calls.append((name, tuple(prompt)))
            phases = dict.fromkeys(PHASES, 0.25 * 20 / rate)
            return Record(str(SETTING), name, "", "", 20, 20 // per_step, 5 * (20 // per_step), 20 / rate, phases)

        return generate

    return {BASELINE: make(BASELINE, 100, 1), "fast (NDE)": make("fast (NDE)", 250, 4)}


def records(tmp_path):
    path = tmp_path / "records.jsonl"
    run_benchmark(methods(), PROMPTS, SETTING, path, seed=0)
    return list(read_records(path))


def test_rows_are_ratios_to_the_same_prompts_baseline(tmp_path):
    rows = {row.method: row for row in tabulate(records(tmp_path))[str(SETTING)]}
    assert rows[BASELINE].speedup == pytest.approx([1, 1, 1]) and rows[BASELINE].block_efficiency[0] == 1
    fast = rows["fast (NDE)"]
    assert fast.speedup[0] == pytest.approx(2.5) and fast.block_efficiency == pytest.approx([4, 4, 4])
    assert fast.tokens_per_second == pytest.approx(250) and fast.nodes == 5
    assert sum(fast.shares.values()) == pytest.approx(1)


def test_intervals_hold_the_value(tmp_path):
    noisy = records(tmp_path)
    for i, record in enumerate(noisy):
        record.seconds *= 1 + 0.1 * (i % 3)
    for row in tabulate(noisy)[str(SETTING)]:
        for value, low, high in (row.speedup, row.block_efficiency):
            assert low <= value <= high


def test_a_cut_benchmark_goes_on_with_whole_prompts(tmp_path):
    path = tmp_path / "records.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_benchmark(methods([], fail_at=7), PROMPTS, SETTING, path, seed=0)
    with path.open("a") as stream:
        stream.write(json.dumps({"setting": str(SETTING), "method": BASELINE, "prompt": "p2"})[:-9])
    calls: list = []
    run_benchmark(methods(calls), PROMPTS, SETTING, path, seed=0)
    assert {prompt for _, prompt in calls[2:]} == {(1, 2, 2), (1, 2, 3), (1, 2, 4)}  # the first two calls warm up
    found = [(r.prompt, r.method) for r in read_records(path)]
    assert len(found) == len(set(found)) == 10


def test_half_a_prompt_is_measured_again_whole(tmp_path):
    path = tmp_path / "records.jsonl"
    run_benchmark(methods(), PROMPTS[:2], SETTING, path, seed=0)
    path.write_text("\n".join(path.read_text().splitlines()[:3]) + "\n")
    assert finished_prompts(path, str(SETTING), list(methods())) == {"p0"}
    assert {r.prompt for r in read_records(path)} == {"p0"}


def test_the_report_holds_every_number_and_nothing_from_outside(tmp_path):
    data = ReportData(
        run="<run & co>",
        tables=tabulate(records(tmp_path)),
        pair={"overlap": {"1.0": 0.81}},
        head={"agreement": [0.5, 0.4], "agreement_by_rank": [[0.1, 0.2]]},
        curves={"target": {"loss": [(0, 3.0), (10, 2.0)]}},
        chosen={str(SETTING): {"(1, 0, 4)": 9, "(4, 0, 2)": 3}},
        static={str(SETTING): (1, 0, 4)},
        stages={"pair": 12.0},
        ablations=ABLATIONS,
        versus={"NDE": {"static": {"T=1": [1.051, 1.01, 1.09]}}},
    )
    page = write_report(data, tmp_path / "report").read_text()
    assert "<run" not in page and "&lt;run &amp; co&gt;" in page and "http" not in page
    for row in data.tables[str(SETTING)]:
        assert all(cell in page for cell in cells(row))
        assert row.method in markdown_table([row])
    assert "1.051 [1.010, 1.090]" in page and render_versus(data.versus)[0].row_count == 1
    for name in ("speedup", "phases", "actions", "curves", "learning", "tail"):
        image = (tmp_path / "report" / f"{name}.png").read_bytes()
        width, height = struct.unpack(">II", image[16:24])
        assert image.startswith(b"\x89PNG") and width > 500 and height > 150
    results = json.loads((tmp_path / "report/results.json").read_text())
    assert results["tables"][str(SETTING)][1]["speedup"][0] == pytest.approx(2.5)
    assert render_table(data.tables)[0].row_count == 2


def test_a_method_is_compared_with_others_on_the_same_prompts():
    def record(setting, method, prompt, tokens, seconds):
        return Record(setting, method, f"p{prompt}", "code", tokens, 1, 1, seconds)

    found = []
    for i in range(8):
        found += [record("T=1", "ours", i, 20 + i, 1.0), record("T=1", "static (1, 0, 4)", i, 20 + i, 1.1)]
        found += [record("T=0.6", "ours", i, 20 + i, 1.0), record("T=0.6", "static (1, 0, 8)", i, 20 + i, 2.0)]
    found.append(record("T=1", "static (1, 0, 4)", 99, 1, 100.0))  # a prompt that ours has not had
    ratios = versus(found, "ours", {"static": {"static (1, 0, 4)", "static (1, 0, 8)"}, "other": {"other"}})
    assert list(ratios) == ["static"]
    assert ratios["static"]["T=1"] == pytest.approx([1.1] * 3) and ratios["static"]["T=0.6"] == pytest.approx([2.0] * 3)
    assert ratios["static"][MEAN] == pytest.approx([2.2**0.5] * 3)


def test_generations_of_a_prompt_count_together():
    first, second = (Record("T=1", "ours", "p0", "code", 10 + i, 4, 9, 1.0, {"draft": 0.5}, {"(1, 0, 4)": i}) for i in range(2))
    other = Record("T=1", "ours", "p1", "code", 3, 1, 2, 1.0)
    sums = Record("T=1", "ours", "p0", "code", 21, 8, 18, 2.0, {"draft": 1.0}, {"(1, 0, 4)": 1})
    assert together([first, other, second]) == [sums, other]


def test_missing_parts_are_left_out(tmp_path):
    page = write_report(ReportData("bare", tabulate(records(tmp_path))), tmp_path / "report").read_text()
    assert "draft head" not in page and not (tmp_path / "report/actions.png").exists()
