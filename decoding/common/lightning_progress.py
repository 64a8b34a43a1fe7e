"""Lightning's steps as an activity, of which lines are printed where there is no terminal."""

from contextlib import ExitStack
from typing import Any

import pytorch_lightning as pl

from nde_talf.decoding.common.progress import activity


class Counted(pl.Callback):
    """Counts the steps of a training."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin the activity; steps of an earlier process are done."""
        total = int(trainer.estimated_stepping_batches)
        begun = activity("training", total, "step", trainer.global_step)
        self.activity = self._stack.enter_context(begun)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Count a step, and note the figures that the bar shows."""
        self.activity.done, figures = trainer.global_step, trainer.progress_bar_metrics
        self.activity.note = "".join(f", {name} {x:.4g}" for name, x in figures.items())

    def teardown(self, *_: Any, **__: Any) -> None:
        """End the activity."""
        self._stack.close()
