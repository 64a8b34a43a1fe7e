"""Compute, print and write the figures of `nde_talf.pipelines.recommend`, its settings read."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.table import Table

from nde_talf.data.engines.vllm_speculation import draft_method, head_method
from nde_talf.data.text.pair import Pair
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.bootstrap import shown, times
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import write_json
from nde_talf.decoding.common.progress import console
from nde_talf.evaluation.loops import TITLES
from nde_talf.evaluation.recommend import (
    NONE,
    Recommendation,
    one_traffic,
    recommend,
    sglang_config,
    vllm_config,
)
from nde_talf.pipelines.config import MEASURED, TABLE, table_file
from nde_talf.pipelines.finished import Run
from nde_talf.pipelines.manifest import MANIFEST, faults, identity, read_manifest
from nde_talf.selector.latency import AGREE, LatencyTable
from nde_talf.selector.roots import Roots, roots_from_traces
from nde_talf.selector.rows import columns

if TYPE_CHECKING:
    from nde_talf.pipelines.recommend import RecommendConfig

FOLDER = "recommend"
ONE_SEQUENCE = (
    "This latency table knows batches of one sequence only, so there is no schedule by batch size. "
    "Tables that stage=latency measures know up to 16."
)


def report(config: "RecommendConfig", run: Run) -> None:
    """See `nde_talf.pipelines.recommend`.

    Raises UserError where traces or a table are missing, damaged, or of another pair.
    """
    made = _finished(run, "traces")["settings"]["traces"]
    names = [config.setting] if config.setting else made["settings"]
    if made["draft_temperature"] == "raw":
        console.print(
            "! these traces are of an unwarped draft (traces.draft_temperature=raw); engines warp"
            " it like the target"
        )
    table = _table(config, run)
    training, others = (one_traffic(roots, names) for roots in _roots(run, made["verifiers"]))
    rule, settings = config.rejection, [SETTINGS[name] for name in names]
    best = recommend(training, others, table, rule)
    lengths, candidates = best.lengths, best.candidates
    head = made["drafter"] == "head"
    pair = Pair(run.stage("pair"))
    folder = str(run.stage("draft") / "export") if head else pair.where("draft")
    folder = (
        str(Path(folder).resolve()) if Path(folder).is_dir() else folder
    )  # else a name on the hub
    method = head_method(folder, 1) if head else draft_method(folder, 1)
    vllm = vllm_config(method, lengths, rule, settings)
    options, adaptive = sglang_config(method, lengths, candidates, rule, settings)
    out = run.folders[0] / FOLDER
    out.mkdir(exist_ok=True)
    _write(out / "vllm.json", vllm)
    _write(out / "sglang.json", adaptive)
    figures = {
        "settings": names,
        "rejection": rule,
        "table": config.table,
        "paths": {count: asdict(shape) for count, shape in best.paths.items()},
        "trees": {name: asdict(shape) for name, shape in best.trees.items()},
        "vllm": vllm,
        "sglang": {"options": options, "adaptive": adaptive},
    }
    write_json(out / "recommend.json", figures)
    console.print(_shown(f"{config.run} ({', '.join(names)})", best))
    if len(lengths) == 1:
        console.print(ONE_SEQUENCE)
    if vllm is None:
        lines = [
            "vLLM, SGLang: do not speculate; plain decoding is faster than every path, at every"
            " batch size."
        ]
    else:
        options += [f"--speculative-adaptive-config {out}/sglang.json"] if adaptive else []
        lines = [
            (
                f'vLLM: vllm serve {pair.where("target")} --speculative-config "$(cat'
                f' {out}/vllm.json)"'
            ),
            f"SGLang: {' '.join(options)}",
        ]
    for line in (*lines, f"Figures: {out}/recommend.json"):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _write(path: Path, content: dict[str, Any] | None) -> None:
    """None removes what an earlier command recommended."""
    if content is None:
        path.unlink(missing_ok=True)
    else:
        write_json(path, content)


def _finished(run: Run, stage: str) -> dict[str, Any]:
    """The manifest of a stage.

    Raises UserError if it is not there, damaged, or of another pair than the run's.
    """
    folder, pair = run.stage(stage), run.stage("pair")
    if not (folder / MANIFEST).exists():
        raise UserError(
            f"{folder}: stage={stage} is not finished, and recommend reads it; run stage={stage}."
        )
    found = read_manifest(folder)
    if broken := faults(folder, found):
        name, fault = next(iter(broken.items()))
        raise UserError(
            f"{folder / name}: {fault}. Put a good copy in its place, or redo it with stage={stage}"
            " force=true."
        )
    known = identity(read_manifest(pair)) if (pair / MANIFEST).exists() else None
    if known and found["inputs"].get("pair") != known:
        raise UserError(
            f"{folder}: it is of another pair than {pair}; make it again with stage={stage}"
            " force=true."
        )
    return found


def _table(config: "RecommendConfig", run: Run) -> LatencyTable:
    """The prices. Raises UserError for a table of models of other sizes."""
    measured = run.stage("latency") / TABLE
    if config.table == MEASURED:
        _finished(run, "latency")
        table = LatencyTable.load(measured)
        if table.disagreement > AGREE:
            console.print(
                f"! {measured}: two repeats of it disagree by {table.disagreement:.0%}; measure it"
                " when nothing else runs"
            )
        return table
    path = table_file(config.table, measured.parent, "table")
    table = LatencyTable.load(path)
    if (
        table.models
        and measured.exists()
        and (sizes := LatencyTable.load(measured).models)
        and sizes != table.models
    ):
        raise UserError(
            f"table={config.table}: its models have the sizes {table.models}, and this run's"
            f" {sizes}. Give a table of this pair, or leave table out."
        )
    return table


def _roots(run: Run, verifiers: list[str]) -> list[Roots]:
    found, store = [], TraceStore(run.stage("traces"))
    for split in ("train", "validation"):
        small, large = columns(store, split, run.folders[0])
        if not small:
            raise UserError(
                f"{store.folder}: it holds no {split} roots: raise traces.{split}_prompts."
            )
        found.append(
            roots_from_traces(small, verifiers, lambda text: console.print(f"! {text}"), large)
        )
    return found


def _shown(title: str, best: Recommendation) -> Table:
    """Figures of held-out roots."""
    table = Table(
        title=f"{title}: held-out prompts, by labels and prices",
        title_style="bold",
        title_justify="left",
        box=SIMPLE,
    )
    for column in ("best on training prompts", "tokens\na step", "tokens/s", "over plain"):
        table.add_column(column, justify="left" if column.startswith("best") else "right")
    named = {
        f"batch of {count}: {shape.tree.depth or 'no'} drafted": shape
        for count, shape in best.paths.items()
    }
    named |= {
        f"{TITLES[name]}: {tuple(shape.tree) if shape.tree != NONE else 'plain'}": shape
        for name, shape in best.trees.items()
    }
    for name, shape in named.items():
        table.add_row(
            name,
            f"{shape.block_efficiency:.2f}",
            shown(shape.tokens_per_second, 0),
            times(shape.speedup),
        )
    return table
