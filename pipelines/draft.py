"""Stage draft: train a draft head, judge it on held-out text, export it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.files import checksum, write_json
from data.pair import Pair, spread
from draft_training.export import save_head
from draft_training.families import not_for_vllm
from draft_training.held_out import held_out_report
from draft_training.talf import fit_head
from pipelines.config import Config
from pipelines.stage import Stage, console
from pipelines.tracking import tracked

HELD_OUT_ROWS = 16  # rows of held-out text that the figures are computed on


def settings(config: Config) -> dict[str, Any]:
    draft = asdict(config.draft)
    for name in ("nodes_in_pass", "checkpoint_seconds"):
        draft.pop(name)
    weights = Path(config.draft.warm_start or "") / "model.safetensors"
    return {"draft": draft, "warm_start": checksum(weights) if config.draft.warm_start and weights.exists() else None}


def work(config: Config, folders: dict[str, Path]) -> dict[str, Any]:
    folder, pair = folders["draft"], Pair(folders["pair"])
    target = pair.target(config.model.device, config.model.dtype)
    with tracked(config, "draft", folder) as tracker:
        rows = pair.rows("train")
        head = fit_head(target, rows, config.draft, folder / "training", tracker.loggers("head"))
        save_head(head, folder / "export")
        if reason := not_for_vllm(head.family):
            console.print(f"[yellow]{reason}[/]")
        held_out = spread(pair.rows("held_out"), HELD_OUT_ROWS)
        report = held_out_report(head, target, held_out, config.draft.k, config.draft.depth)
        write_json(folder / "held_out.json", report)
        tracker.log(report)
        tracker.artifact(f"{config.run}-head", "draft-head", folder / "export")
    agreement = ", ".join(f"{value:.3f}" for value in report["agreement"])
    console.print(f"held-out top-1 agreement with the target by depth: {agreement}")
    return report


STAGE = Stage("draft", "draft", lambda config: ("pair",), settings, work)
