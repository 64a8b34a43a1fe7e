"""`draft.ema_decay`: an exponential moving average of the head's weights, which is what a training returns and exports.

Lightning's EMAWeightAveraging keeps it and puts it, the weights in training and the count of updates into the checkpoint, so
that a killed run goes on with the average it had. The target is no part of it (`CausalModel` is not copied with a head).
"""

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EMAWeightAveraging


class HeadAverage(EMAWeightAveraging):
    """The average of all steps' weights, that of t steps ago with weight (1 - decay) decay^t. Buffers are copied: a head's are
    constants."""

    def __init__(self, decay: float):
        super().__init__(decay=decay, use_buffers=False)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing: Lightning leaves this hook out when a finished run is resumed."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._copy_average_to_current(pl_module)
