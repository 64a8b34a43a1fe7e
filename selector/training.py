"""Training a selector with Lightning: Eq. 12 on labelled roots, early stopping on held-out throughput."""

import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint, EarlyStopping
from pytorch_lightning.loggers import Logger
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from decoding.common.checkpoint import BEFORE, CHECKPOINT, WholeFile, resumable, save
from decoding.common.errors import UserError
from decoding.common.files import remove
from decoding.common.training_bar import TrainingBar
from selector.choices import Choices
from selector.objective import deviance, policy_throughput, selector_loss
from selector.selector import Selector, SelectorSchema
from selector.settings import SelectorConfig

UNPRICED_SHARPNESS = 20.0  # how strongly a network that has to learn prices prefers, at first, what is best throughout
CHECKPOINT_SECONDS = 2.0  # a checkpoint is written after the first epoch that ends this long after the last one


class SelectorModule(pl.LightningModule):
    """Lightning wrapper: batches are (index,) into the roots, whose tensors it holds."""

    def __init__(self, selector: Selector, config: SelectorConfig, training: Choices, validation: Choices):
        super().__init__()
        self.selector, self.config = selector, config
        self._choices = {"training": training, "validation": validation}
        self._base = training.static()  # [tables, settings]

    def _policy(self, name: str, index: Tensor, table: int) -> tuple[Tensor, ...]:
        """Logits, efficiency, seconds [B, C] and the baseline's option [B] of the roots `index` of one split."""
        choices = self._choices[name]
        scalars, seconds = choices.priced(table, index)
        inputs = (*(h[index] for h in choices.roots.states), scalars, seconds)
        logits = self.selector(*(x.to(self.device) for x in inputs))
        base = self._base[table, choices.roots.setting[index]]
        return logits, *(x.to(self.device) for x in (choices.efficiency[index], seconds, base))

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        torch.manual_seed(self.config.seed * 1_000_003 + self.global_step)  # dropout, the same after a resume

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        index, count = batch[0].cpu(), len(self._choices["training"].costs)
        loss = torch.stack([self._loss(index, table) for table in range(count)]).mean()
        if not torch.isfinite(loss):
            raise UserError(f"selector: the loss became {float(loss)} at step {self.global_step}; lower selector.lr.")
        self.log("loss", loss, prog_bar=True, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def _loss(self, index: Tensor, table: int) -> Tensor:
        """Eq. 12 and the deviance on the roots `index`, on one machine."""
        config = self.config
        logits, efficiency, seconds, base = self._policy("training", index, table)
        loss = config.policy_weight * selector_loss(
            logits, efficiency, seconds, base, config.tail_weight, config.tail_fraction, config.entropy_weight
        )
        if config.regression_weight and config.sharpness:
            loss = loss + config.regression_weight * deviance(logits / config.sharpness + seconds.log(), efficiency)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log throughput against the best static options, by sampling setting and machine, of the policy and of its argmax."""
        choices, index = self._choices["validation"], batch[0].cpu()
        setting = choices.roots.setting[index]
        gains: dict[str, list[Tensor]] = {"held_out_log_tps": [], "held_out_log_tps_argmax": []}
        for table in range(len(choices.costs)):
            logits, efficiency, seconds, base = self._policy("validation", index, table)
            soft = logits.softmax(-1)
            hard = torch.zeros_like(soft).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
            static = torch.zeros_like(soft).scatter_(-1, base[:, None], 1.0)
            for own in (setting == s for s in setting.unique()):
                rate = [total_throughput(policy[own], efficiency[own], seconds[own]) for policy in (soft, hard, static)]
                for name, value in zip(gains, rate, strict=False):
                    gains[name].append((value / rate[-1]).log())
        for name, values in gains.items():
            self.log(name, torch.stack(values).mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW; the learning rate falls to nothing, along a cosine, at the last epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.config.lr, weight_decay=self.config.weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def total_throughput(policy: Tensor, efficiency: Tensor, seconds: Tensor) -> Tensor:
    """Tokens per second over all B steps together (a scalar): Eq. 4 with every sum over the roots too."""
    return policy_throughput(policy.flatten()[None], efficiency.flatten()[None], seconds.flatten()[None])[0]


def start_from_static(selector: Selector, training: Choices) -> None:
    """Set the output layer so that the untrained policy prefers what is best over all training roots: the network says of
    every tree its mean block efficiency, or, where it has to know prices too, its mean throughput. Training then
    learns where to deviate."""
    start = training.efficiency.mean(0).log()
    if not selector.schema.sharpness:
        seconds = [training.priced(table)[1].mean(0).log() for table in range(len(training.costs))]
        start = UNPRICED_SHARPNESS * (start - torch.stack(seconds).mean(0))
    with torch.no_grad():
        output = selector.network.mlp[-1]
        output.weight.mul_(0.1)
        output.bias.copy_(start)


def fit_selector(
    training: Choices,
    validation: Choices,
    config: SelectorConfig,
    folder: Path,
    logger: Logger | list[Logger] | None = None,
    progress: bool = True,
    stop_early: bool = True,
) -> tuple[Selector, int]:
    """Train on `training`; the selector and the epochs it has seen. With stop_early, those of the epoch with the best
    throughput on `validation`; else the last. `folder` receives checkpoints; a killed training resumes from the last one and
    ends with the weights it would have had."""
    pl.seed_everything(config.seed, verbose=False)
    roots = training.roots
    schema = SelectorSchema(
        roots.h_p_previous.shape[1],
        roots.h_q_root.shape[1],
        training.verifiers,
        tuple(roots.settings),
        (True,) * len(roots.settings),
        config.sharpness,
        config.width,
        tuple(config.hidden),
        config.dropout,
    )
    selector = Selector(schema)
    selector.standardise(torch.cat([training.priced(table)[0] for table in range(len(training.costs))]))
    start_from_static(selector, training)
    for setting in range(len(roots.settings)):
        here = roots.setting == setting
        selector.static_efficiency[setting] = training.efficiency[here].mean(0)
        selector.static_context[setting] = round(float(roots.context[here].float().mean()))
    module = SelectorModule(selector, config, training, validation)
    best = "held_out_log_tps_argmax"  # what decoding takes
    kept = KeptEpoch(folder / CHECKPOINT, best if stop_early else None)
    callbacks: list[pl.Callback] = [kept]
    if stop_early:
        callbacks.append(EarlyStopping(best, mode="max", patience=config.patience))
    trainer = pl.Trainer(
        accelerator="cpu",  # a small network on tensors that lie on the CPU
        devices=config.devices,
        strategy="ddp_spawn" if config.devices > 1 else "auto",
        max_epochs=config.epochs,
        logger=logger or False,
        callbacks=[*callbacks, TrainingBar("training the selector", "batch")] if progress else callbacks,
        enable_progress_bar=progress,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        plugins=[WholeFile()],
    )
    folder.mkdir(parents=True, exist_ok=True)
    resumed = resumable(folder)
    if resumed and kept.state_key not in _loaded(resumed)["callbacks"]:
        resumed = None  # an earlier version's, with its best epoch in another file: start again
    # With one replica this sampler is a plain shuffle whose order is a pure function of (seed, epoch).
    order = DistributedSampler(_indices(training), num_replicas=1, rank=0, seed=config.seed) if config.devices == 1 else None
    batch = -(-config.batch // config.devices)
    if not (resumed and _loaded(resumed)["callbacks"][kept.state_key]["ended"]):
        trainer.fit(
            module,
            DataLoader(_indices(training), batch, sampler=order, shuffle=True if order is None else None),
            DataLoader(_indices(validation), len(validation)),
            ckpt_path=str(resumed) if resumed else None,
            weights_only=True,
        )
        resumed = folder / CHECKPOINT
    found = _loaded(resumed)["callbacks"][kept.state_key]
    module.load_state_dict(found["weights"])
    return selector.cpu().eval(), found["epoch"] + 1


class KeptEpoch(Checkpoint):
    """Writes `path` behind the last epoch, and every so many seconds behind one; and in it the weights of the epoch that a
    training returns: that with the highest `monitor` so far, or the last."""

    def __init__(self, path: Path, monitor: str | None):
        self.path, self.monitor = path, monitor
        self.kept: dict[str, Any] = {"score": None, "epoch": -1, "weights": {}, "ended": False}
        self._written = time.monotonic()

    @property
    def state_key(self) -> str:
        return f"KeptEpoch[{self.monitor}]"

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = dict(state)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Behind validation, and behind the callback that stops early."""
        score = float(trainer.callback_metrics[self.monitor]) if self.monitor else None
        if score is None or self.kept["score"] is None or score > self.kept["score"]:
            weights = {name: value.detach().cpu().clone() for name, value in pl_module.state_dict().items()}
            self.kept |= {"score": score, "epoch": trainer.current_epoch, "weights": weights}
        self.kept["ended"] = trainer.should_stop or trainer.current_epoch + 1 == trainer.max_epochs
        due = self.kept["ended"] or time.monotonic() - self._written >= CHECKPOINT_SECONDS
        if not trainer.strategy.broadcast(due):  # the first process's clock decides for all
            return
        save(trainer, self.path)
        self._written = time.monotonic()
        if self.kept["ended"] and trainer.is_global_zero:
            remove(self.path.with_name(BEFORE))


def _loaded(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint, weights_only=True)


def _indices(choices: Choices) -> TensorDataset:
    return TensorDataset(torch.arange(len(choices)))
