"""What selectors win on the testbed, from the files of finished runs: online, offline, under other latency tables, and what
each of their parts is worth.

`python -m benchmarks.selector [--run checkpoints/testbed] [--machines checkpoints/testbed_machines] [--online RUN ...]
[--narrow RUN]`. The commands that make the runs are COMMANDS; --online: runs whose evaluations, of other settings or seeds, are
reported together in place of the first one's; --narrow: a run of the default pair. Writes results/selector.md and
docs/selector.png.
"""

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks.rows import doubts
from benchmarks.timing import RESULTS
from decoding.common.bootstrap import shown
from decoding.common.files import read_json
from evaluation.benchmark import read_records, together
from evaluation.plots import selector_ratios
from evaluation.speed import selectors_versus
from evaluation.table import BASELINE, Row, tabulate
from evaluation.text import ablation_table, markdown
from pipelines.stage import BEGUN

DOCS = Path(__file__).parents[1] / "docs"
COMMANDS = """T="run=testbed data=testbed model=testbed traces=testbed selector=small"
python -m pipelines.run $T stage=pair
python -m pipelines.run $T stage=latency
python -m pipelines.run $T stage=traces engine.workers=4 model.threads=1
python -m pipelines.run $T stage=selector
python -m pipelines.run $T stage=ablations
python -m pipelines.run $T stage=evaluate evaluation=selector
python -m pipelines.run $T run=testbed_machines base=testbed stage=selector selector.verifiers=[traversal] \\
    selector.tables=[measured,a100_70b_8b,h100_27b_270m,a100_70b_eagle]
N="run=narrow base=default traces.settings=[t0.2,t0.6,t1.0,p0.9] traces.train_prompts=60"
python -m pipelines.run $N stage=traces
python -m pipelines.run $N stage=selector
python -m pipelines.run $N stage=evaluate evaluation=selector evaluation.prompts=40
python -m benchmarks.selector --narrow checkpoints/narrow"""
INTRODUCTION = """# Selector: what it wins, and where

One pair on traffic of five domains (`data=testbed model=testbed`): a 12-layer target trained on code, docstrings, GSM8K,
WikiText-2 and Alpaca-style dialogues; a 1-layer draft distilled from it **on code alone**. Overlap Σ min(p, q) at T = 1:
{domains}. Prompts of 16 to 160 tokens, split by prompt. {machine}. The sets may be local files
(`data.mix.<domain>.source=`)."""
TWO_RUNS = """\
The online part is of a second run with the pair of the first (`model.target=`, `model.draft=`): prompts none of
which is traced, each setting and seed a run of its own beside the others (`base=`, `evaluation.settings=`, `evaluation.seed=`),
all given to `--online`. The rest is of the first, with
`data.prompt_count=240 data.test_share=0.2 traces.train_prompts=150`: in the second, prompts of the rarer kinds were not yet
spread over all of them, and those held out of the traces were of two domains alone."""
OFFLINE_NOTE = """\
Against the selector's own best static tree of the setting. How long to train, and whether to choose at all, comes from
folds of the training prompts; the held-out prompts take no part. "Root by root" chooses by the labels themselves: between
scoring on other super-trees than were chosen by (too low: labels are noisy) and on the same (too high)."""
ABLATIONS_NOTE = """\
The main selector, trained on three folds of the training prompts while the fourth says when to stop. "Eq. 12"
stands for the whole loss of the NDE paper."""
NARROW = """\
A pair of one domain, Python's sources, whose draft knows it as well as its target. Where choosing did not win on held-out
training prompts, the selector is the best static tree: with the same block efficiency, ratios are the clock's noise."""
OFFLINE = {
    "selector": "NDE",
    "static_domain": "best static by domain",
    "over_domain": "NDE over by domain",
    "entropy_rule": "by draft entropy",
    "static_l1_0": "best static, L1 = 0",
    "traversal_static": "Traversal's best static",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/testbed"))
    parser.add_argument("--machines", type=Path, default=Path("checkpoints/testbed_machines"))
    parser.add_argument("--online", type=Path, nargs="+")
    parser.add_argument("--narrow", type=Path)
    options = parser.parse_args()
    offline = read_json(options.run / "selector" / "offline.json")
    machines = read_json(options.machines / "selector" / "offline.json")
    ablations = read_json(options.run / "ablations" / "ablations.json")
    online = [Decoded(run) for run in options.online or [options.run]]
    note = TWO_RUNS if options.online else None
    narrow = options.narrow and Decoded(options.narrow)
    text = "\n\n".join(_sections(offline, machines, ablations, online, note, narrow)) + "\n"
    (RESULTS / "selector.md").write_text(text)
    selector_ratios(offline).savefig(DOCS / "selector.png")
    print(text)


class Decoded:
    """The evaluation of a run, finished or as far as it has come."""

    def __init__(self, run: Path):
        self.report = run / "report"
        made = read_json(self.report / BEGUN)["settings"]
        self.selectors, self.seed = made["selectors"], made["seed"] + made["evaluation"].get("seed", 0)
        self.new_tokens = made["evaluation"]["new_tokens"]
        self.records = list(read_records(self.report / "records.jsonl"))


def _sections(
    offline: dict, machines: dict, ablations: dict, online: list[Decoded], note: str | None, narrow: Decoded | None
) -> Iterable[str]:
    first = read_json(online[0].report / "results.json")
    domains = ", ".join(f"{name} {own['overlap']['1.0']:.2f}" for name, own in first["pair"]["domains"].items())
    machine = first["environment"]
    yield INTRODUCTION.format(domains=domains, machine=f"{machine['machine']}, torch {machine['torch']}")
    yield f"```\n{COMMANDS}\n```"
    if note:
        yield note
    yield "Ratios of total tokens/s; brackets are 95 % bootstrap intervals over prompts."
    yield "## Online: while decoding, all methods interleaved prompt by prompt"
    yield from _online(online)
    if narrow:
        yield "## Online on one domain: the default pair"
        yield NARROW
        yield from _online([narrow])
    yield "## Offline: held-out roots"
    yield OFFLINE_NOTE
    rows = (_offline_row(name, *entry) for name, tables in offline.items() for entry in _settings(tables["measured"]))
    yield markdown(["selector", "setting", "roots", "best static tree", *OFFLINE.values(), "root by root", "worst 5 %"], rows)
    yield "One selector, trained and evaluated under four latency tables at once. The three of `configs/latency` are modelled:"
    rows = (
        [table, *(shown(own["all"].get(key), 3) for key in list(OFFLINE)[:4]), _bounds(own["all"])]
        for tables in machines.values()
        for table, own in tables.items()
    )
    yield markdown(["latency table", *list(OFFLINE.values())[:4], "root by root"], rows)
    yield "## Ablations"
    yield ABLATIONS_NOTE
    yield ablation_table(ablations).strip()


def _online(runs: list[Decoded]) -> Iterable[str]:
    records = together(record for run in runs for record in run.records)
    yield f"Decoded: {'; '.join(_decoded(runs))}."
    yield from doubts(records)
    for method, others in selectors_versus(records, runs[0].selectors).items():
        settings = list(dict.fromkeys(setting for ratios in others.values() for setting in ratios))
        rows = ([other, *(shown(ratios.get(s), 3) for s in settings)] for other, ratios in others.items())
        yield f"{method}, tokens/s against\n\n" + markdown(["", *settings], rows)
    for setting, rows in tabulate(records).items():
        columns = ["method", "block efficiency", "tokens/s", "overhead in a step"]
        cells = ([r.method, shown(r.block_efficiency), f"{r.tokens_per_second:.0f}", _overhead(r)] for r in rows)
        yield f"{setting}\n\n" + markdown(columns, cells)


def _decoded(runs: list[Decoded]) -> Iterable[str]:
    counts: dict[str, Counter] = {}
    for run in runs:
        own = Counter(record.setting for record in run.records if record.method == BASELINE)
        counts.setdefault(f"{run.new_tokens} tokens each with seed {run.seed}", Counter()).update(own)
    for what, own in counts.items():
        yield f"{what}, " + ", ".join(f"{count} prompts at {setting}" for setting, count in own.items())


def _settings(own: dict) -> list[tuple[str, dict]]:
    return [*own["settings"].items(), ("all", {**own["all"], "roots": own["validation_roots"], "static": ""})]


def _offline_row(name: str, setting: str, own: dict) -> list[str]:
    static = str(tuple(own["static"])) if own["static"] else ""
    ratios = (shown(own.get(key), 3) for key in OFFLINE)
    return [name, setting, str(own["roots"]), static, *ratios, _bounds(own), f"{own['worst_5_percent']:.2f}"]


def _bounds(own: dict) -> str:
    return f"{own['split_half'][0]:.3f} to {own['same_half'][0]:.3f}"


def _overhead(row: Row) -> str:
    return f"{100 * row.shares['policy']:.1f} %" if row.shares else "–"


if __name__ == "__main__":
    main()
