"""When a stage is finished, when it must be made again, and what its manifest says.

A stage's folder holds `manifest.json` once it is finished: the settings it was made with, the identities of the stages it
used, and its time. The same settings and inputs: nothing to do. Other inputs (an earlier stage was made again): made
again. Other settings: an error that names them, so that nothing finished is overwritten unasked.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data.files import checksum, read_json, remove, write_json
from data.progress import console
from decoding.errors import UserError
from pipelines.config import Config

MANIFEST = "manifest.json"
BEGUN = "begun.json"


@dataclass(frozen=True)
class Stage:
    """A stage: its name and folder, the stages it reads, the settings that decide what it makes, and the work.

    work(config, folders) writes into folders[name] and returns metrics for the manifest. whole(folder): whether all that a
    finished stage wrote is still there; what is missing is made again. show(folder): print what a finished stage found.
    """

    name: str
    folder: str
    needs: Callable[[Config], tuple[str, ...]]
    settings: Callable[[Config], dict[str, Any]]
    work: Callable[[Config, dict[str, Path]], dict[str, Any]]
    whole: Callable[[Path], bool] = lambda folder: True
    show: Callable[[Path], None] | None = None


def run_stage(stage: Stage, config: Config, stages: dict[str, Stage], force: bool) -> None:
    """Run `stage` unless it is finished. Raises UserError if a stage it needs is missing or its settings changed."""
    folders = {name: locate(stages[name], config) for name in stage.needs(config)}
    for name, folder in folders.items():
        if not (folder / MANIFEST).exists():
            raise UserError(f"stage={stage.name} needs what stage={name} makes, and {folder} has none: run stage={name}.")
        if changed := differences(read_json(folder / MANIFEST)["settings"], plain(stages[name].settings(config))):
            raise UserError(
                f"stage={stage.name} would use {folder}, which was made with other settings: {'; '.join(changed)}. Give the "
                f"settings it was made with, or redo it with stage={name} force=true, or make a new run with run=NAME."
            )
    inputs = {name: checksum(folders[name] / MANIFEST) for name in folders}
    wanted = {"settings": plain(stage.settings(config)), "inputs": inputs}
    folder = locate(stage, config)
    own = Path(config.paths.checkpoints) / config.run / stage.folder
    mended: dict[str, Any] | None = None
    for state, file in (("finished", folder / MANIFEST), ("begun", own / BEGUN)):
        if force or not file.exists() or [file] == list(file.parent.iterdir()):  # begun, and nothing made
            continue
        found = read_json(file)
        if changed := differences(found["settings"], wanted["settings"]):
            raise UserError(
                f"stage={stage.name} in {folder} is {state} with other settings: {'; '.join(changed)}. Redo it with "
                f"stage={stage.name} force=true, or keep it and make a new run with run=NAME base={config.run}."
            )
        if found["inputs"] != inputs:
            console.print(f"[yellow]↻[/] {stage.name}: an earlier stage was made again, so this one is too")
            force = True
        elif state == "finished" and not stage.whole(folder):
            console.print(f"[yellow]↻[/] {stage.name}: part of it is missing and is made again")
            mended = found
            break
        elif state == "finished":
            console.print(f"[green]✓[/] {stage.name}: finished ({folder}); force=true redoes it")
            if stage.show:
                stage.show(folder)
            return
    if force:
        remove(own)
    own.mkdir(parents=True, exist_ok=True)
    console.rule(f"[bold]{stage.name}")
    started = time.monotonic()
    before = read_json(own / BEGUN)["seconds"] if (own / BEGUN).exists() else 0.0
    write_json(own / BEGUN, {**wanted, "seconds": before})
    try:
        metrics = stage.work(config, {**folders, stage.name: own})
    except BaseException:
        write_json(own / BEGUN, {**wanted, "seconds": before + time.monotonic() - started})
        raise
    seconds = before + time.monotonic() - started
    if mended is None or mended["metrics"] != plain(metrics):  # the same again: what was made from it stays
        write_json(
            own / MANIFEST,
            {**wanted, "metrics": plain(metrics), "seconds": seconds, "finished": datetime.now(UTC).isoformat()},
        )
    console.print(f"[green]✓[/] {stage.name}: {seconds:.0f} s, {own}")


def locate(stage: Stage, config: Config) -> Path:
    """The stage's folder in this run, or in the run `base` where only that has it, finished with the same settings."""
    root = Path(config.paths.checkpoints)
    own = root / config.run / stage.folder
    if config.base and not own.exists():
        other = root / config.base / stage.folder
        manifest = other / MANIFEST
        if manifest.exists() and not differences(read_json(manifest)["settings"], plain(stage.settings(config))):
            return other
    return own


def plain(value: Any) -> Any:
    """`value` as it reads back from JSON."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "__dataclass_fields__"):
        return plain(asdict(value))
    return value


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """What differs between two settings, as "key: old -> new"."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*old, *new])
        return [d for k in keys for d in differences(old.get(k), new.get(k), f"{name}.{k}" if name else k)]
    return [] if old == new else [f"{name} was {old}, now {new}"]
