"""The loop against plain decoding and against transformers' own loops, in tokens/s.

Plain decoding has the same forward passes; of transformers' loops the best counts that a user could
run on the same pair.

`python -m benchmarks.decode [--run checkpoints/default]`, after `python -m
pipelines.run`. All methods are interleaved prompt by prompt. What can be tuned is tuned first, at
each temperature, on training prompts by time in the loop, ours and theirs with about as many
trials: trees for the LM draft and for the run's head, sizes of n-grams, schedules of assisted
generation, sizes of prompt lookup.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from nde_talf.pipelines.commands.quiet import quiet  # isort: skip (before torch)

import torch

from benchmarks.timing import doubts, report
from nde_talf.data.text.pair import Pair
from nde_talf.decoding.common.bootstrap import shown
from nde_talf.decoding.drafters.ngram_settings import NgramConfig
from nde_talf.decoding.sampling.rng import SamplingSetting
from nde_talf.decoding.step import PHASES
from nde_talf.draft_training.export.head_format import load_head
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.evaluation.bench import NGRAM, Bench
from nde_talf.evaluation.benchmark import Record, read_records, run_benchmark
from nde_talf.evaluation.loops import assisted_title
from nde_talf.evaluation.methods import GROUPS, plan_methods
from nde_talf.evaluation.protocol import BASELINE
from nde_talf.evaluation.speed import speed_ratio
from nde_talf.evaluation.table import acceptance_by_position, by_setting, histogram, row
from nde_talf.evaluation.tuning import Method, Tuner
from nde_talf.selector.network import Selector

METHODS = {"assisted", "transformers", "selector", "head", "ngram"}
TUNED = {
    f"{NGRAM} ({size} to {NgramConfig().max_size} tokens, {nodes} nodes, threshold {at:g})": (
        NgramConfig(min_size=size, nodes=nodes, threshold=at)
    )
    for size, nodes, at in product((1, 2), (4, 8, 16), (0.1, 0.3))
}
"""N-grams to tune."""
COLUMNS = [
    "setting",
    "method",
    "tokens a pass",
    "nodes",
    "tokens/s",
    "over autoregressive",
    "in CPU time",
    "over transformers' best",
    "ms a step",
    "accepted at depth 1, 2, ...",
    *(f"{phase}, of the step" for phase in PHASES),
]


def outside(bench: Bench) -> Iterator[Method]:
    """Yield transformers' plain decoding, prompt lookup, and assistance with default schedule."""
    plain, lookup = "transformers plain", "transformers prompt lookup"
    yield Method(plain, plain, [bench.theirs(plain)])
    grid = [
        bench.theirs(
            f"{lookup} ({tokens} tokens, n up to {size})",
            prompt_lookup_num_tokens=tokens,
            max_matching_ngram_size=size,
        )
        for size, tokens in product((1, 2, 3, 4), (2, 4, 10))
    ]
    yield Method("prompt lookup", lookup, grid)
    if bench.assists:
        title = assisted_title(None)
        yield Method("assisted by default", title, [bench.theirs(title, bench.draft)])


GROUPS["transformers"] = outside


def rows(records: list[Record]) -> tuple[list[list], list[str]]:
    """One row a setting and method, and what transformers' best is at each."""
    table, notes = [], []
    for setting, methods in by_setting(records).items():
        lines = {name: row(name, own, methods[BASELINE]) for name, own in methods.items()}
        theirs = [name for name, line in lines.items() if line.outside]
        best = max(theirs, key=lambda name: lines[name].tokens_per_second)
        notes.append(f"{setting}: transformers' best is {best}.")
        for name, line in lines.items():
            seconds, steps = (
                sum(getattr(r, field) for r in methods[name]) for field in ("seconds", "steps")
            )
            table.append(
                [
                    setting,
                    name,
                    shown(line.block_efficiency),
                    f"{line.nodes:.1f}",
                    f"{line.tokens_per_second:.0f}",
                    shown(line.speedup),
                    shown(line.cpu_speedup),
                    shown(speed_ratio(methods[name], methods[best])),
                    f"{1e3 * seconds / steps:.1f}",
                    " ".join(f"{x:.2f}" for x in acceptance_by_position(histogram(methods[name]))),
                    *(f"{line.shares[p]:.1%}" if line.shares else "–" for p in PHASES),
                ]
            )
    return table, notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument(
        "--tuning", type=int, default=5, help="training prompts on which settings are chosen"
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="decode", help="of the files in benchmarks/results")
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    pair = Pair(options.run / "pair")
    target, draft = pair.models(options.device, "float32")
    prompts = [(p.id, p.kind, p.tokens) for p in pair.prompts("test", options.prompts, "--prompts")]
    tuning = [p.tokens for p in pair.every_prompt() if p.split == "trace"][: options.tuning]
    head, exports = options.run / "draft" / "export", options.run / "selector" / "export"
    with TemporaryDirectory() as folder:
        records = Path(folder) / "records.jsonl"
        for temperature in options.temperatures:
            bench = Bench(
                target=target,
                draft=draft,
                setting=SamplingSetting(temperature),
                tune=Tuner(Path(folder) / f"{temperature}.json", options.new_tokens, tuning),
                ngrams=TUNED,
                head=EagleDrafter(load_head(head, target)) if head.is_dir() else None,
                selectors={
                    export.name: Selector.from_pretrained(export)
                    for export in (sorted(exports.iterdir()) if exports.is_dir() else ())
                },
            )
            run_benchmark(plan_methods(bench, METHODS).methods, prompts, bench.setting, records, 0)
        read = list(read_records(records))
    table, notes = rows(read)
    report(options.name, COLUMNS, table, [*notes, *doubts(read)])


if __name__ == "__main__":
    main()
