"""The folders of finished runs. Imports no torch."""

import difflib
import os
import re
from pathlib import Path
from typing import Any

from nde_talf.data.text.shipped import AGAIN, SHIPPED, SMALL, SMOLLM2, smollm2
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.checksums import check_checksums
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json
from nde_talf.evaluation.protocol import HEAD_TREE

COMMAND = "command.json"
"""The file of a run with its arguments and its base."""
FOLDERS = ("pair", "latency", "traces", "selector", "draft", "report")
"""The folders of a run's stages, in the order of their names in the configuration."""


def read_record(run: Path, anyway: bool = False) -> dict[str, Any]:
    """Read the record of a run: `arguments` and `base`.

    Of a run that has made nothing yet it is read only if asked for.
    """
    made = (path.name for folder in FOLDERS for path in (run / folder).glob("*"))
    nothing = not anyway and all(name == "begun.json" for name in made)
    if nothing or not (run / COMMAND).exists():
        return {}
    again = f"delete it and give every key of run={run.name} again"
    return read_json(run / COMMAND, dict[str, Any], again)


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
"""Names of runs."""


def check_name(key: str, run: str | None) -> None:
    """Check that `run` can be a run's name, the name of a folder in paths.checkpoints.

    So no run writes or reads outside. None is no run.

    Raises:
        UserError: it cannot.
    """
    if run is not None and not NAME.fullmatch(run):
        raise UserError(
            f"{key}={run[:100]}: a run's name is that of its folder in paths.checkpoints and of"
            " what it logs: at most 100 letters (A to Z), digits, dashes, underscores and dots,"
            " and the first is no dash or dot. For runs of another folder set"
            " paths.checkpoints=FOLDER."
        )
    if run in (SMALL, SMOLLM2):
        raise UserError(
            f"{key}={run}: that folder ships with the project, and no run overwrites it. Choose"
            f" another name; model={run} uses what ships."
        )


def finished(checkpoints: Path) -> list[str]:
    """Names of the runs in a folder that have a finished stage."""
    return sorted({path.parents[1].name for path in checkpoints.glob("*/*/manifest.json")})


def meant(key: str, name: str, checkpoints: Path) -> str:
    """Propose the run whose name is most like `name`, or list the runs that there are."""
    known = finished(checkpoints)
    close = difflib.get_close_matches(name, known, 1)
    return (
        f" Did you mean {key}={close[0]}?"
        if close
        else f" Your runs there: {', '.join(known) or 'none'}; shipped: {SMALL}, {SMOLLM2}."
    )


def lineage(root: Path, run: str, base: str | None) -> list[Path]:
    """The folders of a run, of its base, of that one's base, and so on."""
    folders = [root / run]
    while base and root / base not in folders:
        check_name("base", base)
        folders.append(root / base)
        base = read_record(folders[-1]).get("base")
    return folders


class Run:
    """The folders of a finished run; a stage that only a base of it has is found there.

    "small" and "smollm2" are what ships, which is laid out like runs.

    Attributes:
        shipped: whether it ships with the project.
        target: the folder or hub name of a target that no stage recorded; otherwise None.
        folders: of the run, its base, that one's base, and so on.

    Raises:
        UserError: there is no finished pair under that name; the message proposes a run.
    """

    def __init__(self, name: str, checkpoints: str):
        self.shipped = name in (SMALL, SMOLLM2)
        if self.shipped:
            check_checksums(SHIPPED.with_name(name), again=AGAIN)
        else:
            check_name("run", name)
        self.target = smollm2() if name == SMOLLM2 else None
        root = SHIPPED.parent if self.shipped else Path(checkpoints)
        folder = root / name
        self.folders = lineage(root, name, read_record(folder).get("base"))
        if not self.target and not (self.stage("pair") / "pair.json").exists():
            raise UserError(
                f"run={name}: {folder.resolve()} holds no finished pair.{meant('run', name, root)}"
                " Runs of another folder: paths.checkpoints=FOLDER. To make one: nde run"
                f" run={name}."
            )

    def stage(self, name: str) -> Path:
        """Return the folder of a stage in this run, or else in a base."""
        return next((f / name for f in self.folders if (f / name).is_dir()), self.folders[0] / name)

    def head_action(self, temperature: float) -> Action:
        """Return the static tree that the evaluation found best for the head.

        It is the one under the setting nearest in temperature.
        """
        for name in sorted(SETTINGS, key=lambda it: abs(SETTINGS[it].temperature - temperature)):
            tree = self.tuned(name).get(HEAD_TREE, {}).get("tree", [])
            if len(tree) == 3:
                return Action(*tree)
        return Action(1, 0, 4)

    def tuned(self, setting: str) -> dict[str, dict[str, Any]]:
        """Return the options that the evaluation timed fastest under a setting, by method."""
        file = self.stage("report") / f"tuned-{setting}.json"
        return read_json(file, dict[str, dict[str, Any]]) if file.exists() else {}

    def selectors(self) -> list[str]:
        """Names of the exported selectors, the main one first."""
        folder = self.stage("selector")
        exports = [*(folder / "export").glob("*/")]
        if not exports and (folder / "manifest.json").exists():
            raise UserError(
                f"{folder}: its selectors are gone; make them again with stage=selector force=true."
            )
        return sorted((p.name for p in exports), key=lambda name: (name != "traversal", name))


class NoRun(Run):
    """A model that no run holds, in a run's place: without draft, prompts and selectors."""

    def __init__(self, target: str):
        self.shipped, self.folders, self.target = False, [Path(os.devnull)], target
