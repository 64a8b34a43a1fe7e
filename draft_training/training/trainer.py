"""Resumable training on rows of tokens: the base of `lm_training` and `head_training`.

The order of the rows is a pure function of (seed, step), and checkpoints are written atomically. So
a killed run resumes with the batches that it would have seen, and ends with the same weights.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, RichProgressBar
from pytorch_lightning.loggers import Logger
from torch import Tensor, nn
from transformers import PreTrainedModel

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import reading
from nde_talf.decoding.common.lightning_progress import Counted
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.models.precision import native_bfloat16
from nde_talf.draft_training.training.checkpoint import (
    CHECKPOINT,
    ResumableCheckpoint,
    WholeFile,
    fingerprint,
    resumable,
)
from nde_talf.draft_training.training.muon import Muon
from nde_talf.draft_training.training.precision import default_device
from nde_talf.draft_training.training_settings import OPERATIONAL, TrainingConfig

HELD_OUT_LOSS = "held_out_loss"
BEST = "best.ckpt"
"""Name, in a training's folder, of the checkpoint with the lowest held-out loss so far."""
MAX_BAD_STEPS = 10
"""Skipped steps with a non-finite loss or gradient, after which a process stops."""


def warm_up_then_linear(step: int, steps: int, warm_up: int, fall: float) -> float:
    """Return the fraction of the peak learning rates at `step` (from 0).

    It rises linearly over `warm_up` steps, stays at 1, and falls linearly to 0 over the last
    `fall` steps.

    >>> [warm_up_then_linear(step, 10, warm_up=2, fall=6) for step in (0, 1, 4, 7, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    return min(1.0, (step + 1) / max(1, warm_up), (steps - step) / max(1.0, fall))


def warm_up_then_cosine(step: int, steps: int, warm_up: int) -> float:
    """Return the fraction of the peak learning rates at `step` (from 0).

    It rises linearly over `warm_up` steps, then falls along half a cosine to 0.

    >>> [round(warm_up_then_cosine(step, 10, warm_up=2), 3) for step in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / max(1, steps - warm_up))))


