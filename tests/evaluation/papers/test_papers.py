"""Every paper's tables from their command lines on a tiny pair; what the papers print; figures with
their samples; verdicts.
"""

import json
from collections import Counter
from dataclasses import replace
from shutil import rmtree

import numpy as np
import pytest
import torch

from nde_talf.data.text.pair import Pair
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.actions import Action, tree_index
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.names import LABELLED
from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.papers import __main__ as command
from nde_talf.evaluation.papers import dynatree, dyspec, labelled, talf
from nde_talf.evaluation.papers.bench import Bench, OutOfTime, Work, carry_out
from nde_talf.evaluation.papers.frame import (
    FAILS,
    HOLDS,
    UNSEEN,
    Claim,
    Plot,
    Table,
    as_markdown,
    measured,
    picture,
    printed,
    verdict_table,
)
from nde_talf.evaluation.papers.labelled import SPEED, TOKENS, Labels, tracing
from nde_talf.evaluation.papers.page import write_page
from nde_talf.evaluation.papers.resampled import Prompts, as_interval, as_text
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.network import Selector
from nde_talf.selector.roots import ROOT_SCALARS, Roots
from tests.decoding.pairs import tiny_pair
from tests.selector.examples import schema

V = 30
PRINTED = {
    "nde": {
        **{f"Table {n}": rows for n, rows in zip(range(2, 8), (8, 8, 5, 5, 6, 6), strict=True)},
        "Table 8": 15,
        "Table 9": 15,
    }
    | {f"Table {n}": 15 for n in range(10, 16)},
    "gbv": {
        "Table 1": 8,
        "Table 2": 8,
        "Table 3": 7,
        "Table 4": 7,
        "Table 5": 10,
        "Table 6": 12,
        "Table 7": 12,
        "Profile": 4,
    },
    "dynatree": {
        "Table 1": 4,
        "Table 2": 4,
        "Table 3": 4,
        "Table 4": 3,
        "Table 5": 6,
        "Table 6": 4,
    },
    "talf": {"Table 1": 18, "Table 2": 9, "Table 3": 4, "Table 4": 10, "Figure 2a": 2},
    "dyspec": {"Table 1": 6, "Table 2": 6, "Table 3": 6, "Table 4": 6, "Table 5": 8, "Figure 9": 4},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder: a random pair, two sets of prompts, a latency table."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    for role, model in zip(("target", "draft"), tiny_pair(V, hidden=16), strict=True):
        model.module.save_pretrained(folder / "pair" / role)
    prompts = [
        Prompt(f"{kind}{i}", kind, "", [(7 * i + j) % V for j in range(5)])
        for i in range(3)
        for kind in ("code", "prose")
    ]
    rows = (torch.arange(8 * 24).reshape(8, 24) * 7) % V
    Pair(folder / "pair").write("target", "draft", prompts, 4, rows, rows)
    table = LatencyTable([1, 100], [1, 41], [1, 4], [[1e-3, 2e-3]] * 2, [[1e-4, 2e-4]] * 2)
    (folder / "latency").mkdir()
    table.save(folder / "latency" / "table.json")
    chosen = Selector(schema(16, 16))
    chosen.save_pretrained(folder / "selector" / "export" / "specinfer")
    return folder


@pytest.mark.parametrize("paper", PRINTED)
def test_every_table_of_a_paper_has_its_rows(paper):
    found = printed(paper)
    assert {name: len(rows) for name, (_, rows) in found.items()} == PRINTED[paper]
    for columns, rows in found.values():
        assert all(len(row) == len(columns) for row in rows) and len(set(columns)) == len(columns)


@pytest.mark.parametrize("paper", PRINTED)
def test_a_paper_has_every_table_that_is_printed_and_its_own_cells_meet_printed_ones(run, paper):
    made = getattr(
        __import__(f"nde_talf.evaluation.papers.{paper}", fromlist=["x"]), command.PAPERS[paper]
    )(Bench(run, 1))
    tables = {table.name: table for table in made.tables()}
    works = [work.name for work in made.works()]
    assert (
        set(PRINTED[paper]) <= set(tables)
        and len(tables) == len(made.tables())
        and len(set(works)) == len(works)
    )
    assert all(set(own.works) <= set(works) for own in tables.values())
    assert len(made.claims()) >= 2
    for name, (columns, rows) in printed(paper).items():
        keys = {tuple(row[: len(tables[name].keys)]) for row in rows}
        if len(keys) == len(rows) and not {"Pair", "Dataset"} & set(columns):
            assert keys & set(tables[name].rows), name


def synthetic(settings: int = 1) -> Labels:
    """Three roots of each of four prompts, with random labels."""
    generator = torch.Generator().manual_seed(0)
    prompts = Prompts([Prompt(str(i), "code", "", [1]) for i in range(4)])
    row = np.repeat(np.arange(4), 3)
    labels = {rule: 1 + 3 * torch.rand(12, 4, 233, generator=generator) for rule in LABELLED}
    hidden, scalars = torch.zeros(12, 1), torch.zeros(12, len(ROOT_SCALARS))
    roots = Roots(*[hidden] * 3, scalars, torch.arange(12) + 5, torch.zeros(12).long(), torch.from_numpy(row), labels,
                  [(1.0, 1.0)], ["code"] * 12)  # fmt: skip
    return Labels(
        roots,
        row,
        prompts,
        LatencyTable([1, 100], [1, 41], [1, 4], [[1.0, 5.0]] * 2, [[0.1, 0.2]] * 2),
    )


def test_a_cell_is_the_direct_computation():
    labels, trees = synthetic(), [tree_index(Action(2, 0, 3)), tree_index(Action(1, 0, 4))]
    own = labels.roots.samples["specinfer"][:, :, trees].double().numpy()
    one, other = own[:, ::2].mean(1), own[:, 1::2].mean(1)
    tokens = (one / other + other / one).sum(0) / (1 / one + 1 / other).sum(0)
    found = labels.figure("specinfer", "t1.0", trees)
    assert found[0] == pytest.approx(tokens) and found.shape == (2001, 2)
    seconds = labels.table.steps(torch.tensor([16]))[
        0, trees
    ].numpy()  # the nearest priced context of all twelve
    assert labels.figure("specinfer", "t1.0", trees, SPEED)[0] == pytest.approx(tokens / seconds)
    taken = torch.full((12,), trees[1])
    assert labels.figure("specinfer", "t1.0", taken)[0] == pytest.approx(tokens[1])
    assert labels.figure("specinfer", "t0.2", trees) is None
    assert labels.figure("naive", "t1.0", trees)[0] == pytest.approx(
        labels.figure("naivetree", "t1.0", trees)[0]
    )
    best = labels.best("gbv", "t1.0", trees, TOKENS)
    assert (
        labels.best_figure("gbv", "t1.0", trees, TOKENS)[0]
        == labels.figure("gbv", "t1.0", trees)[0].max()
    )
    assert best in trees


def test_choosing_on_other_prompts_is_not_better_for_a_longer_list_alone():
    labels = synthetic()  # labels without any difference between trees in the mean
    every = list(range(233))
    chosen = labels.crossed("nss", "t1.0", every, TOKENS)[0]
    assert chosen < labels.best_figure("nss", "t1.0", every, TOKENS)[0] and 2 < chosen < 3


def test_labels_that_are_exact_give_the_harmonic_mean():
    labels = synthetic()
    labels.roots.samples["nss"][:] = torch.tensor([1.0, 3.0] * 6)[:, None, None]
    assert labels.figure("nss", "t1.0", [7])[0, 0] == pytest.approx(2 / (1 + 1 / 3))


def test_samples_of_a_figure_are_paired_and_few_prompts_have_no_interval():
    prompts = Prompts(
        [Prompt(f"{kind}{i}", kind, "", [1]) for kind in ("a", "b") for i in range(3)]
    )
    values, ones = np.array([1.0, 2, 3, 10, 20, 30]), np.ones(6)
    ours, theirs = prompts.ratio(2 * values, ones), prompts.ratio(values, ones)
    assert as_interval(ours / theirs) == pytest.approx([2, 2, 2])
    value, low, high = as_interval(prompts.ratio(values, ones, "a"))
    assert (value, low, high) == (2, 1, 3)
    few = Prompts(prompts.every[:2])
    assert as_interval(few.ratio(values[:2], ones[:2])) == [1.5] and as_text([1.5]) == "1.50"
    assert as_interval(None) is None and as_text(None) == ""


def fixed(value: float, low: float, high: float) -> np.ndarray:
    return np.array([value, *np.linspace(low, high, 2000)])


@pytest.mark.parametrize(
    "figures,verdict",
    [
        ({"a": fixed(1.2, 1.1, 1.3)}, HOLDS),
        ({"a": fixed(1.2, 1.1, 1.3), "b": fixed(1.0, 0.9, 1.1)}, UNSEEN),
        ({"a": fixed(1.2, 1.1, 1.3), "b": fixed(0.8, 0.7, 0.9)}, FAILS),
        ({"a": fixed(1.2, 1.1, 1.3), "b": None}, UNSEEN),
        ({"a": np.array([0.5, np.nan])}, UNSEEN),
        ({"a": None}, UNSEEN),
        ({"a": fixed(1.0, 1.0, 1.0)}, UNSEEN),
        ({"a": fixed(0.8, 0.7, 0.9), "b": None, "c": np.array([1.5, np.nan])}, FAILS),
    ],
)
def test_verdicts(figures, verdict):
    found = Claim("it is so", "2x", lambda: figures).verdict()
    assert found["verdict"] == verdict and found["reason"]
    assert f"**{verdict}**" in verdict_table([{"paper": "p", **found}])


def test_a_verdict_says_what_each_figure_does_the_lowest_first():
    figures = {"a": fixed(1.2, 1.1, 1.3), "b": fixed(1.0, 0.9, 1.1), "c": fixed(0.8, 0.7, 0.9), "d": fixed(1.0, 1.0, 1.0),
               "e": np.array([0.5, np.nan]), "f": None}  # fmt: skip
    found = Claim("x", "y", lambda: figures, "A note.").verdict()
    assert [*found["figures"]] == ["e", "c", "b", "d", "a", "f"]
    groups = (
        "Below 1 with its full interval: c.",
        "both take the same trees: d.",
        "The interval holds 1: b.",
        "an interval: e.",
    )
    at = [
        found["reason"].index(text)
        for text in (*groups, "Not measured: f.", "Above 1 with its full interval: a. A note.")
    ]
    assert at == sorted(at)


def test_verdicts_that_do_not_hold_come_first():
    ratios = (fixed(1.2, 1.1, 1.3), fixed(1.0, 0.9, 1.1), fixed(0.8, 0.7, 0.9))
    rows = verdict_table(
        [{"paper": "p", **Claim("x", "y", lambda own=own: {"a": own}).verdict()} for own in ratios]
    )
    assert rows.index(FAILS) < rows.index(UNSEEN) < rows.index(f"**{HOLDS}")


def test_a_table_shows_ours_beside_the_printed_and_an_empty_cell_where_nothing_was_measured():
    cells = {("x", "one"): fixed(1.5, 1.4, 1.6)}
    table = Table(
        "Table 1",
        "Title",
        ("Key",),
        [("x",), ("y",)],
        ["one"],
        lambda row, c: cells.get((*row, c)),
        plot=Plot("lines", "x", "y"),
    )
    found = json.loads(json.dumps(measured(table)))
    text = as_markdown(
        "Table 1", found, {"Table 1": (["Key", "one", "two"], [["x", "7", "8"], ["z", "9", "10"]])}
    )
    assert "| Key | one | paper: two |" in text and "| x | 1.50 [1.41, 1.59] / 7 | 8 |" in text
    assert "| y |  |  |" in text and "| z | / 9 | 10 |" in text and "Measured on" not in text
    counted = measured(
        replace(table, works=("one", "two")), {"one": "6 prompts (code 6)", "three": "9 prompts"}
    )
    assert "\nTitle. Measured on 6 prompts (code 6).\n" in as_markdown("Table 1", counted, {})
    for kind in ("lines", "bars"):
        assert len(picture(Plot(kind, "depth", "rate"), found).axes) == 1


def test_measurements_stop_at_their_part_of_the_time():
    ran, said = Counter(), []

    def work(name: str, over: bool) -> Work:
        def run(deadline: float) -> None:
            ran[name] += 1
            if over:
                raise OutOfTime

        return Work(name, lambda: 10.0, run)

    carry_out([work("a", True), work("b", False)], 1, said.append)
    assert ran == {"a": 1, "b": 1} and len(said) == 1 and "a: " in said[0]


def test_a_run_without_a_pair_or_a_table_says_what_makes_it(tmp_path):
    with pytest.raises(UserError, match="stage=pair"):
        _ = Bench(tmp_path).pair
    with pytest.raises(UserError, match="stage=latency"):
        _ = Bench(tmp_path).table
    with pytest.raises(UserError, match="no results"):
        write_page(tmp_path, tmp_path / "page.md", ["nde"])


def test_labels_go_on_where_they_stopped(run, monkeypatch):
    monkeypatch.setattr(labelled, "EIGHT", ["t1.0", "p0.9"])
    one, two = Bench(run, 1, 4), Bench(run, 2, 4)
    assert tracing(two).seconds() == pytest.approx(2 * tracing(one).seconds())
    with pytest.raises(OutOfTime):
        tracing(one).run(0.0)
    assert Labels.of(one) is None
    tracing(one).run(float("inf"))
    files = {path: path.stat().st_mtime_ns for path in one.folder.glob("labels-*/*")}
    assert tracing(one).seconds() == 0 and len(Labels.of(one).prompts.every) == 2
    tracing(two).run(float("inf"))
    assert all(path.stat().st_mtime_ns == time for path, time in files.items())
    labels = Labels.of(two)
    assert len(labels.prompts.every) == 4 and len(labels.roots.settings) == 2
    assert (
        1
        <= labels.figure("traversal", "p0.9", [tree_index(Action(2, 0, 2))], TOKENS, "code")[0, 0]
        <= 3
    )
    assert str(labels) == "On 4 prompts (code 2, prose 2), settings t1.0, p0.9"
    assert len(Labels.of_traces(two).prompts.every) == 4  # this run has no traces of its own
    columns = labelled.store(two).read("test")
    here = columns["prompt_id"] == "code0"
    own, store = (
        TraceStore(run / "traces"),
        {name: column[here] for name, column in columns.items()},
    )
    try:
        own.write("traces-00000-of-00001.parquet", {**{name: _plain(column) for name, column in store.items()},
                                                    "split": ["train"] * int(here.sum())})  # fmt: skip
        own.finish()
        traced = Labels.of_traces(two)
        assert [prompt.id for prompt in traced.prompts.every] == ["code0"] and len(
            traced.roots
        ) == here.sum()
        own.clear()
        without = {name: _plain(column) for name, column in store.items() if name != "gbv"}
        own.write(
            "traces-00000-of-00001.parquet", {**without, "split": ["train"] * int(here.sum())}
        )
        own.finish()
        assert len(Labels.of_traces(two).prompts.every) == 4  # not all rules were traced
    finally:
        rmtree(run / "traces")


def _plain(column: np.ndarray) -> list | torch.Tensor:
    return column.tolist() if column.dtype.kind in "UO" else torch.from_numpy(column)


def test_heads_of_the_benchmark_are_taken_with_what_it_decoded(run, tmp_path):
    for name in talf.BENCHED.values():
        (tmp_path / "steps" / name / "export").mkdir(parents=True)
        (tmp_path / "steps" / name / "config.json").write_text('{"steps": 7}')
    lengths = {"EAGLE": 10, "HASS": 8, "TALF, k = 4": 5}
    records = [
        Record(
            setting,
            f"{method} / beam",
            f"p{i}",
            "code",
            20,
            steps if setting == "T=0" else 1,
            0,
            1.0,
        )
        for setting in ("T=0", "T=1")
        for i in range(4)
        for method, steps in lengths.items()
    ]
    (tmp_path / "records.jsonl").write_text("".join(record.line() + "\n" for record in records))
    own = talf.Talf(Bench(run, 1, heads=tmp_path))
    assert own.folder(talf.TALF) == tmp_path / "steps" / "talfk4"
    assert own.works()[0].seconds() == 0 and not any("topk" in work.name for work in own.works())
    found, other = (claim.verdict() for claim in own.claims()[:2])
    assert found["figures"]["TALF over HASS, Beam search"] == pytest.approx([1.6] * 3)
    assert other["figures"]["HASS over EAGLE-2, Beam search"] == pytest.approx([1.25] * 3)
    assert (
        found["figures"]["TALF over HASS, SALF"] is None
        and "7 steps" in found["reason"]
        and "code 4" in found["reason"]
    )
    assert talf.Talf(Bench(run, 1)).elsewhere is None


@pytest.fixture
def small(monkeypatch):
    """Smaller trees, fewer prompts to tune on."""
    monkeypatch.setattr(dynatree, "NODES", 8)
    monkeypatch.setattr(dyspec, "BUDGETS", (4, 9))
    monkeypatch.setattr(dyspec, "REAL", (6, 8))
    monkeypatch.setattr(dyspec, "SAMPLED", 1)
    monkeypatch.setattr(talf, "THRESHOLDS", ["0.0", "0.6", "0.9"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "paper", [own if own == "gbv" else pytest.param(own, marks=pytest.mark.law) for own in PRINTED]
)
def test_a_command_measures_all_of_a_paper_and_goes_on(
    run, small, tmp_path, monkeypatch, capsys, paper
):
    limits = "--prompts", "1", "--new-tokens", "6", "--head-steps", "1", "1"
    arguments = [paper, "--run", str(run), *limits, "--out", str(tmp_path)]
    command.main(arguments)
    assert "of measuring are left" in " ".join(capsys.readouterr().out.split()) and not list(
        tmp_path.iterdir()
    )
    command.main([*arguments, "--all"])
    found = json.loads((tmp_path / f"{paper}.json").read_text())
    text = (tmp_path / f"{paper}.md").read_text()
    for name, own in found["tables"].items():
        assert f"## {name}\n" in text and (name.startswith("Figure") == ("picture" in own))
        assert any(cell for row in own["cells"] for cell in row), name
        assert "picture" not in own or (tmp_path / own["picture"]).stat().st_size > 1000
    assert {own["verdict"] for own in found["verdicts"]} <= {HOLDS, FAILS, UNSEEN}
    folder = next((run / "papers").iterdir())
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    command.main([*arguments, "--all"])
    assert files == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    page = tmp_path / "docs" / "reproduction.md"
    command.main(["page", "--out", str(tmp_path), "--page", str(page)])
    assert (
        found["verdicts"][0]["claim"] in page.read_text() and f"(../{paper}.md)" in page.read_text()
    )
    with pytest.raises(SystemExit, match="no such table"):
        command.main([*arguments, "--table", "99"])
