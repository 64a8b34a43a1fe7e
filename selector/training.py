"""Training a selector with Lightning: Eq. 12 on labelled roots, cross-validated on the prompts.

The prompts that the selector is evaluated on take no part: how long to train, and under which
sampling settings choosing beats the static tree, comes from folds of the training prompts.
"""

import math
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, RichProgressBar
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nde_talf.decoding.common.counted import Counted
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_sealed, write_sealed
from nde_talf.decoding.common.progress import track
from nde_talf.selector.network import Selector
from nde_talf.selector.objective import deviance, selector_loss, taken, visits
from nde_talf.selector.prices import context_counts
from nde_talf.selector.roots import PricedRoots, throughput_gain
from nde_talf.selector.schema import SelectorSchema
from nde_talf.selector.selector_settings import SelectorConfig

PATIENCE, WEIGHT_DECAY = 5, 0.1
"""Epochs without better held-out throughput before a fold's training stops; of AdamW."""
UNPRICED_SHARPNESS = 20.0
"""Initial preference of a network that has to learn prices for the tree that is best throughout."""
SHARES = (8, 4, 2)
"""The learning curve is fitted on an eighth, a quarter and half of the prompts before all."""
GAIN = "held_out_log_tps_argmax"  # of the actions that decoding takes; what stops a training


class CrossFit(NamedTuple):
    """Result of the folds.

    Attributes:
        epochs: until held-out throughput was best, the median over the folds.
        gains: by sampling setting, tokens/s of the selectors on the folds that they were not
            trained on over the best static action's, [ratio, low, high] with a 95 % bootstrap
            interval over prompts.
        curve: of the selectors fitted on an eighth, a quarter, half and all of the prompts
            [prompts, ratio, low, high], under all settings together.
    """

    epochs: int
    gains: list[list[float]]
    curve: list[list[float]]

    @property
    def doubling(self) -> float:
        """Ratio that the last doubling of the prompts added: the next one adds hardly more."""
        return self.curve[-1][1] - self.curve[-2][1] if len(self.curve) > 1 else math.nan


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
    selector, _ = fit_selector(training, validation, config, logger, crossed.epochs)
    learned = tuple(not config.fallback or low > 1 + config.min_gain for _, low, _ in crossed.gains)
    selector.schema = replace(selector.schema, learned=learned)
    return selector, crossed


def cross_fit(training: PricedRoots, config: SelectorConfig, folder: Path, title: str) -> CrossFit:
    """Train on all folds of the prompts but one and evaluate on that one, in turn.

    Finished folds are read from `folder`.
    """
    roots, fold_of = training.roots, prompt_folds(training.roots.prompt, config.folds)
    order = fold_of.argsort(stable=True)
    prompt, curve = roots.prompt[order], []
    fits = [(share, fold) for share in (*SHARES, 1) for fold in fold_of.unique().tolist()]
    count, results = len(roots.prompt.unique()), dict[int, list[dict]]()
    for share, fold in track(fits, f"{title}, cross-fit", len(fits), "fit"):
        path = folder / (f"fold-{fold}.json" if share == 1 else f"fold-{fold}-of-{share}.json")
        if not path.exists():
            write_sealed(path, _fold(training, fold_of == fold, config, share))
        read = read_sealed(path, "delete it, and this fold is trained again")
        results.setdefault(share, []).append(read)
    for share, parts in results.items():
        if all(parts):
            paces = torch.cat([torch.tensor(part["paces"]).double() for part in parts], -1)
            curve.append([count / share, *_gain(paces, prompt)])
    setting = roots.setting[order]
    gains = [
        _gain(paces[..., setting == index], prompt[setting == index])
        for index in range(len(roots.settings))
    ]
    return CrossFit(median_low([part["epochs"] for part in parts]), gains, curve)


def _gain(paces: Tensor, prompt: Tensor) -> list[float]:
    """Compute [ratio, low, high] of paces [tables, 2, R], all tables together: see `_fold`."""
    chosen, static = paces.transpose(0, 1).flatten(1)
    return throughput_gain(chosen, static, prompt.repeat(len(paces)))


def _fold(training: PricedRoots, held_out: Tensor, config: SelectorConfig, share: int) -> dict:
    """Train without the held-out roots, on one in `share` of the prompts, and choose at them.

    The result is the epochs, and for every table the seconds per token [chosen, static] [R] of the
    held-out roots, in units of the static action's mean, so that tables can be added up. It is
    empty where so few prompts lack a setting.
    """
    seen, unseen = training.where(~held_out), training.where(held_out)
    static, paces = seen.static(), list[list]()
    if share > 1:
        seen = seen.where(shuffled(seen.roots.prompt) % share == 0)
        if len(seen.roots.setting.unique()) < len(seen.roots.settings):
            return {}
    selector, epochs = fit_selector(seen, unseen, config)
    for table in range(len(training.costs)):
        with torch.inference_mode():
            both = pace_beside_static(selector, unseen, static, table)
        paces.append((both / both[1].mean()).tolist())
    return {"epochs": epochs, "paces": paces}


