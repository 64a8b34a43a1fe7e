"""The benchmark's records, the table made of them and the report: laws of the numbers, and what a
reader opens.
"""

import json
import re
import struct
from dataclasses import replace
from io import StringIO
from itertools import pairwise

import pytest
from rich.console import Console

from nde_talf.decoding.common.bootstrap import times
from nde_talf.evaluation.benchmark import (
    Record,
    finished_blocks,
    read_records,
    run_benchmark,
    together,
)
from nde_talf.evaluation.plots import (
    OTHERS,
    OURS,
    action_histogram,
    choice_by_entropy,
    chooses,
    loss_curves,
    speed_bars,
)
from nde_talf.evaluation.protocol import BASELINE, NOT_TRUSTED, PROTOCOL
from nde_talf.evaluation.report import ReportData, markdown_table, results, write_report
from nde_talf.evaluation.speed import MEAN, versus
from nde_talf.evaluation.table import tabulate
from nde_talf.evaluation.terminal import render_results
from nde_talf.evaluation.verdict import verdicts
from tests.evaluation.example import NDE, PROMPTS, SETTING, methods, records


def test_rows_are_ratios_to_the_same_prompts_baseline(tmp_path):
    rows = {row.method: row for row in tabulate(records(tmp_path))[str(SETTING)]}
    assert (
        rows[BASELINE].speedup == pytest.approx([1, 1, 1])
        and rows[BASELINE].block_efficiency[0] == 1
    )
    fast = rows[NDE]
    assert fast.speedup == pytest.approx([2.5] * 3) and fast.block_efficiency == pytest.approx(
        [4, 4, 4]
    )
    assert fast.tokens_per_second == pytest.approx(250) and fast.nodes == 5
    assert sum(fast.shares.values()) == pytest.approx(1)


def test_intervals_hold_the_value(tmp_path):
    noisy = records(tmp_path)
    for i, record in enumerate(noisy):
        record.seconds *= 1 + 0.1 * (i % 3)
    for row in tabulate(noisy)[str(SETTING)]:
        for value, low, high in (row.speedup, row.block_efficiency):
            assert low <= value <= high


def test_every_pass_goes_over_all_prompts_with_seeds_and_an_order_of_its_own(tmp_path):
    calls: list = []
    path = tmp_path / "records.jsonl"
    run_benchmark(methods(calls), PROMPTS, SETTING, path, seed=3, passes=2)
    found = list(read_records(path))
    assert len(found) == 2 * 5 * 4 and {record.block for record in found} == {
        (p, n) for p, *_ in PROMPTS for n in (0, 1)
    }
    blocks = [calls[i : i + 4] for i in range(4, len(calls), 4)]  # behind the warm-up
    assert all(len({seed for *_, seed in block}) == 1 for block in blocks)
    assert len({block[0][2] for block in blocks}) == 10  # seeds of blocks
    orders = [[name for name, *_ in block] for block in blocks]
    assert len(set(map(tuple, orders))) > 5 and len({tuple(sorted(order)) for order in orders}) == 1
    followed = {
        first for order in orders for first, second in pairwise(order) if second == BASELINE
    }
    assert len(followed) == 3  # no method always follows the same other one


def test_a_cut_benchmark_goes_on_with_whole_blocks(tmp_path):
    path = tmp_path / "records.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_benchmark(methods([], fail_at=14), PROMPTS, SETTING, path, seed=0)
    with path.open("a") as stream:
        stream.write(json.dumps({"setting": str(SETTING), "method": BASELINE, "prompt": "p2"})[:-9])
    calls: list = []
    run_benchmark(methods(calls), PROMPTS, SETTING, path, seed=0)
    assert {prompt for _, prompt, _ in calls[4:]} == {
        (1, 2, 2),
        (1, 2, 3),
        (1, 2, 4),
    }  # the first four calls warm up
    found = [(r.prompt, r.method) for r in read_records(path)]
    assert len(found) == len(set(found)) == 20


def test_half_a_block_and_one_written_twice_are_measured_again_whole(tmp_path):
    path = tmp_path / "records.jsonl"
    run_benchmark(methods(), PROMPTS[:3], SETTING, path, seed=0)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:10], lines[0]]) + "\n")
    assert finished_blocks(path, str(SETTING), list(methods())) == {("p1", 0)}
    assert {r.prompt for r in read_records(path)} == {"p1"}


