"""`draft.ema_decay`: an exponential moving average of the head's weights, which is what a training returns and exports.

Lightning's WeightAveraging keeps it and puts it, the weights in training and the count of updates into the checkpoint, so that
a killed run goes on with the average it had. The target is no part of it (`CausalModel` is not copied with a head).
"""

from functools import partial

import pytorch_lightning as pl
from pytorch_lightning.callbacks import WeightAveraging
from torch import Tensor


class HeadAverage(WeightAveraging):
    """The average of all steps' weights, that of t steps ago with weight (1 - decay) decay^t; what is left is the first step's.
    Lightning's EMAWeightAveraging is the same, but holds a closure, which spawned processes cannot be sent. Buffers are copied:
    a head's are constants."""

    def __init__(self, decay: float):
        super().__init__(use_buffers=False, avg_fn=partial(_moved, decay))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing: Lightning leaves this hook out when a finished run is resumed."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._copy_average_to_current(pl_module)


def _moved(decay: float, average: Tensor, weight: Tensor, count: Tensor) -> Tensor:
    return average.lerp(weight, 1 - decay)
