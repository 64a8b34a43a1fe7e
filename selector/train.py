"""Training a selector with Lightning: Eq. 12 on labelled roots, early stopping on held-out
throughput.
"""

import math
import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint, EarlyStopping
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nde_talf.decoding.common.bootstrap import ratio_of_totals, sums_by_prompt
from nde_talf.decoding.common.checkpoint import (
    BEFORE,
    CHECKPOINT,
    WholeFile,
    check_inputs,
    fingerprint,
    resumable,
    sampled,
    save,
)
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_sealed, remove, write_sealed
from nde_talf.decoding.common.progress import console, track
from nde_talf.decoding.common.training_bar import TrainingBar
from nde_talf.selector.latency import context_counts
from nde_talf.selector.network import Selector, SelectorSchema
from nde_talf.selector.objective import deviance, policy_throughput, selector_loss, visits
from nde_talf.selector.roots import PricedRoots
from nde_talf.selector.settings import SelectorConfig

# how strongly a network that has to learn prices prefers, at first, what is best throughout
UNPRICED_SHARPNESS = 20.0
CHECKPOINT_SECONDS = (
    2.0  # a checkpoint is written after the first epoch that ends this long after the last one
)
GAIN = "held_out_log_tps_argmax"  # of the actions that decoding takes; what stops a training


def cosine(step: int, steps: int) -> float:
    """The fraction of the peak learning rate at a step: 1 at the first, 0 at the last, a cosine
    between.
    """
    return (1 + math.cos(math.pi * step / steps)) / 2


