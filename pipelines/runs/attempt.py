"""Run a stage: reuse it if it is finished, or make it again.

A result is replaced only by a complete successor. A finished stage has a `manifest.json` in its
folder: the settings it was made with, the identities of the stages it used, the checksums of
its files and its time. The rules are:

- the same settings and inputs: there is nothing to do;
- other inputs, because an earlier stage was made again: it is made again in a folder beside it,
  and what it replaces goes to `replaced/`;
- other settings: a UserError that names them.

Nothing finished is removed, except by force=true with the stage's own name, and nothing that no run
made.
"""

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers.utils import flatten_dict

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import (
    discard,
    read_json,
    refuse_link,
    refuse_links,
    replace,
    write_json,
)
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
from nde_talf.pipelines.stages.stage import Stage

REPLACED = "replaced"
"""The folder of a run for finished stages that newer ones replaced."""
SHOWN = 5
"""Settings that a message names at most."""
SUCCESSOR = ".new"
"""Added to the name of a finished stage's folder: where it is made again."""


class Attempt:
    """Run one stage: folders and identities of its inputs, and folders of its results.

    Raises:
        UserError: a stage it needs is missing or damaged.
    """

    def __init__(self, stage: Stage, config: Config, stages: dict[str, Stage]):
        self.stage, self.config = stage, config
        self.own = Path(config.paths.checkpoints) / config.run / stage.folder
        self.successor = self.own.with_name(self.own.name + SUCCESSOR)
        self.folders = {name: locate(stages[name], config) for name in stage.needs(config)}
        for folder in (self.own, self.successor, *self.folders.values()):
            _check_made(folder)
        self.inputs = {
            name: _usable(stages[name], stage, folder, config)
            for name, folder in self.folders.items()
        }
        self.wanted = {"settings": plain(stage.settings(config)), "inputs": self.inputs}
        for name, folder in self.folders.items():
            for other, used in read_manifest(folder)["inputs"].items():
                if used != self.inputs.get(other, used):
                    console.print(
                        f"! stage={name} in {folder} was made from another {other} than this stage"
                        f" reads. Run stage={name} again if they should fit."
                    )

    def run(self, force: bool) -> None:
        """Run the stage unless it is finished.

        Raises UserError if its settings changed.
        """
        self._tidy()
        stage, own, successor = self.stage, self.own, self.successor
        folder = locate(stage, self.config)
        target = successor if (own / MANIFEST).exists() else own  # where it is made, or made again
        if force:
            discard(target)
        elif (successor / BEGUN).exists() and self._fits(_begin(successor)):
            pass  # it continues
        elif (folder / MANIFEST).exists():
            manifest = read_manifest(folder)
            if self._stays(folder, manifest):
                return stage.show(folder)
            if manifest["inputs"] == self.inputs:  # its own files are mended
                target = own
        elif (own / BEGUN).exists():
            self._begin_again()
        seconds = self._work(target)
        if target == successor:
            _put_in_place(successor, own, keep=not (force and self.config.stage == stage.name))
        stage.show(own)
        console.print(f"✓ {stage.name}: {seconds:.0f} s, {own}")

    def _stays(self, folder: Path, manifest: dict[str, Any]) -> bool:
        """Return True if what is finished in `folder` can stay as it is, and say why it cannot.

        Raises UserError for other settings or damaged files.
        """
        name = self.stage.name
        self._same_settings(folder, "finished", manifest)
        if manifest["inputs"] != self.inputs:
            console.print(f"↻ {name}: an earlier stage was made again, so this one is too")
            if self.successor.exists():
                _set_aside(self.successor, self.own)
            return False
        check_files(folder, manifest, name)
        if self.stage.whole(folder):
            newer = f"; {self.successor} is unfinished" * self.successor.exists()
            console.print(f"✓ {name}: finished ({folder}); force=true redoes it{newer}")
            return True
        console.print(f"↻ {name}: part of it is missing and is made again")
        return False

    def _begin_again(self) -> None:
        """Set aside what was begun with other inputs. Raises UserError for other settings."""
        if list(self.own.iterdir()) == [self.own / BEGUN]:  # nothing is made yet
            return
        begun = _begin(self.own)
        self._same_settings(self.own, "begun", begun)
        if begun["inputs"] != self.inputs:
            console.print(
                f"↻ {self.stage.name}: an earlier stage was made again, so this one begins again"
            )
            _set_aside(self.own, self.own)

    def _fits(self, found: dict[str, Any]) -> bool:
        """Return True if a manifest, or a begun stage, has the current settings and inputs."""
        return not changed(found, self.wanted["settings"]) and found["inputs"] == self.inputs

    def _same_settings(self, folder: Path, state: str, found: dict[str, Any]) -> None:
        if other := changed(found, self.wanted["settings"]):
            name, run, given = self.stage.name, self.config.run, asked()
            raise UserError(
                f"stage={name} in {folder} is {state} with other settings: {told(other)}.\n"
                f"To start it anew: nde run run={run} stage={name} force=true {given}\n"
                f"To keep it: nde run run=NAME base={run} stage={name} {given}"
            )

    def _tidy(self) -> None:
        """Finish a replacement that a kill interrupted.

        A complete folder beside a stage is its successor, or what it replaced.
        """
        own, successor = self.own, self.successor
        if not (successor / MANIFEST).exists():
            return
        new = read_manifest(successor)
        newer = not (own / MANIFEST).exists() or read_manifest(own)["finished"] < new["finished"]
        if newer and self._fits(new):
            console.print(f"✓ {self.stage.name}: what was made again takes its place")
            _put_in_place(successor, own, keep=True)
        else:
            _set_aside(successor, own)

    def _work(self, target: Path) -> float:
        """Let the stage work in `target`, and write its manifest.

        Returns the seconds it took, with those before an interruption, or before it was mended.
        """
        target.mkdir(parents=True, exist_ok=True)
        console.rule(self.stage.name)
        started = time.monotonic()
        if (target / MANIFEST).exists():
            started -= read_manifest(target)["seconds"]
        elif (target / BEGUN).exists():
            started -= _begin(target)["seconds"]

        def note() -> None:
            write_json(target / BEGUN, {**self.wanted, "seconds": time.monotonic() - started})

        try:
            note()
            with reporting(self.stage.name):
                metrics = self.stage.work(self.config, {**self.folders, self.stage.name: target})
        except BaseException:
            note()
            raise
        seconds = time.monotonic() - started
        write_manifest(target, self.wanted, metrics, seconds)
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


