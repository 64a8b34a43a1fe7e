"""Weights & Biases: one run a stage, grouped by the project's run.

Offline by default; nothing ever asks for a key.
"""

import csv
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import wandb
from pytorch_lightning.loggers import CSVLogger, Logger, WandbLogger

from nde_talf.decoding.common.files import refuse_link
from nde_talf.decoding.common.progress import console
from nde_talf.pipelines.runs.manifest import plain


class Figures(WandbLogger):
    """Lightning's figures in a stage's W&B run: NAME/figure, over NAME/step."""

    LOGGER_JOIN_CHAR = "/"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log figures of a step."""
        with spared():
            super().log_metrics({**metrics, "step": step or 0})


@contextmanager
def spared() -> Iterator[None]:
    """Tell of W&B's errors in one line, and end nothing for them."""
    try:
        yield
    except Exception as error:  # its own, of its service, of the network and of files
        if (fault := " ".join(str(error).split())[:300]) not in _told:
            _told.append(fault)
            console.print(f"! W&B: {fault}. The work goes on without it.")


_told: list[str] = []


@dataclass
class Tracker:
    """Reports of a stage: metrics, pictures, and loggers for Lightning."""

    run: Any
    folder: Path
    samples: bool = True

    def loggers(self, name: str) -> list[Logger]:
        """Make the loggers of training `name`.

        They are a CSV (the report's curves), another one each time that it is resumed, and the
        stage's W&B run with keys prefixed by `name`.
        """
        curves = CSVLogger(self.folder / "curves", name)
        with spared():
            self.run.define_metric(f"{name}/*", step_metric=f"{name}/step")
        return [curves, Figures(experiment=self.run, prefix=name)]

    def log(self, metrics: dict) -> None:
        """Nested numbers, as the run's summary: STAGE/name/part, lists by position."""
        with spared():
            self.run.summary.update(dict(_scalars(metrics, self.folder.name)))

    def report(self, folder: Path) -> None:
        """Log the pictures of a finished report, and its page.

        The page shows a text, so it goes only where tracking.samples allows it.
        """
        with spared():
            shown: dict[str, Any] = {
                f"report/{path.stem}": wandb.Image(str(path))
                for path in sorted(folder.glob("*.png"))
            }
            if self.samples:
                page = (folder / "index.html").read_text("utf-8")
                shown["report"] = wandb.Html(page, inject=False)
            self.run.log(shown)


def _scalars(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """List nested dicts and lists as (key/key, scalar)."""
    if not isinstance(value, (dict, list, tuple)):
        yield key, value
        return
    for name, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _scalars(part, f"{key}/{name}")


@contextmanager
def tracked(config: Any, stage: str, folder: Path) -> Iterator[Tracker]:
    """Open the W&B run of a stage; its files go to `wandb`, beside the stage's folder.

    config: has the keys run, seed and tracking.
    """
    root, samples = folder.parent, config.tracking.samples
    root.mkdir(parents=True, exist_ok=True)
    refuse_link(root / "wandb")
    place = (root / "wandb").resolve()
    # Logs would be in the home; a server that went away would be waited for.
    wanted = {
        "WANDB_DATA_DIR": f"{place}/data",
        "WANDB_CACHE_DIR": f"{place}/cache",
        "WANDB_FINISH_TIMEOUT": "300",
        "WANDB_FINISH_TIMEOUT_RAISES": "true",
        "WANDB_SILENT": "true",
    }
    chosen = {key: value for key, value in wanted.items() if key not in os.environ}
    os.environ.update(chosen)
    run: Any = None
    status = 1
    with spared():
        # Progress bars would be recorded line by line. The metadata are the command, its folder,
        # host and user; the settings hold paths and texts.
        options = wandb.Settings(
            console="off",
            disable_git=not samples,
            x_disable_meta=not samples,
            x_disable_machine_info=not samples,
        )
        run = wandb.init(
            project=config.tracking.project,
            group=config.run,
            job_type=stage,
            name=f"{config.run}/{stage}",
            mode=cast(Any, config.tracking.mode),
            dir=str(root),
            config=plain(config) if samples else {"seed": config.seed},
            reinit="finish_previous",
            settings=options,
        )
    if run is None:
        run = wandb.init(mode="disabled")
    try:
        yield Tracker(run, folder, samples)
        status = 0
    finally:
        with spared():
            run.finish(exit_code=status)
        for key in chosen:
            del os.environ[key]


def read_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the series (step, value) of one training by metric.

    What a resumed training logs replaces what was logged at the same steps. A row that a kill cut
    short is left out.
    """
    series: dict[str, dict[int, float]] = {}
    versions = folder.glob("*/metrics.csv")
    for file in sorted(versions, key=lambda file: int(file.parent.name.rpartition("_")[2])):
        with file.open(newline="") as stream:
            for row in csv.DictReader(stream):
                if row.get("step") and None not in row.values():
                    for name, value in row.items():
                        if value and name not in ("step", "epoch"):
                            series.setdefault(name, {})[int(float(row["step"]))] = float(value)
    return {name: sorted(points.items()) for name, points in series.items()}
