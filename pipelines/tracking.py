"""Weights & Biases: one run a stage, grouped by the project's run.

Offline by default; nothing ever asks for a key.
"""

import csv
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import wandb
from pytorch_lightning.loggers import CSVLogger, Logger, WandbLogger
from pytorch_lightning.loggers.csv_logs import ExperimentWriter
from pytorch_lightning.loggers.logger import rank_zero_experiment

from nde_talf.pipelines.config import Config

READS = {
    "latency": ("target", "draft"),
    "traces": ("target", "draft"),
    "selector": ("traces", "latency"),
    "draft": ("target",),
    "evaluate": ("target", "draft", "latency", "head"),
}
"""The artifacts that each stage reads: the lineage that W&B draws."""
TEXTS = (
    "paths",
    "ray",
    "base",
    "dialogues",
    "model.target",
    "model.draft",
    "data.source",
    "data.column",
    "data.split",
)
TEXTS += (
    "data.mix",
    "data.sets",
    "draft.warm_start",
    "selector.tables",
)
"""Keys and groups that hold paths, names and texts of the user's own; tracking.samples=false leaves
them out.
"""


class Tracker:
    """Reports of a stage: metrics, tables, exported files, pictures, and loggers for Lightning."""

    def __init__(self, run, folder: Path, samples: bool = True):
        self.run, self.folder, self.samples = run, folder, samples

    def loggers(self, name: str) -> list[Logger]:
        """Make the loggers of training `name`.

        They are a CSV (the report's curves), and the stage's W&B run with keys prefixed by `name`.
        """
        return [
            Curves(self.folder / "curves", name, version=""),
            WandbLogger(experiment=self.run, prefix=name),
        ]

    def log(self, metrics: dict) -> None:
        """Nested numbers, as the run's summary."""
        self.run.summary.update(_flat(metrics))

    def sample(self, name: str, texts: dict[str, str]) -> None:
        """Log texts of the user in the run's summary, where tracking.samples allows it."""
        if self.samples:
            self.log({name: texts})

    def table(self, name: str, columns: list[str], rows: list[list]) -> None:
        """Log a table."""
        self.run.log({name: wandb.Table(columns=columns, data=rows)})

    def artifact(self, name: str, kind: str, path: Path, copied: bool = True) -> None:
        """Log an exported folder or file.

        copied: with its content, otherwise (large ones) as a reference to its place. Nothing is
        logged where tracking.samples is false: such files name models, and hold what was learnt
        from texts.
        """
        if not self.samples:
            return
        artifact = wandb.Artifact(name, kind)
        if not copied:
            artifact.add_reference(path.resolve().as_uri(), checksum=False)
        else:
            (artifact.add_dir if path.is_dir() else artifact.add_file)(str(path))
        self.run.log_artifact(artifact)

    def report(self, folder: Path) -> None:
        """Log the pictures of a finished report, and its page.

        The page shows a text, so it goes only where tracking.samples allows it.
        """
        shown = {
            f"report/{path.stem}": wandb.Image(str(path)) for path in sorted(folder.glob("*.png"))
        }
        if self.samples:
            shown["report"] = wandb.Html((folder / "index.html").read_text(), inject=False)
        self.run.log(shown)

    def uses(self, names: Iterable[str]) -> None:
        """Name artifacts that this stage reads.

        W&B takes that only online; artifacts that were never logged are skipped.
        """
        if self.run.disabled or self.run.offline:
            return
        for name in names:
            with suppress(wandb.errors.CommError, ValueError):
                self.run.use_artifact(f"{name}:latest")


class Curves(CSVLogger):
    """A CSV of metrics that a resumed training goes on with.

    Rows up to the step where it resumes stay.
    """

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """Writer of the curves, made at the first use."""
        if self._experiment is None:
            self._experiment = _Rows(log_dir=self.log_dir)
        return self._experiment


class _Rows(ExperimentWriter):
    """Lightning's writer, which would delete the rows of an earlier process."""

    def _check_log_dir_exists(self) -> None:
        self._earlier = _rows(Path(self.metrics_file_path))

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        """Write a row.

        The first one drops the earlier rows of its step and later: they are made again.
        """
        if self._earlier and step is not None:
            before = [row for row in self._earlier if int(float(row["step"])) < step]
            self.metrics = [
                {name: value for name, value in row.items() if value != ""} for row in before
            ]
            Path(self.metrics_file_path).unlink()
            self._earlier = []
        super().log_metrics(metrics_dict, step)


def _rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV; a row that a kill cut short is left out."""
    if not path.exists():
        return []
    with path.open(newline="") as stream:
        return [
            row
            for row in csv.DictReader(stream)
            if row.get("step") and None not in row and None not in row.values()
        ]


@contextmanager
def tracked(config: Config, stage: str, folder: Path) -> Iterator[Tracker]:
    """The W&B run of one stage."""
    os.environ.setdefault("WANDB_SILENT", "true")
    root, samples = Path(config.paths.checkpoints) / config.run, config.tracking.samples
    root.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=config.tracking.project,
        group=config.run,
        job_type=stage,
        name=f"{config.run}/{stage}",
        mode=config.tracking.mode,
        dir=str(root),
        config=asdict(config) if samples else without_texts(asdict(config)),
        reinit="finish_previous",
        # Progress bars would be recorded line by line. The metadata are the command, its folder,
        # host and user.
        settings=wandb.Settings(
            console="off",
            disable_git=not samples,
            x_disable_meta=not samples,
            x_disable_machine_info=not samples,
        ),
    )
    tracker = Tracker(run, folder, samples)
    tracker.uses(f"{config.base or config.run}-{name}" for name in READS.get(stage, ()))
    try:
        yield tracker
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def without_texts(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run, those of `TEXTS` left out."""
    kept = {}
    for group, value in settings.items():
        if isinstance(value, dict) and group not in TEXTS:
            kept[group] = {
                name: entry for name, entry in value.items() if f"{group}.{name}" not in TEXTS
            }
        elif group not in TEXTS:
            kept[group] = value
    return kept


def read_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Series (step, value) of one training's CSV, by metric."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in _rows(folder / "metrics.csv"):
        for name, value in row.items():
            if name not in ("step", "epoch") and value:
                series.setdefault(name, []).append((int(float(row["step"])), float(value)))
    return series


def _flat(metrics: dict, prefix: str = "") -> dict[str, float | str]:
    """Nested metrics as one dictionary, with keys such as "overlap/1.0"."""
    flat = {}
    for key, value in metrics.items():
        flat |= (
            _flat(value, f"{prefix}{key}/")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat
