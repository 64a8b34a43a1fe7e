"""Training a selector with Lightning: Eq. 12 on labelled roots, cross-validated on the prompts.

The prompts that the selector is evaluated on take no part: how long to train, and under which
sampling settings choosing beats the static tree, comes from folds of the training prompts.
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
from nde_talf.decoding.common.progress import track
from nde_talf.decoding.common.training_bar import TrainingBar
from nde_talf.selector.latency import context_counts
from nde_talf.selector.network import Selector, SelectorSchema
from nde_talf.selector.objective import deviance, policy_throughput, selector_loss, visits
from nde_talf.selector.roots import PricedRoots
from nde_talf.selector.settings import SelectorConfig

UNPRICED_SHARPNESS = 20.0
"""How strongly a network that has to learn prices prefers, at first, what is best throughout."""
CHECKPOINT_SECONDS = 2.0
"""A checkpoint follows the last one after the first epoch that ends so much later."""
GAIN = "held_out_log_tps_argmax"  # of the actions that decoding takes; what stops a training


class CrossFit(NamedTuple):
    """Result of the folds.

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
    learned = tuple(not config.fallback or low > 1 + config.min_gain for _, low, _ in crossed.gains)
    selector.schema = replace(selector.schema, learned=learned)
    return selector, crossed


def cross_fit(training: PricedRoots, config: SelectorConfig, folder: Path, title: str) -> CrossFit:
    """Train on all folds of the prompts but one and evaluate on that one, in turn.

    Finished folds are read from `folder`.
    """
    fold_of = prompt_folds(training.roots.prompt, config.folds)
    results = []
    for fold in track(range(config.folds), f"{title}, cross-fit", config.folds, "fold"):
        path = folder / f"fold-{fold}" / "result.json"
        if not path.exists():
            write_sealed(path, _fold(training, fold_of == fold, config, path.parent))
        results.append(read_sealed(path, "delete it, and this fold is trained again"))
    paces = [torch.tensor(result["paces"], dtype=torch.float64) for result in results]
    order = torch.cat([(fold_of == fold).nonzero()[:, 0] for fold in range(config.folds)])
    roots = training.roots
    gains = gains_by_setting(torch.cat(paces, -1), roots.prompt[order], roots.setting[order])
    return CrossFit(median_low([result["epochs"] for result in results]), gains)


def gains_by_setting(paces: Tensor, prompt: Tensor, setting: Tensor) -> list[list[float]]:
    """Compute `CrossFit.gains`, all tables together.

    Args:
        paces: [tables, 2, R], see `_fold`.
        prompt: [R].
        setting: [R].
    """
    gains = []
    for index in range(int(setting.max()) + 1):
        here = setting == index
        chosen, static = paces[:, :, here].transpose(0, 1).flatten(1)  # [tables x roots]
        one = torch.ones_like(chosen)
        columns = torch.stack([one, chosen, one, static], -1).numpy()
        prompts = prompt[here].repeat(len(paces)).numpy()
        gains.append(ratio_of_totals(sums_by_prompt(columns, prompts)))
    return gains


def _fold(training: PricedRoots, held_out: Tensor, config: SelectorConfig, folder: Path) -> dict:
    """Train without the held-out roots and choose at them.

    The result is the epochs, and for every table the seconds per token [chosen, static] [R] of the
    held-out roots, in units of the static action's mean, so that tables can be added up.
    """
    seen, unseen = training.where(~held_out), training.where(held_out)
    selector, epochs = fit_selector(seen, unseen, config, folder, progress=False)
    static, paces = seen.static(), []
    for table in range(len(training.costs)):
        with torch.inference_mode():
            chosen = unseen.logits(selector, table).argmax(-1)
        actions = chosen, static[table, unseen.roots.setting]
        both = torch.stack([unseen.pace(action, table) for action in actions])
        paces.append((both / both[1].mean()).tolist())
    return {"epochs": epochs, "paces": paces}


