"""Recommend settings for an engine without a selector.

Example: `nde recommend run=NAME`.

It prints a table, and writes the configurations of vLLM and SGLang into the run's folder
`recommend`. With `acceptance` it reads no run: it prints what a draft of such numbers would win.
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from nde_talf.pipelines.commands.quiet import quiet  # isort: skip (before torch)

from pydantic import Field
from rich.box import SIMPLE
from rich.table import Table

from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.common.bootstrap import shown, times
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import refuse_link, remove, write_json
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.common.settings import Count, Part, Place, Text, one_of, settings
from nde_talf.evaluation.speed_estimate import Prices
from nde_talf.pipelines.config.command_line import launch
from nde_talf.pipelines.config.schema import MEASURED, TABLE, PathsConfig, table_file
from nde_talf.pipelines.runs.finished import Run
from nde_talf.pipelines.runs.manifest import MANIFEST, check_files, identity, read_manifest

if TYPE_CHECKING:
    from nde_talf.data.engines.vllm_speculation import Method
    from nde_talf.evaluation.recommendation import Recommendation
    from nde_talf.selector.prices import LatencyTable

FOLDER = "recommend"
BATCHES = (1, 4, 16, 64, 256)
STOPS = "By these prices drafting stops paying at a batch of {}."


@settings()
class RecommendConfig:
    """Settings of a recommendation."""

    run: Text = "default"
    """Name of a run with traces and a latency table, which is its folder under paths.checkpoints.
    """
    setting: Annotated[str, one_of(SETTINGS)] | None = None
    """Sampling setting of the requests, one that was traced; null: all traced ones, equally often.
    """
    rejection: Annotated[str, one_of(("standard", "block"))] = "standard"
    """Verification of a path in the engine: standard, or block verification
    (rejection_sample_method=block in vLLM).
    """
    table: Place = MEASURED
    """Prices: measured (the run's own latency table), a profile of configs/latency, or a .json
    file.
    """
    acceptance: Part | None = None
    """Chance that a drafted token is accepted, for a table before anything is trained."""
    draft_price: Annotated[float, Field(ge=0, le=100)] = 0.05
    """With acceptance: the time of the draft's pass over a token, in passes of the target."""
    free_rows: Count = 200
    """With acceptance: tokens that the target scores in the time of one; about 200 on a GPU, 2 to 8
    on a CPU core.
    """
    paths: PathsConfig = field(default_factory=PathsConfig)


def recommend(config: RecommendConfig) -> None:
    """Print and write what is recommended.

    Raises UserError where traces or a table are missing, damaged, or of another pair.
    """
    if config.acceptance is not None:
        prices = Prices(config.acceptance, config.draft_price, config.free_rows)
        console.print(_before_training(prices))
        return
    run = Run(config.run, config.paths.checkpoints)
    quiet()
    from nde_talf.evaluation import recommendation as choices
    from nde_talf.pipelines.stages.selector import roots_of

    made = check_stage(run, "traces")["traces"]
    names, rule = [config.setting] if config.setting else made["settings"], config.rejection
    if missing := {*names} - {*made["settings"]}:
        raise UserError(
            f"setting={min(missing)}: it was not traced. Choose from {', '.join(made['settings'])},"
            " or add it to traces.settings."
        )
    if made["draft_temperature"] == "raw":
        console.print(
            "! these traces are of an unwarped draft (traces.draft_temperature=raw); engines warp"
            " it like the target"
        )
    table = _table(config, run, made["drafter"])
    splits = roots_of(run.stage("traces"), made["verifiers"])
    training, others = (choices.one_traffic(roots, names) for roots in splits)
    best = choices.recommend(training, others, table, rule)
    method = _method(run, made["drafter"])
    choice = (method, best.lengths, rule, [SETTINGS[name] for name in names])
    vllm, sglang = choices.vllm_config(*choice), choices.sglang_options(*choice)
    figures = {
        "settings": names,
        "rejection": rule,
        "table": config.table,
        **asdict(best),
        "vllm": vllm,
        "sglang": sglang,
    }
    console.print(_shown(f"{config.run} ({', '.join(names)})", best))
    out = run.folders[0] / FOLDER
    refuse_link(out)
    lines = [
        "vLLM, SGLang: do not speculate; plain decoding is faster than every path, at every batch"
        " size."
    ]
    if vllm is None:
        remove(out / "vllm.json")  # what an earlier command recommended
    else:
        write_json(out / "vllm.json", vllm)
        serve, file = map(shlex.quote, (run.pair.where("target"), str(out / "vllm.json")))
        lines = [
            f'vLLM: vllm serve {serve} --speculative-config "$(cat {file})"',
            f"SGLang: {' '.join(sglang)}",
            end_of_drafting(best.lengths),
        ]
    write_json(out / "recommend.json", figures)
    for line in (*lines, f"Figures: {out}/recommend.json"):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def end_of_drafting(lengths: Sequence[int]) -> str:
    """Say from which batch size on plain decoding is best.

    lengths: tokens to draft in batches of 1, 2, ...; 0: plain decoding. One of them is above 0.
    """
    last = max(count for count, length in enumerate(lengths, 1) if length)
    if last == len(lengths):
        return (
            f"On training prompts drafting is faster in all batches up to {last}, the largest that"
            " this latency table knows. Where an interval above is not all above 1, it may gain"
            " nothing."
        )
    return f"{STOPS.format(last + 1)} vLLM stops there; SGLang's options draft at every size."


def _method(run: Run, drafter: str) -> "Method":
    """Return how an engine drafts one token with the run's draft."""
    from nde_talf.data.engines.vllm_speculation import draft_method, head_method

    if drafter == "head":
        return head_method(str((run.stage("draft") / "export").resolve()), 1)
    draft = run.pair.where("draft")
    return draft_method(str(Path(draft).resolve()) if Path(draft).is_dir() else draft, 1)


def _advice(run: Run, stage: str) -> str:
    if run.shipped:
        return "make a run: nde run."
    if run.pair.has_draft or (run.stage("draft") / "export").is_dir():
        return f"run stage={stage}."
    return (
        "the run has neither a draft model nor a head: stage=draft trains a head, and"
        " model.draft=distil a draft model."
    )


def check_stage(run: Run, stage: str) -> dict:
    """Return the settings that a stage was made with.

    Raises UserError if it is not there, damaged, or made from other stages than the run's.
    """
    folder = run.stage(stage)
    if not (folder / MANIFEST).exists():
        raise UserError(
            f"{folder}: stage={stage} is not finished, and recommend reads it; "
            + _advice(run, stage)
        )
    manifest = read_manifest(folder)
    check_files(folder, manifest, stage)
    for name, used in manifest["inputs"].items():
        source = run.stage(name)
        if (source / MANIFEST).exists() and identity(read_manifest(source)) != used:
            raise UserError(
                f"{folder}: it is of another {name} than {source}; make it again with"
                f" stage={stage} force=true."
            )
    return manifest["settings"]


def _table(config: RecommendConfig, run: Run, drafter: str) -> "LatencyTable":
    """The prices. Raises UserError for a table of another drafter or of models of other sizes."""
    from nde_talf.selector.prices import AGREE, LatencyTable

    measured = run.stage("latency") / TABLE
    if config.table == MEASURED:
        timed = check_stage(run, "latency")["drafter"]
        if timed != drafter:
            raise UserError(
                f"{measured.parent}: it has prices of traces.drafter={timed}, and the traces are of"
                f" drafter={drafter}; run the other stage too."
            )
    table = LatencyTable.load(table_file(config.table, measured.parent, "table"))
    if config.table == MEASURED and table.disagreement > AGREE:
        console.print(
            f"! {measured}: two repeats of it disagree by {table.disagreement:.0%}; measure it when"
            " nothing else runs"
        )
    sizes = LatencyTable.load(measured).models if measured.exists() else {}
    if table.models and sizes and sizes != table.models:
        raise UserError(
            f"table={config.table}: its models have the sizes {table.models}, and this run's"
            f" {sizes}. Give a table of this pair, or leave table out."
        )
    return table


def _shown(title: str, best: "Recommendation") -> Table:
    """Tabulate the figures of held-out roots."""
    from nde_talf.evaluation.loops import TITLES
    from nde_talf.evaluation.recommendation import NONE

    columns = ("best on training prompts", "tokens\na step", "tokens/s", "over plain")
    table = Table(*columns, title=f"{title}: held-out prompts, by labels and prices", box=SIMPLE)
    shapes = {
        f"batch of {count}: {shape.tree.depth or 'no'} drafted": shape
        for count, shape in best.paths.items()
    }
    shapes |= {
        f"{TITLES[name]}: {tuple(shape.tree) if shape.tree != NONE else 'plain'}": shape
        for name, shape in best.trees.items()
    }
    for name, shape in shapes.items():
        speed, gain = shown(shape.tokens_per_second, 0), times(shape.speedup)
        table.add_row(name, f"{shape.block_efficiency:.2f}", speed, gain)
    return table


def _before_training(prices: Prices) -> Table:
    """Say what the numbers are, and tabulate the best path by batch size."""
    console.print(
        f"A path of drafted tokens, each accepted with chance {prices.acceptance:g}. The draft's"
        f" pass takes {prices.draft_price:g} of the target's, which scores {prices.free_rows}"
        f" tokens in the time of one. {STOPS.format(prices.first_without_gain())} The measured"
        " table of a run: nde recommend run=NAME.",
        soft_wrap=True,
    )
    table = Table("batch", "best to draft", "tokens\na step", "over plain", box=SIMPLE)
    for batch in BATCHES:
        length, tokens, speedup = prices.best_path(batch)
        table.add_row(str(batch), str(length or "nothing"), f"{tokens:.2f}", f"{speedup:.2f}")
    return table


def main() -> None:
    """The command `nde recommend`."""
    launch("recommend", RecommendConfig, recommend)


if __name__ == "__main__":
    main()