class SelectorModule(pl.LightningModule):
    """Lightning's view of a training.

    Batches are (index,) into the roots, whose tensors it holds.
    """

    def __init__(
        self,
        selector: Selector,
        config: SelectorConfig,
        training: PricedRoots,
        validation: PricedRoots,
    ):
        super().__init__()
        self.selector, self.config, self.training_roots, self.validation_roots = (
            selector,
            config,
            training,
            validation,
        )
        self._static = training.static()  # [tables, settings]
        self._weights: list[Tensor] = []  # by table, of the training roots; empty: all 1
        if config.weighting == "visits":
            actions = enumerate(self._static[:, training.roots.setting])
            self._weights = [visits(training.steps(action, table)[0]) for table, action in actions]

    @cached_property
    def inputs(self) -> str:
        """Fingerprint of the settings, the roots and their prices: a checkpoint of others is not
        resumed from.
        """
        parts = [
            (
                each.verifiers,
                each.roots.scalars,
                each.roots.setting,
                each.roots.prompt,
                each.labels(sampled(len(each))),
            )
            for each in (self.training_roots, self.validation_roots)
        ]
        return fingerprint(
            self.config, parts, [(costs.rule, costs.table) for costs in self.training_roots.costs]
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["inputs"] = self.inputs

    def _policy(
        self, roots: PricedRoots, index: Tensor, table: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits, efficiency, seconds [B, C] and the baseline's action [B] of the roots `index`."""
        static, seconds = (
            self._static[table, roots.roots.setting[index]],
            roots.priced(table, index)[1],
        )
        return roots.logits(self.selector, table, index), roots.labels(index), seconds, static

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        torch.manual_seed(
            self.config.seed * 1_000_003 + self.global_step
        )  # dropout, the same after a resume

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = torch.stack(
            [self._loss(batch[0], table) for table in range(len(self.training_roots.costs))]
        ).mean()
        if not torch.isfinite(loss):
            raise UserError(
                f"selector: the loss became {float(loss)} at step {self.global_step}; lower"
                " selector.lr."
            )
        self.log("loss", loss, prog_bar=True, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def _loss(self, index: Tensor, table: int) -> Tensor:
        """Eq. 12 and the deviance on the roots `index`, under one latency table."""
        config = self.config
        logits, efficiency, seconds, base = self._policy(self.training_roots, index, table)
        weights = self._weights[table][index] if self._weights else None
        loss = config.policy_weight * selector_loss(
            logits,
            efficiency,
            seconds,
            base,
            config.tail_weight,
            config.tail_fraction,
            config.entropy_weight,
            weights,
        )
        if config.regression_weight and config.sharpness:
            loss = loss + config.regression_weight * deviance(
                logits / config.sharpness + seconds.log(), efficiency, weights
            )
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log throughput against the best static actions, by sampling setting and table, of the
        policy and of its argmax.
        """
        roots, index = self.validation_roots, batch[0]
        setting = roots.roots.setting[index]
        gains: dict[str, list[Tensor]] = {"held_out_log_tps": [], GAIN: []}
        for table in range(len(roots.costs)):
            logits, efficiency, seconds, base = self._policy(roots, index, table)
            soft = logits.softmax(-1)
            hard, static = (
                torch.zeros_like(soft).scatter_(-1, a[:, None], 1.0)
                for a in (logits.argmax(-1), base)
            )
            for own in (setting == s for s in setting.unique()):
                *rates, plain = (
                    total_throughput(x[own], efficiency[own], seconds[own])
                    for x in (soft, hard, static)
                )
                for values, rate in zip(gains.values(), rates, strict=True):
                    values.append((rate / plain).log())
        for name, values in gains.items():
            self.log(name, torch.stack(values).mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW; the learning rate falls to zero at the last step."""
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.config.lr, weight_decay=self.config.weight_decay
        )
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def total_throughput(policy: Tensor, efficiency: Tensor, seconds: Tensor) -> Tensor:
    """Tokens per second over the texts of B roots (a scalar): Eq. 4 at every root, whose seconds
    per token add up.
    """
    return 1 / (1 / policy_throughput(policy, efficiency, seconds)).mean()


def new_selector(training: PricedRoots, config: SelectorConfig) -> Selector:
    """An untrained selector that knows its inputs' scales and the static actions.

    With initialisation="static" it prefers what is best over all training roots: of every action
    the network predicts the tokens a step over their texts, or, where it has to know prices too,
    the throughput. Training then learns where to deviate. With "random" the network is as torch
    initialises it.
    """
    roots, settings = training.roots, tuple(training.roots.settings)
    sizes, learned = (roots.h_p_previous.shape[1], roots.h_q_root.shape[1]), (True,) * len(settings)
    schema = SelectorSchema(
        *(
            *sizes,
            training.verifiers,
            settings,
            learned,
            config.sharpness,
            *config.widths(sizes[1]),
            config.dropout,
        ),
        pricing=training.costs[0].rule,
    )
    selector = Selector(schema)
    tables = range(len(training.costs))
    selector.standardise(torch.cat([training.inputs(table) for table in tables]))
    if config.initialisation == "static":
        start = training.mean_tokens(torch.arange(len(training))).log()
        if not config.sharpness:
            prices = torch.stack([training.priced(table)[1].mean(0).log() for table in tables])
            start = UNPRICED_SHARPNESS * (start - prices.mean(0))
        with torch.no_grad():
            *_, weight, bias = selector.network.mlp.parameters()
            weight.mul_(0.1)
            bias.copy_(start)
    counts = [torch.zeros(0)] * len(settings)
    for setting in range(len(settings)):
        here = roots.setting == setting
        selector.static_efficiency[setting] = training.mean_tokens(here.nonzero()[:, 0])
        counts[setting] = context_counts(roots.context[here])
    selector.static_contexts, selector.table = (
        pad_sequence(counts, batch_first=True),
        training.costs[0].table,
    )
    return selector


def fit_selector(
    training: PricedRoots,
    validation: PricedRoots,
    config: SelectorConfig,
    folder: Path,
    logger: Logger | list[Logger] | None = None,
    progress: bool = True,
    stop_early: bool = True,
) -> tuple[Selector, int]:
    """Train on `training`; the selector and the epochs it has seen.

    With stop_early, those of the epoch with the best throughput on `validation`; else the last.
    `folder` receives checkpoints; a killed training resumes from the last one and ends with the
    weights it would have had.
    """
    pl.seed_everything(config.seed, verbose=False)
    selector = new_selector(training, config)
    module = SelectorModule(selector, config, training, validation)
    best = BestEpoch(folder / CHECKPOINT, GAIN if stop_early else None)
    callbacks: list[pl.Callback] = [best]
    if stop_early:
        callbacks.append(EarlyStopping(GAIN, mode="max", patience=config.patience))
    if progress:
        callbacks.append(TrainingBar("training the selector", "batch"))
    trainer = pl.Trainer(
        accelerator="cpu",  # a small network on tensors that lie on the CPU
        devices=config.devices,
        strategy="ddp_spawn" if config.devices > 1 else "auto",
        max_epochs=config.epochs,
        logger=logger or False,
        callbacks=callbacks,
        enable_progress_bar=progress,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        plugins=[WholeFile()],
    )
    folder.mkdir(parents=True, exist_ok=True)
    resumed = resumable(folder, module.state_dict())
    if resumed:
        check_inputs(torch.load(resumed, weights_only=True), module.inputs, "training the selector")
    found = best.stored(resumed) if resumed else None
    if not (found and found["ended"]):
        indices, batch = _indices(training), -(-config.batch // config.devices)
        # With one replica this sampler is a plain shuffle whose order is a pure function of (seed,
        # epoch).
        order: DistributedSampler | None = None
        if config.devices == 1:
            order = DistributedSampler(indices, num_replicas=1, rank=0, seed=config.seed)
        trainer.fit(
            module,
            DataLoader(indices, batch, sampler=order, shuffle=None if order else True),
            DataLoader(_indices(validation), len(validation)),
            ckpt_path=str(resumed) if found else None,  # an earlier version's training starts again
            weights_only=True,
        )
        found = best.stored(best.path)
    assert found is not None
    module.load_state_dict(found["weights"])
    return selector.cpu().eval(), found["epoch"] + 1


class BestEpoch(Checkpoint):
    """Writes `path` after the last epoch, and after one every so many seconds; and in it the
    weights of the epoch that a training returns: that with the highest `monitor` so far, or the
    last.
    """

    def __init__(self, path: Path, monitor: str | None):
        self.path, self.monitor = path, monitor
        self.found: dict[str, Any] = {"score": None, "epoch": -1, "weights": {}, "ended": False}
        self._written = time.monotonic()

    @property
    def state_key(self) -> str:
        return (  # a checkpoint without these is of an earlier version
            f"BestEpoch[{self.monitor}], static_contexts"
        )

    def state_dict(self) -> dict[str, Any]:
        return self.found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = dict(state)

    def stored(self, checkpoint: Path) -> dict[str, Any] | None:
        """What a checkpoint holds of this callback; None if an earlier version wrote it."""
        return torch.load(checkpoint, weights_only=True)["callbacks"].get(self.state_key)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After validation, and after the callback that stops early."""
        score = float(trainer.callback_metrics[self.monitor]) if self.monitor else None
        if score is None or self.found["score"] is None or score > self.found["score"]:
            weights = {
                name: value.detach().cpu().clone() for name, value in pl_module.state_dict().items()
            }
            self.found |= {"score": score, "epoch": trainer.current_epoch, "weights": weights}
        self.found["ended"] = trainer.should_stop or trainer.current_epoch + 1 == trainer.max_epochs
        due = self.found["ended"] or time.monotonic() - self._written >= CHECKPOINT_SECONDS
        if not trainer.strategy.broadcast(due):  # the first process's clock decides for all
            return
        save(trainer, self.path)
        self._written = time.monotonic()
        if self.found["ended"] and trainer.is_global_zero:
            remove(self.path.with_name(BEFORE))


def _indices(roots: PricedRoots) -> TensorDataset:
    return TensorDataset(torch.arange(len(roots)))


class CrossFit(NamedTuple):
    """What the folds found.

    Attributes:
        epochs: until held-out throughput was best, the median over the folds.
        gains: by sampling setting, tokens/s of the selectors on the folds that they were not
            trained on over the best static action's, [ratio, low, high] with a 95 % bootstrap
            interval over prompts.
    """

    epochs: int
    gains: list[list[float]]


def train_selector(
    training: PricedRoots,
    validation: PricedRoots,
    config: SelectorConfig,
    folder: Path,
    logger: Logger | list[Logger] | None = None,
    title: str = "selector",
) -> tuple[Selector, CrossFit]:
    """Cross-fit, then train on all `training` roots for as many epochs as the folds needed.

    With `config.fallback`, a setting whose interval is not all above 1 + `config.min_gain` gets its
    best static action. `validation` is only logged.
    """
    crossed = cross_fit(training, config, folder, title)
    selector, _ = fit_selector(
        training,
        validation,
        replace(config, epochs=crossed.epochs),
        folder,
        logger,
        stop_early=False,
    )
    selector.schema = replace(
        selector.schema,
        learned=tuple(
            not config.fallback or low > 1 + config.min_gain for _, low, _ in crossed.gains
        ),
    )
    return selector, crossed


def cross_fit(training: PricedRoots, config: SelectorConfig, folder: Path, title: str) -> CrossFit:
    """Train on all folds of the prompts but one and evaluate on that one, in turn.

    Finished folds are read from `folder`.
    """
    fold_of = prompt_folds(training.roots.prompt, config.folds)
    results = []
    for fold in track(range(config.folds), f"{title}, cross-fit", config.folds, "fold"):
        own = folder / f"fold-{fold}"
        result = _finished(own / "result.json")
        if (
            result is None or "paces" not in result
        ):  # an earlier version's held tokens and seconds of steps
            result = _fold(training, fold_of == fold, config, own)
            write_sealed(own / "result.json", result)
        results.append(result)
    paces = torch.cat(
        [torch.tensor(result["paces"], dtype=torch.float64) for result in results], -1
    )
    order = torch.cat([(fold_of == fold).nonzero()[:, 0] for fold in range(config.folds)])
    gains = gains_by_setting(paces, training.roots.prompt[order], training.roots.setting[order])
    return CrossFit(median_low([result["epochs"] for result in results]), gains)


def _finished(path: Path) -> dict | None:
    """The result of a finished fold; None, and a notice, for one that is not as it was written."""
    if not path.exists():
        return None
    try:
        return read_sealed(path, "make it again")
    except UserError:
        console.print(f"! {path} is damaged or from before checksums; this fold is made again")
        return None


def gains_by_setting(paces: Tensor, prompt: Tensor, setting: Tensor) -> list[list[float]]:
    """`CrossFit.gains`, all tables together.

    Args:
        paces: [tables, 2, R], see `_fold`.
        prompt: [R].
        setting: [R].
    """
    gains = []
    for index in range(int(setting.max()) + 1):
        here = setting == index
        chosen, static = paces[:, :, here].transpose(0, 1).flatten(1)  # [tables x roots]
        columns = torch.stack(
            [torch.ones_like(chosen), chosen, torch.ones_like(static), static], -1
        )
        gains.append(
            ratio_of_totals(
                sums_by_prompt(columns.numpy(), prompt[here].repeat(len(paces)).numpy())
            )
        )
    return gains


def _fold(training: PricedRoots, held_out: Tensor, config: SelectorConfig, folder: Path) -> dict:
    """epochs, and for every table the seconds per token [chosen, static] [R] of the held-out roots,
    in units of the static action's mean, so that tables can be added up.
    """
    own, other = training.where(~held_out), training.where(held_out)
    selector, epochs = fit_selector(own, other, config, folder, progress=False)
    static, paces = own.static(), []
    for table in range(len(training.costs)):
        with torch.inference_mode():
            chosen = other.logits(selector, table).argmax(-1)
        both = torch.stack(
            [other.pace(action, table) for action in (chosen, static[table, other.roots.setting])]
        )
        paces.append((both / both[1].mean()).tolist())
    return {"epochs": epochs, "paces": paces}


def prompt_folds(prompt: Tensor, folds: int) -> Tensor:
    """A fold in 0 .. folds - 1 for every root, all roots of a prompt [R] together.

    Raises UserError for fewer prompts than folds.
    """
    ids, group = prompt.unique(return_inverse=True)
    if len(ids) < folds:
        raise UserError(
            f"selector.folds={folds}: the traces hold {len(ids)} training prompts; raise"
            " traces.train_prompts or lower selector.folds (2 at least)."
        )
    return (torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)) % folds)[group]
