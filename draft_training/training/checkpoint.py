"""Checkpoints of trainings: written atomically, and checked before a training resumes."""

import hashlib
import io
import time
import zipfile
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from torch import Tensor

from nde_talf.decoding.common.files import content_digest, reading, write_atomically

CHECKPOINT = "last.ckpt"
"""Name, in a training's folder, of the checkpoint that a killed run resumes from."""
MAX_COST = 0.02
"""Most of a training's time that writing checkpoints may take, as a fraction."""
SAMPLED = 256
"""Rows of a tensor that a fingerprint reads."""


class WholeFile(TorchCheckpointIO):
    """Writes a checkpoint atomically, in its own folder."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the file. Raises UserError if the disk is full; the old file then stays."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_atomically(Path(path), lambda partial: partial.write_bytes(buffer.getbuffer()))


def save(trainer: pl.Trainer, path: Path) -> None:
    """Write the loggers' rows, then the checkpoint. Every process of a training must call it."""
    for logger in trainer.loggers:
        logger.save()
    trainer.save_checkpoint(path, weights_only=False)


class ResumableCheckpoint(pl.Callback):
    """Writes `path` every so many seconds and at the end.

    seconds: the smallest interval. It grows so that writing takes at most 2 % of the time: after a
    checkpoint that took 6 seconds the next one follows 294 seconds later. 0: after every step,
    whatever it takes. None is written after a skipped step: the file may be the last good one.

    evaluated: steps between evaluations; 0: none. No checkpoint is written at the step of an
    evaluation, since a training that resumes there would not evaluate. Exceptions: the last step,
    after which `train_rows` evaluates in any case, and evaluations at every step, which would leave
    no checkpoint at all.
    """

    def __init__(self, path: Path, seconds: float, evaluated: int) -> None:
        self.path, self.seconds, self.interval = path, seconds, seconds
        self.evaluated = evaluated

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of the interval between checkpoints."""
        self._written = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Write a checkpoint at the end of the training, and whenever the interval has passed."""
        step, started = trainer.global_step, time.monotonic()
        ended = step == trainer.max_steps
        unfit = pl_module.skipped or (self.evaluated > 1 and step % self.evaluated == 0)
        due = started - self._written >= self.interval and not unfit
        if trainer.strategy.broadcast(ended or due):  # the first process's clock
            save(trainer, self.path)
            self._written = time.monotonic()
            self.interval = self.seconds and max(
                self.seconds, (self._written - started) * (1 / MAX_COST - 1)
            )


def resumable(folder: Path) -> Path | None:
    """Return the checkpoint in `folder`, or None to start anew.

    Raises:
        UserError: it is damaged or no checkpoint of a training; torch does not look at the
            checksums of records.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    with reading(path, "delete it to start again"), zipfile.ZipFile(path) as file:
        if (record := file.testzip()) is not None:
            raise ValueError(f"{record} is not as it was written")
        content = torch.load(path, map_location="meta", weights_only=True)
        if not {"state_dict", "global_step", "loops"} <= {*content}:
            raise ValueError("it is no checkpoint of a training")
    return path


def fingerprint(*inputs: object) -> str:
    """Hash the inputs of a training: nested tensors, dataclasses, lists and plain values.

    Of a tensor: shape, dtype, and its rows; of weights and other fractions `SAMPLED` evenly spaced
    rows, as reading 70B of them would take minutes.
    """
    return content_digest([_plain(value) for value in inputs])


def sampled(count: int) -> Tensor:
    """Return at most `SAMPLED` evenly spaced indices below `count`."""
    most = min(count, SAMPLED)
    return torch.arange(most) * count // max(most, 1)


def _plain(value: Any) -> Any:
    """Turn `value` into a JSON value, with hashes in place of tensors."""
    if isinstance(value, Tensor):
        rows = value.detach().reshape(len(value) if value.ndim else 1, -1 if value.numel() else 0)
        if value.is_floating_point():
            rows = rows[sampled(len(rows)).to(rows.device)]
        sample = rows.cpu().contiguous()
        return [
            list(value.shape),
            str(value.dtype),
            hashlib.sha256(sample.view(torch.uint8).numpy().tobytes()).hexdigest(),
        ]
    if is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value if isinstance(value, (str, int, float, type(None))) else type(value).__name__