class RowModule(pl.LightningModule):
    """A training on rows.

    A subclass defines `trained`, `matrices`, `loss` and `learning_rate_fraction`.

    Muon trains the matrices, AdamW everything else, and both follow one schedule. Lightning would
    count a step of each optimiser. The steps are taken by hand instead, so that `global_step` is
    the number of the batch.
    """

    title: str
    """Text at the progress bar and in messages."""
    in_bar: tuple[str, ...] = ("loss",)
    """Figures that the progress bar shows."""
    frozen: Sequence[PreTrainedModel] = ()
    """Transformers models that the steps run but do not train."""
    trained: nn.Module
    config: TrainingConfig
    place: torch.device
    """Device of a single process; "cuda" is the first GPU."""
    skipped = False
    """True if the last step was skipped, as its loss or gradient was not finite."""
    inputs: str | None = None
    """Fingerprint of rows and frozen models; a checkpoint with another one is refused."""

    def __init__(self, config: TrainingConfig):
        super().__init__()
        self.automatic_optimization = False
        self.config, self.place = config, default_device()

    def matrices(self) -> list[nn.Parameter]:
        """Return the matrices that Muon trains; none if AdamW trains all."""
        raise NotImplementedError

    def loss(self, batch: Any, step: int, part: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss of one pass, and figures to log, all scalars.

        It is a pure function of its arguments and the seed. part: number of the pass in its step.
        """
        raise NotImplementedError

    def learning_rate_fraction(self, step: int) -> float:
        """Return the fraction of the peak learning rates at `step` (from 0)."""
        raise NotImplementedError

    @property
    def trained_in(self) -> str:
        """Lightning's name of the precision of the training."""
        if (asked := self.config.precision) != "auto":
            return asked
        return "bf16-mixed" if native_bfloat16(self.place) else "32-true"

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return AdamW, then Muon where there are matrices for it."""
        config, matrices = self.config, self.matrices()
        inside = {id(matrix) for matrix in matrices}
        others = [p for p in self.trained.parameters() if id(p) not in inside]
        adamw = torch.optim.AdamW(others, lr=config.lr_adam, betas=(0.9, 0.95), weight_decay=0.0)
        if not matrices:
            return [adamw]
        return [adamw, Muon(matrices, config.lr_muon, bfloat16=self.trained_in.startswith("bf16"))]

    def on_train_start(self) -> None:
        """Start the clock of tokens per second."""
        self._clock, self._bad_steps = time.perf_counter(), 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Take a step: backward, check, schedule, clip, update, report."""
        config, fraction = self.config, self.learning_rate_fraction(self.global_step)
        optimizers = self.optimizers()
        adamw, *muon = optimizers if isinstance(optimizers, list) else [optimizers]
        figures = self._backward(batch)
        self.skipped = self._is_bad(figures["loss"])
        if self.skipped:  # without gradients AdamW counts a step and moves nothing
            self.trained.zero_grad()
        for optimizer, peak in zip((adamw, *muon), (config.lr_adam, config.lr_muon), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = peak * fraction
            if config.gradient_clip is not None:
                self.clip_gradients(optimizer, config.gradient_clip, "norm")
        for each in muon:  # below Lightning's wrapper, so that only AdamW's counts as a step
            each.optimizer.step()
        adamw.step()
        if self.skipped:
            return
        now = time.perf_counter()
        speed, self._clock = batch.numel() / (now - self._clock), now
        shown = {name: figures.pop(name) for name in self.in_bar} | {"tokens_per_second": speed}
        self.log_dict(shown, prog_bar=True)
        self.log_dict(figures | {"lr": peak * fraction})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss on held-out rows, with the same random choices in every evaluation."""
        loss, _ = self.loss(batch, self.config.steps, batch_idx)
        self.log(HELD_OUT_LOSS, loss, batch_size=self.counted(batch), sync_dist=True)

    def counted(self, batch: Any) -> int:
        """Count the terms of the mean in `loss`, the weight of a pass in its step."""
        return len(batch)

    def in_pass(self, batch: Any) -> int:
        """Return the rows per pass of a step's `batch`."""
        return self.config.batch

    def _backward(self, batch: Any) -> dict[str, float]:
        """Compute gradients of the mean loss over a step; return the figures' means."""
        self.trained.zero_grad()
        size, means = self.in_pass(batch), []
        parts = [batch[start : start + size] for start in range(0, len(batch), size)]
        counts = torch.tensor([*map(self.counted, parts)], device=self.device, dtype=torch.float32)
        # Relative to the mean over processes, since gradients are averaged over these.
        shares = counts / self.trainer.strategy.reduce(counts.sum(), reduce_op="mean")
        for number, part in enumerate(parts):
            loss, figures = self.loss(part, self.global_step, number)
            self.manual_backward(loss * shares[number])
            means.append(torch.stack([loss.detach(), *figures.values()]) * shares[number])
        mean = self.trainer.strategy.reduce(torch.stack(means).sum(0), reduce_op="mean")
        return dict(zip(["loss", *figures], mean.tolist(), strict=True))

    def _is_bad(self, loss: float) -> bool:
        """Return whether loss or gradient of this step is not finite.

        Raises UserError if there were too many such steps.
        """
        gradients = [p.grad for p in self.trained.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        finite = math.isfinite(loss) and math.isfinite(norm)
        if self.trainer.strategy.reduce_boolean_decision(finite):
            return False
        self._bad_steps += 1
        fault = (
            f"{self.title}: the loss became {loss} (norm of its gradient {norm}) at step"
            f" {self.global_step}"
        )
        if self._bad_steps > MAX_BAD_STEPS:
            raise UserError(
                f"{fault}, after {MAX_BAD_STEPS} such steps that were passed over: the training"
                " diverged. Delete the training's folder and start again with lower learning rates"
                " (lr_muon, lr_adam), a longer warm_up or with gradient_clip."
            )
        count = f"{self._bad_steps} of at most {MAX_BAD_STEPS}"
        console.print(f"! {fault}: passed over, {count}")
        return True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add settings and inputs, for a resumed training; raise UserError for weights of NaN."""
        if not all(bool(weight.isfinite().all()) for weight in self.trained.parameters()):
            raise UserError(
                f"{self.title}: its weights are not finite after step {self.global_step - 1}, so"
                f" they are not written, and {CHECKPOINT} stands as it was. Delete the training's"
                " folder and start again with lower learning rates."
            )
        checkpoint["settings"], checkpoint["trained_in"] = asdict(self.config), self.trained_in
        checkpoint["inputs"] = self.inputs

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise UserError for the checkpoint of another training."""
        began, now = checkpoint.get("settings", {}), asdict(self.config)
        chosen = {"precision chosen": "trained_in", "rows or models": "inputs"}
        began = began | {name: checkpoint.get(key) for name, key in chosen.items()}
        now |= {"precision chosen": self.trained_in, "rows or models": self.inputs}
        other = [name for name in now if name not in OPERATIONAL and began.get(name) != now[name]]
        if other:
            raise UserError(
                f"{self.title}: the unfinished training in {CHECKPOINT} was begun with other"
                f" settings than those of now ({', '.join(other)}). Delete the"
                " training's folder to start again, or go back to what it was begun with."
            )


def train_rows(
    module: RowModule,
    rows: Any,
    folder: Path,
    logger: Logger | list[Logger] | None = None,
    callbacks: Sequence[pl.Callback] = (),
    rows_in_step: int | None = None,
    held_out: Any = None,
    **options: Any,
) -> None:
    """Train `module` for `config.steps` batches of `rows`.

    A finished run trains no further.

    Args:
        module: what is trained.
        rows: of tokens, [rows, length], or any container with a length that a tensor of row numbers
            indexes, giving items with a length, slices and `numel`, as tensors do.
        folder: of the checkpoint. A run resumes from `last.ckpt` there.
        logger: of the figures.
        callbacks: of Lightning.
        rows_in_step: of each device; None: `config.batch`.
        held_out: rows for an evaluation every `config.evaluate_every` steps and at the end; None if
            that is 0. The module then gets the weights with the lowest `held_out_loss`.
            `best.ckpt` in the folder is the best checkpoint before the end.
        options: of Lightning's Trainer, such as strategy and devices.
    """
    config, best, place = module.config, folder / BEST, module.place
    console.print(f"precision: {module.trained_in}")
    folder.mkdir(parents=True, exist_ok=True)
    every, evaluation = 0, None
    keep = ModelCheckpoint(folder, best.stem, HELD_OUT_LOSS, enable_version_counter=False)
    if held_out is not None:
        every, count = min(config.evaluate_every, config.steps), len(held_out) // config.batch
        evaluation = RowBatches(held_out, config.batch, max(1, count), config.seed)
        callbacks = [*callbacks, keep]
    written = ResumableCheckpoint(folder / CHECKPOINT, config.checkpoint_seconds, every)
    trainer = pl.Trainer(
        accelerator=place.type,
        precision=module.trained_in,
        max_epochs=1,
        max_steps=config.steps,
        logger=logger or False,
        log_every_n_steps=max(1, min(10, config.steps // 40)),
        callbacks=[*callbacks, written, RichProgressBar(), Counted()],
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        val_check_interval=every or None,
        check_val_every_n_epoch=None if every else 1,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[WholeFile()],
        **{"devices": 1 if place.index is None else [place.index]} | options,
    )
    batches = RowBatches(rows, rows_in_step or config.batch, config.steps, config.seed, trainer)
    resumed = resumable(folder)
    module.inputs = fingerprint(rows, [dict(model.named_parameters()) for model in module.frozen])
    module.train()
    with eager_attention(module):
        trainer.fit(module, batches, evaluation, ckpt_path=resumed, weights_only=True)
        if evaluation is not None:
            (end,) = trainer.validate(module, evaluation, verbose=False)
            _take_best(module, best, keep.state_key, end[HELD_OUT_LOSS])


def _take_best(module: RowModule, path: Path, key: str, loss: float) -> None:
    """Give `module` the weights in `path` unless its own held-out `loss` is lower.

    key: of the callback that wrote them. After a training in several processes only the file has
    its score.
    """
    if not path.exists():
        return
    with reading(path, "delete it, and the last weights are taken"):
        best = torch.load(path, map_location="cpu", weights_only=True)
        if not loss < best["callbacks"][key]["best_model_score"]:
            module.load_state_dict(best["state_dict"])
            console.print(f"the best held-out loss was that of step {best['global_step']}")


@contextmanager
def eager_attention(module: RowModule) -> Iterator[None]:
    """Train a transformers model on the CPU with plain attention.

    On a CPU plain attention is faster than the fused kernel in forward and backward passes over
    short rows (1.2 times with rows of 64 and 128 tokens in bfloat16), and slower in forward passes
    alone.
    """
    model = module.trained
    if module.place.type != "cpu" or not isinstance(model, PreTrainedModel):
        yield
        return
    before = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@dataclass
class Position:
    """Step of a training and rank of this process, with the names of Lightning's Trainer."""

    global_step: int = 0
    global_rank: int = 0
    world_size: int = 1


class RowBatches:
    """Batches of rows whose order is a pure function of (seed, step).

    Iterating begins at step `at.global_step`.

    Rows are drawn without replacement, in a new order each time that all have been seen. Each
    process takes its own `batch` rows of a step.
    """

    def __init__(
        self, rows: Any, batch: int, steps: int, seed: int, at: Position | pl.Trainer = Position()
    ):
        self.rows, self.batch, self.steps, self.seed, self.at = rows, batch, steps, seed, at

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        epoch_of = lru_cache(2)(self._epoch)  # drawn once: slow beside a step on a GPU
        for step in range(self.at.global_step, self.steps):
            place = step * self.at.world_size + self.at.global_rank
            epoch, first = divmod(place * self.batch, len(self.rows))
            order = epoch_of(epoch)[first : first + self.batch]
            while len(order) < self.batch:
                epoch += 1
                order = torch.cat([order, epoch_of(epoch)[: self.batch - len(order)]])
            yield self.rows[order]

    def _epoch(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        return torch.randperm(len(self.rows), generator=generator)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, which Lightning requires of a resumable loader."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing; see `state_dict`."""
