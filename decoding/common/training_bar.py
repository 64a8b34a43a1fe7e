"""Lightning's progress bar with a title, and with units that a reader understands."""

from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import RichProgressBar
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from decoding.common.progress import Rate


class TrainingBar(RichProgressBar):
    """title: what is trained; unit: of what is counted, steps or epochs. Of the logged metrics it shows the loss."""

    def __init__(self, title: str, unit: str = "step"):
        super().__init__()
        self.title, self.unit = title, unit

    def configure_columns(self, trainer: Trainer) -> list:
        return [
            TextColumn(f"[bold]{self.title}" + (" {task.description}" if (trainer.max_epochs or 0) > 1 else "")),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            Rate(self.unit),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        ]

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        loss = super().get_metrics(trainer, pl_module).get("loss")
        return {} if loss is None or isinstance(loss, dict) else {"loss": f"{float(loss):.4g}"}
