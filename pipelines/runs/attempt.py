"""Run a stage: reuse it if it is finished, or make it again.

A finished stage has a `manifest.json` in its folder: the settings it was made with, the identities
of the stages it used, the checksums of its files and its time. The rules are:

- the same settings and inputs: there is nothing to do;
- other inputs, because an earlier stage was made again: it is made again, too;
- other settings: a UserError that names them.

A finished stage that is made again moves to `replaced/` first, so that nothing finished is removed,
and nothing that no run made.
"""

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers.utils import flatten_dict

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json, refuse_link, refuse_links, write_json
from nde_talf.decoding.common.progress import console, reporting
from nde_talf.decoding.common.settings import shown
from nde_talf.pipelines.config.schema import Config
from nde_talf.pipelines.runs.finished import lineage, meant
from nde_talf.pipelines.runs.manifest import (
    BEGUN,
    MANIFEST,
    Begun,
    check_files,
    identity,
    plain,
    read_manifest,
    write_manifest,
)
from nde_talf.pipelines.runs.record import asked
from nde_talf.pipelines.runs.tracking import tracked
from nde_talf.pipelines.stages.stage import Stage

REPLACED = "replaced"
"""The folder of a run for finished stages that newer ones replaced."""
SHOWN = 5
"""Settings that a message names at most."""


class Attempt:
    """Run one stage: folders and identities of its inputs, and folders of its results.

    Raises:
        UserError: a stage it needs is missing or damaged.
    """

    def __init__(self, stage: Stage, config: Config, stages: dict[str, Stage]):
        self.stage, self.config = stage, config
        self.own = Path(config.paths.checkpoints) / config.run / stage.folder
        self.folders = {name: locate(stages[name], config) for name in stage.needs(config)}
        for folder in (self.own, *self.folders.values()):
            _check_made(folder)
        self.inputs = {
            name: self._identity(stages[name], folder) for name, folder in self.folders.items()
        }
        self.wanted = {"settings": plain(stage.settings(config)), "inputs": self.inputs}

    def _identity(self, needed: Stage, folder: Path) -> str:
        """Return the identity of a needed stage.

        Raises UserError if it is missing, damaged, or of other settings.
        """
        name, config = self.stage.name, self.config
        if not (folder / MANIFEST).exists():
            first = needed.name == "pair"  # perhaps another run was meant
            others = meant("run", config.run, Path(config.paths.checkpoints)) if first else ""
            raise UserError(
                f"stage={name} needs what stage={needed.name} makes; {folder} has none: run"
                f" stage={needed.name}.{others}"
            )
        manifest = read_manifest(folder)
        if other := changed(manifest, plain(needed.settings(config))):
            raise UserError(
                f"stage={name} would use {folder}, which was made with other settings:"
                f" {told(other)}. Leave them out to use it, or start it anew:\nnde run"
                f" run={config.run} stage={needed.name} force=true {asked()}"
            )
        check_files(folder, manifest, needed.name)
        return identity(manifest)

    def run(self, force: bool) -> None:
        """Run the stage unless it is finished.

        Raises UserError if its settings changed.
        """
        folder = locate(self.stage, self.config)
        if force:
            self._begin_again()
        elif (folder / MANIFEST).exists():
            if self._stays(folder, read_manifest(folder)):
                return self.stage.show(folder)
        elif (self.own / BEGUN).exists() and [*self.own.iterdir()] != [self.own / BEGUN]:
            again = f"delete {self.own}, which is unfinished, and run the stage again"
            begun = read_json(self.own / BEGUN, Begun, again)
            self._same_settings(self.own, "begun", begun)
            if begun["inputs"] != self.inputs:
                self._made_from_others()
        seconds = self._work()
        self.stage.show(self.own)
        console.print(f"✓ {self.stage.name}: {seconds:.0f} s, {self.own}")

    def _stays(self, folder: Path, manifest: dict[str, Any]) -> bool:
        """Return True if what is finished in `folder` can stay as it is, and say why it cannot.

        Raises UserError for other settings or damaged files.
        """
        name = self.stage.name
        self._same_settings(folder, "finished", manifest)
        if manifest["inputs"] != self.inputs:
            self._made_from_others()
            return False
        check_files(folder, manifest, name)
        if self.stage.whole(folder):
            console.print(f"✓ {name}: finished ({folder}); force=true redoes it")
            return True
        console.print(f"↻ {name}: part of it is missing and is made again")
        return False

    def _made_from_others(self) -> None:
        console.print(f"↻ {self.stage.name}: an earlier stage was made again, so this one is too")
        self._begin_again()

    def _begin_again(self) -> None:
        """Move what is finished, or was begun with other inputs, to `replaced/`.

        It stays there until the user deletes it.
        """
        if not self.own.exists():
            return
        place = self.own.parent / REPLACED / f"{self.own.name}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        refuse_link(place.parent)
        place.parent.mkdir(exist_ok=True)
        os.rename(self.own, place)
        console.print(f"! what was there is kept in {place}; delete it when it is no longer needed")

    def _same_settings(self, folder: Path, state: str, found: dict[str, Any]) -> None:
        if other := changed(found, self.wanted["settings"]):
            name, run, given = self.stage.name, self.config.run, asked()
            raise UserError(
                f"stage={name} in {folder} is {state} with other settings: {told(other)}.\n"
                f"To start it anew: nde run run={run} stage={name} force=true {given}\n"
                f"To keep it: nde run run=NAME base={run} stage={name} {given}"
            )

    def _work(self) -> float:
        """Let the stage work, and write its manifest. Returns the seconds it took."""
        own = self.own
        own.mkdir(parents=True, exist_ok=True)
        console.rule(self.stage.name)
        started = time.monotonic()
        write_json(own / BEGUN, self.wanted)
        name, folders = self.stage.name, {**self.folders, self.stage.name: own}
        with reporting(name), tracked(self.config, name, own) as tracker:
            metrics = self.stage.work(self.config, folders, tracker)
            tracker.log(metrics)
        seconds = time.monotonic() - started
        write_manifest(own, self.wanted, metrics, seconds)
        return seconds


