"""Lightning's progress bar with a title, and with names and units that a reader understands."""

from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import RichProgressBar

from nde_talf.decoding.common.progress import columns


class TrainingBar(RichProgressBar):
    """title: what is trained; unit: of what is counted, steps or epochs.

    Of the logged metrics it shows the loss.
    """

    def __init__(self, title: str, unit: str = "step"):
        super().__init__()
        self.title, self.unit = title, unit

    def configure_columns(self, trainer: Trainer) -> list:
        """Make the bar's columns; the epoch is named if there are several."""
        return columns(
            self.title + " {task.description}" * ((trainer.max_epochs or 0) > 1), self.unit, 20
        )

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the loss as the only figure beside the bar."""
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        return {"loss": f"{float(metrics['loss']):.4g}"} if "loss" in metrics else {}