def _usable(needed: Stage, stage: Stage, folder: Path, config: Config) -> str:
    """The identity of a stage that another one needs.

    Raises UserError if it is missing, damaged, or of other settings.
    """
    if not (folder / MANIFEST).exists():
        first = needed.name == "pair"  # perhaps another run was meant
        others = meant("run", config.run, Path(config.paths.checkpoints)) if first else ""
        raise UserError(
            f"stage={stage.name} needs what stage={needed.name} makes; {folder} has none: run"
            f" stage={needed.name}.{others}"
        )
    manifest = read_manifest(folder)
    if other := changed(manifest, plain(needed.settings(config))):
        raise UserError(
            f"stage={stage.name} would use {folder}, which was made with other settings:"
            f" {told(other)}. Leave them out to use it, or start it anew:\nnde run"
            f" run={config.run} stage={needed.name} force=true {asked()}"
        )
    check_files(folder, manifest, needed.name)
    return identity(manifest)


def _begin(folder: Path) -> Any:
    """Read what a stage was begun with.

    Raises:
        UserError: the file is damaged; the message names it.
    """
    return read_json(
        folder / BEGUN, Begun, f"delete {folder}, which is unfinished, and run the stage again"
    )


def _put_in_place(successor: Path, own: Path, keep: bool) -> None:
    """Give the finished `successor` the name of `own`.

    `own` is set aside if it is to be kept, and removed otherwise.
    """
    if keep and own.exists():
        _set_aside(own, own)
    replace(successor, own)


def _set_aside(folder: Path, own: Path) -> None:
    """Move what was replaced to `replaced/`, where it stays until the user deletes it."""
    place = own.parent / REPLACED / f"{own.name}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    refuse_link(place.parent)
    place.parent.mkdir(exist_ok=True)
    os.rename(folder, place)
    console.print(f"! what was replaced is kept in {place}; delete it when it is no longer needed")


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