def _check_made(folder: Path) -> None:
    """Raise UserError for a stage's folder that no run made, or that holds links."""
    refuse_link(folder.parent)
    refuse_links(folder)
    marks = [folder / MANIFEST, folder / BEGUN]
    if folder.is_dir() and any(folder.iterdir()) and not any(mark.exists() for mark in marks):
        raise UserError(
            f"{folder}: no run made it, as it has neither {MANIFEST} nor {BEGUN}, and what it holds"
            " might be overwritten. Move it away, or give another name (run=NAME)."
        )


def locate(stage: Stage, config: Config) -> Path:
    """Return the stage's folder: in this run, in the run `base`, in that one's base, and so on.

    It is the first run that has it, if finished with the same settings.
    """
    own, *others = (
        run / stage.folder
        for run in lineage(Path(config.paths.checkpoints), config.run, config.base)
    )
    for other in [] if own.exists() else others:
        if (other / MANIFEST).exists() and not changed(
            read_json(other / MANIFEST), plain(stage.settings(config))
        ):
            return other
    return own


def told(differing: list[tuple[str, Any, Any]]) -> str:
    """Write differences as "key: recorded, given"; those beyond the first few are counted.

    A file of another name is listed once, by the key that names it.
    """
    listed = [
        f"{key.removeprefix('files.')}: its content changed"
        if key.startswith("files.")
        else f"{key}: {shown(old)} recorded, {shown(new)} given"
        for key, old, new in differing
        if not key.startswith("files.") or None not in (old, new)
    ]
    more = [f"{len(listed) - SHOWN} more"] if len(listed) > SHOWN else []
    return "; ".join([*listed[:SHOWN], *more])


def changed(made: dict[str, Any], settings: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """List what a stage was made with and what is asked for now: key, old value, new value."""
    old, new = flatten_dict(made.get("settings", {})), flatten_dict(settings)
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [(key, old.get(key), new.get(key)) for key in keys]
