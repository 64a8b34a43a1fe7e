"""Recommend vLLM's settings from a run's traces and latency table, for `nde recommend`."""

import shlex
from dataclasses import asdict
from pathlib import Path

from nde_talf.data.engines.vllm_speculation import Method, draft_method, head_method
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.common.bootstrap import shown, times
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import refuse_link, remove, write_json
from nde_talf.decoding.common.progress import console
from nde_talf.evaluation.recommendation import Choice, one_traffic, recommend, vllm_config
from nde_talf.pipelines.commands.recommend import RecommendConfig
from nde_talf.pipelines.config.schema import TABLE
from nde_talf.pipelines.runs.finished import Run
from nde_talf.pipelines.runs.manifest import MANIFEST, check_files, identity, read_manifest
from nde_talf.pipelines.runs.run_models import pair_of
from nde_talf.pipelines.stages.selector import roots_of
from nde_talf.selector.prices import AGREE, LatencyTable

FOLDER = "recommend"


def recommend_from(config: RecommendConfig, run: Run) -> None:
    """Print and write what a run's traces recommend.

    Raises UserError where traces or a table are missing, damaged, or of another pair.
    """
    made = _settings_of(run, "traces")["traces"]
    names = [config.setting] if config.setting else made["settings"]
    if missing := {*names} - {*made["settings"]}:
        raise UserError(
            f"setting={min(missing)}: it was not traced. Choose from {', '.join(made['settings'])},"
            " or add it to traces.settings."
        )
    table = _table(run, made["drafter"])
    splits = roots_of(run.stage("traces"), made["verifiers"])
    training, others = (one_traffic(roots, names) for roots in splits)
    best = recommend(training, others, table)
    method = _method(run, made["drafter"])
    vllm = vllm_config(method, best.tree.depth, [SETTINGS[name] for name in names])
    figures = {"settings": names, **asdict(best), "vllm": vllm}
    console.print(f"{config.run} ({', '.join(names)}), {_shown(best)}")
    out = run.folders[0] / FOLDER
    refuse_link(out)
    lines = ["vLLM: do not speculate; plain decoding is faster than every path."]
    if vllm is None:
        remove(out / "vllm.json")  # what an earlier command recommended
    else:
        write_json(out / "vllm.json", vllm)
        serve, file = map(shlex.quote, (pair_of(run).where("target"), str(out / "vllm.json")))
        lines = [
            f'vLLM: vllm serve {serve} --speculative-config "$(cat {file})"',
            "These prices are of one request at a time: the more at once, the less drafting pays.",
        ]
    write_json(out / "recommend.json", figures)
    for line in (*lines, f"Figures: {out}/recommend.json"):
        console.print(line)


def _method(run: Run, drafter: str) -> Method:
    """Return how an engine drafts one token with the run's draft."""
    if drafter == "head":
        return head_method(str((run.stage("draft") / "export").resolve()), 1)
    draft = pair_of(run).where("draft")
    return draft_method(str(Path(draft).resolve()) if Path(draft).is_dir() else draft, 1)


def _settings_of(run: Run, stage: str) -> dict:
    """Return the settings that a stage was made with.

    Raises UserError if it is not there, damaged, or made from other stages than the run's.
    """
    folder = run.stage(stage)
    if not (folder / MANIFEST).exists():
        raise UserError(
            f"{folder}: stage={stage} is not finished, and recommend reads it: run stage={stage} of"
            " a run of your own."
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


def _table(run: Run, drafter: str) -> LatencyTable:
    """Return the run's prices. Raises UserError for another drafter's."""
    file, timed = run.stage("latency") / TABLE, _settings_of(run, "latency")["drafter"]
    if timed != drafter:
        raise UserError(
            f"{file.parent}: it has prices of traces.drafter={timed}, and the traces are of"
            f" drafter={drafter}; run the other stage too."
        )
    table = LatencyTable.load(file)
    if table.disagreement > AGREE:
        console.print(
            f"! {file}: two repeats of it disagree by {table.disagreement:.0%}; measure it when"
            " nothing else runs"
        )
    return table


def _shown(best: Choice) -> str:
    """Write out the figures of held-out roots."""
    speed, gain = shown(best.tokens_per_second, 0), times(best.speedup)
    return (
        f"best on training prompts: a path of {best.tree.depth or 'no'} drafted tokens. On held-out"
        f" ones, by labels and prices: {best.block_efficiency:.2f} tokens a step, {speed} tokens/s,"
        f" {gain} plain decoding."
    )
