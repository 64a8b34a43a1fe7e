"""A stage of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nde_talf.pipelines.config.schema import Config
from nde_talf.pipelines.runs.tracking import Tracker


@dataclass(frozen=True)
class Stage:
    """One step of a run.

    Attributes:
        name: as in stage=NAME.
        folder: its folder in a run.
        needs: the stages whose files it reads, for a configuration.
        settings: the settings that decide what it makes; they are remembered in its manifest.
        work: `work(config, folders, tracker)` writes into `folders[name]` and returns metrics for
            the manifest and the tracker.
        whole: whether all files of a finished stage are still there; missing ones are made again.
        show: prints what a finished stage found.
    """

    name: str
    folder: str
    needs: Callable[[Config], tuple[str, ...]]
    settings: Callable[[Config], dict[str, Any]]
    work: Callable[[Config, dict[str, Path], Tracker], dict[str, Any]]
    whole: Callable[[Path], bool] = lambda folder: True
    show: Callable[[Path], None] = lambda folder: None