def pace_beside_static(
    selector: Selector, roots: PricedRoots, static: Tensor, table: int
) -> Tensor:
    """[2, R]: seconds per token of the most probable actions, and of the static ones.

    static: [tables, settings], as `PricedRoots.static` gives it.
    """
    actions = roots.logits(selector, table).argmax(-1), static[table, roots.roots.setting]
    return torch.stack([roots.pace(action, table) for action in actions])


def prompt_folds(prompt: Tensor, folds: int) -> Tensor:
    """[R]: a fold in 0 .. folds - 1 for every root, all roots of a prompt [R] together.

    Where there are fewer prompts than folds, each is a fold. Raises UserError where there is one.
    """
    number = shuffled(prompt)
    if not number.any():
        raise UserError(
            "selector: all roots of the traces are of one training prompt; raise"
            " traces.train_prompts."
        )
    return number % folds


def shuffled(prompt: Tensor) -> Tensor:
    """[R]: a number in 0 .. prompts - 1 for the prompt of every root, in an order drawn once."""
    ids, group = prompt.unique(return_inverse=True)
    return torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))[group]


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
        verifiers=(training.verifier,),
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
            prices = torch.stack([training.seconds(table).mean(0).log() for table in tables])
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
    logger: Logger | list[Logger] | None = None,
    epochs: int | None = None,
) -> tuple[Selector, int]:
    """Train on `training`; return the selector and the epochs it has seen.

    It stops early, at the epoch with the best throughput on `validation`, or else after `epochs` of
    `config.epochs`, and shows its progress. Equal arguments give equal weights.
    """
    pl.seed_everything(config.seed, verbose=False)
    selector = new_selector(training, config)
    module = SelectorModule(selector, config, training, validation)
    best = BestEpoch(GAIN, mode="max", patience=PATIENCE)
    trainer = pl.Trainer(
        accelerator="cpu",  # a small network on tensors that lie on the CPU
        devices=1,
        max_epochs=epochs or config.epochs,
        logger=logger or False,
        callbacks=[RichProgressBar(), Counted()] if epochs else [best],
        enable_progress_bar=bool(epochs),
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )
    seen, unseen = (TensorDataset(torch.arange(len(split))) for split in (training, validation))
    # With one replica this sampler's order is a pure function of (seed, epoch).
    order: DistributedSampler = DistributedSampler(seen, 1, 0, seed=config.seed)
    loader = DataLoader(seen, config.batch, sampler=order)
    trainer.fit(module, loader, DataLoader(unseen, len(validation)))
    if epochs is None:
        if best.weights is None:
            raise UserError("selector: no epoch had a finite gain; lower selector.lr.")
        module.load_state_dict(best.weights)
    return selector.cpu().eval(), epochs or best.epoch + 1


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
        actions = self._static[:, training.roots.setting]
        self._weights = torch.ones(actions.shape)
        if config.weighting == "visits":
            weights = [visits(taken(training.efficiency, each)) for each in actions]
            self._weights = torch.stack(weights)

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
        self.log("loss", loss, prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def _loss(self, index: Tensor, table: int) -> Tensor:
        """Eq. 12 and the deviance on the roots `index`, under one latency table."""
        config, roots = self.config, self.training_roots
        logits, efficiency = roots.logits(self.selector, table, index), roots.efficiency[index]
        seconds, weights = roots.seconds(table, index), self._weights[table, index]
        loss = selector_loss(
            logits,
            efficiency,
            seconds,
            self._static[table, roots.roots.setting[index]],
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
        """Log throughput of the argmax over that of the best static actions."""
        roots, gains = self.validation_roots, []
        setting = roots.roots.setting
        for table in range(len(roots.costs)):
            paces = pace_beside_static(self.selector, roots, self._static, table)
            for here in (setting == s for s in setting.unique()):
                chosen, static = paces[:, here].mean(-1)  # seconds per token add up over the texts
                gains.append((static / chosen).log())
        self.log(GAIN, torch.stack(gains).mean(), prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW; the learning rate would fall to zero at the last step of all `config.epochs`.

        The epoch that did best in the folds did so at its rates.
        """
        config, trainer = self.config, self.trainer
        steps = int(trainer.estimated_stepping_batches) * config.epochs // (trainer.max_epochs or 1)
        optimizer = torch.optim.AdamW(self.parameters(), lr=config.lr, weight_decay=WEIGHT_DECAY)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class BestEpoch(EarlyStopping):
    """Stops a training, and keeps its best epoch on held-out roots, with the weights."""

    epoch: int
    weights: dict[str, Tensor] | None = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare scores after validation."""
        super().on_train_epoch_end(trainer, pl_module)
        if not self.wait_count and trainer.callback_metrics[GAIN].isfinite():
            self.epoch = trainer.current_epoch
            self.weights = {name: x.clone() for name, x in pl_module.state_dict().items()}