def prompt_folds(prompt: Tensor, folds: int) -> Tensor:
    """[R]: a fold in 0 .. folds - 1 for every root, all roots of a prompt [R] together.

    Raises:
        UserError: there are fewer prompts than folds.
    """
    ids, group = prompt.unique(return_inverse=True)
    if len(ids) < folds:
        raise UserError(
            f"selector.folds={folds}: the traces hold {len(ids)} training prompts; raise"
            " traces.train_prompts or lower selector.folds (2 at least)."
        )
    return (torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)) % folds)[group]


def new_selector(training: PricedRoots, config: SelectorConfig) -> Selector:
    """Make an untrained selector that knows its inputs' scales and the static actions.

    With initialisation="static" it prefers what is best over all training roots: of every action
    the network predicts the tokens a step over their texts, or, where it has to know prices too,
    the throughput. Training then learns where to deviate. With "random" the network is as torch
    initialises it.
    """
    roots, tables = training.roots, range(len(training.costs))
    target_hidden, draft_hidden = roots.h_p_previous.shape[1], roots.h_q_root.shape[1]
    width, hidden = config.widths(draft_hidden)
    schema = SelectorSchema(
        target_hidden=target_hidden,
        draft_hidden=draft_hidden,
        verifiers=training.verifiers,
        settings=tuple(roots.settings),
        learned=(True,) * len(roots.settings),
        sharpness=config.sharpness,
        width=width,
        hidden=hidden,
        dropout=config.dropout,
        pricing=training.costs[0].rule,
    )
    selector = Selector(schema)
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
    counts = []
    for setting in range(len(roots.settings)):
        here = roots.setting == setting
        selector.static_efficiency[setting] = training.mean_tokens(here.nonzero()[:, 0])
        counts.append(context_counts(roots.context[here]))
    selector.static_contexts = pad_sequence(counts, batch_first=True)
    selector.table = training.costs[0].table
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
    """Train on `training`; return the selector and the epochs it has seen.

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
    resumed = resumable(folder)
    if resumed:
        check_inputs(torch.load(resumed, weights_only=True), module.inputs, "training the selector")
    if not (resumed and best.stored(resumed)["ended"]):
        roots = [TensorDataset(torch.arange(len(split))) for split in (training, validation)]
        # With one replica this sampler is a plain shuffle whose order is a pure function of (seed,
        # epoch); with more, Lightning puts in its own.
        order: DistributedSampler = DistributedSampler(
            roots[0], num_replicas=1, rank=0, seed=config.seed
        )
        alone, batch = config.devices == 1, -(-config.batch // config.devices)
        loader = DataLoader(roots[0], batch, sampler=order if alone else None, shuffle=not alone)
        held_out = DataLoader(roots[1], len(validation))
        trainer.fit(module, loader, held_out, ckpt_path=resumed and str(resumed), weights_only=True)
        resumed = best.path
    state = best.stored(resumed)
    module.load_state_dict(state["weights"])
    return selector.cpu().eval(), state["epoch"] + 1


class SelectorModule(pl.LightningModule):
    """Lightning's view of a training: batches are (index,) into the roots, which it holds."""

    def __init__(
        self,
        selector: Selector,
        config: SelectorConfig,
        training: PricedRoots,
        validation: PricedRoots,
    ):
        super().__init__()
        self.selector, self.config = selector, config
        self.training_roots, self.validation_roots = training, validation
        self._static = training.static()  # [tables, settings]
        self._weights: list[Tensor] = []  # by table, of the training roots; empty: all 1
        if config.weighting == "visits":
            actions = enumerate(self._static[:, training.roots.setting])
            self._weights = [visits(training.steps(action, table)[0]) for table, action in actions]

    @cached_property
    def inputs(self) -> str:
        """Fingerprint of settings, roots and prices: a checkpoint of others is not resumed from."""
        parts = [
            (
                split.verifiers,
                split.roots.scalars,
                split.roots.setting,
                split.roots.prompt,
                split.labels(sampled(len(split))),
            )
            for split in (self.training_roots, self.validation_roots)
        ]
        prices = [(costs.rule, costs.table) for costs in self.training_roots.costs]
        return fingerprint(self.config, parts, prices)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note what the training is of."""
        checkpoint["inputs"] = self.inputs

    def _policy(
        self, roots: PricedRoots, index: Tensor, table: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits, efficiency, seconds [B, C] and the baseline's action [B] of the roots `index`."""
        seconds = roots.priced(table, index)[1]
        static = self._static[table, roots.roots.setting[index]]
        return roots.logits(self.selector, table, index), roots.labels(index), seconds, static

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        """Seed the dropout of this step, so that a resumed training draws the same."""
        torch.manual_seed(self.config.seed * 1_000_003 + self.global_step)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean loss over the latency tables."""
        tables = range(len(self.training_roots.costs))
        loss = torch.stack([self._loss(batch[0], table) for table in tables]).mean()
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
        """Log throughput over the best static actions', of the policy and of its argmax."""
        roots, index = self.validation_roots, batch[0]
        setting = roots.roots.setting[index]
        gains: dict[str, list[Tensor]] = {"held_out_log_tps": [], GAIN: []}
        for table in range(len(roots.costs)):
            logits, efficiency, seconds, base = self._policy(roots, index, table)
            soft = logits.softmax(-1)
            hard, static = (
                torch.zeros_like(soft).scatter_(-1, action[:, None], 1.0)
                for action in (logits.argmax(-1), base)
            )
            for here in (setting == s for s in setting.unique()):
                *rates, plain = (
                    total_throughput(policy[here], efficiency[here], seconds[here])
                    for policy in (soft, hard, static)
                )
                for values, rate in zip(gains.values(), rates, strict=True):
                    values.append((rate / plain).log())
        for name, values in gains.items():
            self.log(name, torch.stack(values).mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW; the learning rate falls to zero at the last step."""
        config, steps = self.config, int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=config.lr, weight_decay=config.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def cosine(step: int, steps: int) -> float:
    """Fraction of the peak learning rate at a step: a cosine from 1 at the first to 0."""
    return (1 + math.cos(math.pi * step / steps)) / 2


def total_throughput(policy: Tensor, efficiency: Tensor, seconds: Tensor) -> Tensor:
    """Tokens per second over the texts of B roots (a scalar).

    Eq. 4 at every root, whose seconds per token add up.
    """
    return 1 / (1 / policy_throughput(policy, efficiency, seconds)).mean()


class BestEpoch(Checkpoint):
    """Writes `path` after the last epoch, and after one every so many seconds.

    In it are the weights of the epoch that a training returns: that with the highest `monitor` so
    far, or, without one, the last.
    """

    def __init__(self, path: Path, monitor: str | None):
        self.path, self.monitor = path, monitor
        self.best: dict[str, Any] = {"score": None, "epoch": -1, "weights": {}, "ended": False}
        self._written = time.monotonic()

    @property
    def state_key(self) -> str:
        """Name of this callback's state in a checkpoint."""
        return f"BestEpoch[{self.monitor}]"

    def state_dict(self) -> dict[str, Any]:
        """Score, epoch and weights of the best epoch, and whether the training has ended."""
        return self.best

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self.best = dict(state)

    def stored(self, checkpoint: Path) -> dict[str, Any]:
        """Read this callback's state from a checkpoint."""
        return torch.load(checkpoint, weights_only=True)["callbacks"][self.state_key]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After validation, and after the callback that stops early."""
        score = float(trainer.callback_metrics[self.monitor]) if self.monitor else None
        if score is None or self.best["score"] is None or score > self.best["score"]:
            weights = {
                name: value.detach().cpu().clone() for name, value in pl_module.state_dict().items()
            }
            self.best |= {"score": score, "epoch": trainer.current_epoch, "weights": weights}
        self.best["ended"] = trainer.should_stop or trainer.current_epoch + 1 == trainer.max_epochs
        due = self.best["ended"] or time.monotonic() - self._written >= CHECKPOINT_SECONDS
        if not trainer.strategy.broadcast(due):  # the first process's clock decides for all
            return
        save(trainer, self.path)
        self._written = time.monotonic()
        if self.best["ended"] and trainer.is_global_zero:
            remove(self.path.with_name(BEFORE))
