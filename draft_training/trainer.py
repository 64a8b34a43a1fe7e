"""Training on rows of tokens that survives a kill: what the trainings of this package share.

The order of the rows is a pure function of (seed, step) and the checkpoint is written whole, so a run that was killed goes on
with the batches it would have seen and ends with the weights it would have had. It knows rows and Lightning modules, not
what is trained.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from transformers import PreTrainedModel

from decoding.common.checkpoint import BEFORE, CHECKPOINT, WholeFile, resumable, save
from decoding.common.files import remove
from decoding.common.progress import console
from decoding.common.training_bar import TrainingBar
from draft_training.precision import AUTO, explained, resolved


class Rows(Protocol):
    """What can be drawn from: rows of tokens [rows, length], or anything indexed by a tensor of row numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: torch.Tensor) -> Any: ...


class RowTraining(Protocol):
    """The settings that every training on rows has."""

    steps: int
    batch: int
    seed: int
    checkpoint_seconds: float


def train_rows(
    module: pl.LightningModule,
    tokens: Rows,
    config: RowTraining,
    folder: Path,
    models: Sequence[PreTrainedModel],
    logger: Logger | list[Logger] | None = None,
    callbacks: Sequence[pl.Callback] = (),
    accelerator: str = "auto",
    batch: int | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """Train `module` for `config.steps` batches of rows of `tokens` [rows, length], resuming from `folder/last.ckpt`, or, if
    that is damaged, from the checkpoint before it or the start. The module's `title` stands at the progress bar.

    models: the transformers models that the steps run. batch: rows of a step on each device (default config.batch). options:
    of Lightning's Trainer, such as strategy, devices and precision (default auto). A finished run trains no further.
    """
    options = {"devices": 1, "precision": AUTO} | (options or {})
    asked, options["precision"] = options["precision"], resolved(options["precision"], _device(accelerator))
    console.print(explained(asked, options["precision"]))
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / CHECKPOINT
    if not torch.cuda.is_available():
        accelerator = "cpu"
    trainer = pl.Trainer(
        accelerator=accelerator,
        **options,
        max_epochs=1,
        max_steps=config.steps,
        logger=logger or False,
        log_every_n_steps=10,
        callbacks=[*callbacks, ResumableCheckpoint(checkpoint, config.checkpoint_seconds), TrainingBar(module.title)],
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[WholeFile()],
    )
    here = Here(trainer)
    batches = RowBatches(tokens, batch or config.batch, config.steps, config.seed, here.step, here.share)
    resumed = resumable(folder)
    module.train()
    with eager_attention(models if accelerator == "cpu" else ()):
        trainer.fit(module, batches, ckpt_path=str(resumed) if resumed else None, weights_only=True)


@contextmanager
def eager_attention(models: Sequence[PreTrainedModel]) -> Iterator[None]:
    """Run `models` with plain attention inside the block: on a CPU it is faster under masks, and backwards, than the fused
    kernel."""
    before = [model.config._attn_implementation for model in models]
    for model in models:
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        for model, implementation in zip(models, before, strict=True):
            model.set_attn_implementation(implementation)


@dataclass
class Here:
    """Where a training stands: no closure, since spawned processes get it pickled."""

    trainer: pl.Trainer

    def step(self) -> int:
        return self.trainer.global_step

    def share(self) -> tuple[int, int]:
        return self.trainer.global_rank, self.trainer.world_size


class RowBatches:
    """Batches of rows whose order is a pure function of (seed, step): iterating begins at the step `first()` returns.

    Rows are drawn without replacement, in a new order each time that all have been seen. share() gives (this process's rank,
    the number of processes): each takes its own `batch` rows of a step.
    """

    def __init__(
        self,
        tokens: Rows,
        batch: int,
        steps: int,
        seed: int,
        first: Callable[[], int],
        share: Callable[[], tuple[int, int]] = lambda: (0, 1),
    ) -> None:
        self.tokens, self.batch, self.steps, self.seed, self.first, self.share = tokens, batch, steps, seed, first, share

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        for step in range(self.first(), self.steps):
            yield self.rows(step)

    def rows(self, step: int) -> Any:
        """This process's rows of one step, [batch, length]."""
        count, (rank, processes) = len(self.tokens), self.share()
        first = (step * processes + rank) * self.batch
        places = range(first, first + self.batch)
        orders = {epoch: self._order(epoch) for epoch in {place // count for place in places}}
        return self.tokens[torch.stack([orders[place // count][place % count] for place in places])]

    def _order(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.tokens), generator=generator)

    # Lightning asks a loader that can resume for these; the step, which is all the state, it has already.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class ResumableCheckpoint(pl.Callback):
    """Writes `path` every so many seconds and at the end, whole; the one before it stays until the training has ended."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.seconds, self._written = path, seconds, 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._written = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        due = time.monotonic() - self._written >= self.seconds or trainer.global_step == trainer.max_steps
        if trainer.strategy.broadcast(due):  # the first process's clock decides for all
            save(trainer, self.path)
            if trainer.is_global_zero and trainer.global_step == trainer.max_steps:
                remove(self.path.with_name(BEFORE))
            self._written = time.monotonic()


def _device(accelerator: str) -> torch.device | None:
    """The device that `accelerator` names; None: whatever is there."""
    return torch.device("cpu") if accelerator == "cpu" else None