@pytest.mark.slow
def test_the_report_holds_every_number_and_nothing_from_outside(report):
    data, folder = report
    page = (folder / "index.html").read_text()
    assert "<run" not in page and "&lt;run &amp; co&gt;" in page and "def &lt;b&gt;" in page
    assert not re.search(r'(src|href)="?(http|//)|url\(http', page) and "<script" not in page
    for row in data.tables[str(SETTING)]:
        assert (
            times(row.speedup) in page
            and row.method in page
            and row.method in markdown_table([row])
        )
    for words in (
        "1.051 [1.010, 1.090]",
        "BV (1, 0, 4): the same method as",
        "Exported in its place",
        PROTOCOL[0][:40],
        "The runner-up, ",
        "5 prompts: indicative.",
        "Clock trusted",
        "best static tree over all (1, 0, 5)",
        *("(2, 0, 4)", "3.25", "1.07×", "1.21×"),
    ):
        assert words in page
    names = [
        "speedup",
        "phases",
        "positions",
        "actions",
        "curves",
        "selector",
        "entropy",
        "acceptance",
    ]
    for name in names:
        image = (folder / f"{name}.png").read_bytes()
        width, height = struct.unpack(">II", image[16:24])
        assert image.startswith(b"\x89PNG") and width > 500 and height > 150
    assert page.count("<svg") == len(names)  # one panel each
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    kept = json.loads((folder / "results.json").read_text())
    assert kept["tables"][str(SETTING)][3]["speedup"][0] == pytest.approx(2.5)
    assert (
        kept["summary"] == [data.verdicts[str(SETTING)].sentence] and "2.50×" in kept["summary"][0]
    )
    assert kept["spec_decode"][str(SETTING)][NDE][
        "vllm:spec_decode_num_accepted_tokens_per_pos"
    ] == [25, 25, 25]


def printed(data: ReportData, joined: bool = True) -> str:
    console = Console(width=80, file=StringIO())
    for part in render_results(json.loads(json.dumps(results(data)))):
        console.print(part)
    return " ".join(console.file.getvalue().split()) if joined else console.file.getvalue()


@pytest.mark.slow
def test_the_terminal_shows_the_pages_figures_and_again_from_the_file(report):
    text = printed(report[0])
    assert "2.50× [2.50, 2.50]" in text and "BV (1, 0, 4): the same as Traversal (1, 0, 4)" in text
    assert (
        "as fast as plain" in text
        and "1.051" in text
        and "Clock trusted" in text
        and "indicative" in text
    )
    assert max(map(len, printed(report[0], joined=False).splitlines())) <= 80


def test_an_untrusted_clock_is_told_everywhere_and_nothing_is_claimed(tmp_path):
    tables = tabulate(records(tmp_path, twin=110))
    data = ReportData(
        "doubtful",
        tables,
        verdicts(tables, ""),
        versus={NDE: {"static": {str(SETTING): [1.05, 1.01, 1.09]}}},
    )
    page = write_report(data, tmp_path / "report").read_text()
    kept = json.loads((tmp_path / "report/results.json").read_text())
    assert (
        kept["verdicts"][str(SETTING)]["clock"] == NOT_TRUSTED and NOT_TRUSTED in kept["summary"][0]
    )
    assert (
        NOT_TRUSTED in page
        and NOT_TRUSTED in printed(data)
        and NOT_TRUSTED in (tmp_path / "report/results.md").read_text()
    )
    for text in (page, printed(data)):
        assert "as fast as plain" not in text


def test_only_what_learned_is_drawn_as_learned(tmp_path):
    tables = tabulate(records(tmp_path))
    for learned, expected in (({NDE}, OURS), (set(), OTHERS)):
        axis = speed_bars(tables, {str(SETTING): learned}).axes[0]
        bars = [bar.get_facecolor() for bar in axis.containers[-1].patches]
        from matplotlib.colors import to_rgba

        assert bars[3] == to_rgba(expected) and bars[2] == to_rgba(OTHERS)


def test_every_selector_and_setting_has_chosen_trees_of_its_own():
    chosen = {
        "T=1": {"a": {"(1, 0, 4)": 3, "(2, 0, 2)": 1}, "b": {"(4, 0, 1)": 5}},
        "T=0.6": {"a": {"(1, 0, 2)": 2}},
    }
    figure = action_histogram(chosen, {"T=1": {"a": "(2, 0, 2)", "b": "(1, 0, 1)"}})
    shares = [
        {t.get_text(): b.get_height() for t, b in zip(x.get_xticklabels(), x.patches, strict=True)}
        for x in figure.axes
    ]
    assert shares == [
        {"(1, 0, 4)": 75, "(2, 0, 2)": 25},
        {"(4, 0, 1)": 100, "(1, 0, 1)": 0},
        {"(1, 0, 2)": 100},
    ]


def test_trees_by_entropy_are_drawn_setting_by_setting_where_a_network_chooses():
    points = [
        {"entropy": 0.1, "depth": 2.0, "nodes": 3.0},
        {"entropy": 0.9, "depth": 1.0, "nodes": 1.0},
    ]
    settings = {
        "low": {"learned": True, "by_entropy": points},
        "high": {"learned": False, "by_entropy": points},
    }
    kept = chooses(
        {
            "a": {"measured": {"settings": settings}},
            "b": {"measured": {"settings": {"low": {"learned": True}}}},
        }
    )
    assert {name: list(own["measured"]["settings"]) for name, own in kept.items()} == {"a": ["low"]}
    figure = choice_by_entropy(kept)
    assert [list(axis.lines[0].get_ydata()) for axis in figure.axes] == [[2, 1], [3, 1]]


def test_a_training_of_one_step_is_a_visible_point_and_one_without_losses_no_panel():
    figure = loss_curves({"selector": {"loss": [(0, -3.0)]}, "empty": {"lr": [(0, 0.1)]}})
    assert len(figure.axes) == 1 and figure.axes[0].lines[0].get_marker() == "o"


def test_a_method_is_compared_with_others_on_the_same_prompts():
    def record(setting, method, prompt, tokens, seconds):
        return Record(setting, method, f"p{prompt}", "code", tokens, 1, 1, seconds)

    found = []
    for i in range(8):
        found += [
            record("T=1", "ours", i, 20 + i, 1.0),
            record("T=1", "static (1, 0, 4)", i, 20 + i, 1.1),
        ]
        found += [
            record("T=0.6", "ours", i, 20 + i, 1.0),
            record("T=0.6", "static (1, 0, 8)", i, 20 + i, 2.0),
        ]
    found.append(record("T=1", "static (1, 0, 4)", 99, 1, 100.0))  # a prompt that ours has not had
    ratios = versus(
        found, "ours", {"static": {"static (1, 0, 4)", "static (1, 0, 8)"}, "other": {"other"}}
    )
    assert list(ratios) == ["static"]
    assert ratios["static"]["T=1"] == pytest.approx([1.1] * 3) and ratios["static"][
        "T=0.6"
    ] == pytest.approx([2.0] * 3)
    assert ratios["static"][MEAN] == pytest.approx([2.2**0.5] * 3)


def test_generations_of_a_prompt_count_together():
    first, second = (
        Record(
            "T=1",
            "ours",
            "p0",
            "code",
            10 + i,
            4,
            9,
            1.0,
            {"draft": 0.5},
            {"(1, 0, 4)": i},
            pass_=i,
            accepted={"1": 4},
        )
        for i in range(2)
    )
    other = Record("T=1", "ours", "p1", "code", 3, 1, 2, 1.0)
    sums = Record(
        "T=1",
        "ours",
        "p0",
        "code",
        21,
        8,
        18,
        2.0,
        {"draft": 1.0},
        {"(1, 0, 4)": 1},
        accepted={"1": 8},
    )
    assert together([first, other, second]) == [sums, other]


@pytest.mark.slow
def test_a_text_of_a_pair_that_was_trained_here_is_called_gibberish(report, tmp_path):
    data, folder = report
    assert "gibberish" not in (folder / "index.html").read_text()
    trained = replace(data, sample={**data.sample, "trained_here": True})
    assert write_report(trained, tmp_path).read_text().count("gibberish") == 1


def test_missing_parts_are_left_out(tmp_path):
    page = write_report(
        ReportData("bare", tabulate(records(tmp_path))), tmp_path / "report"
    ).read_text()
    assert (
        "draft head, on" not in page
        and 'id="sample"' not in page
        and not (tmp_path / "report/actions.png").exists()
    )
    assert "T=0.6" in printed(ReportData("bare", tabulate(records(tmp_path))))
