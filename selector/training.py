"""Training of a selector: Eq. 12 on labelled roots, cross-validated on the prompts.

The prompts that the selector is evaluated on take no part: how long to train, and under which
sampling settings choosing beats the static tree, comes from folds of the training prompts.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

import torch
from pytorch_lightning.loggers import Logger
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_sealed, write_sealed
from nde_talf.decoding.common.progress import track
from nde_talf.selector.network import Selector
from nde_talf.selector.objective import deviance, selector_loss, taken, visits
from nde_talf.selector.roots import PricedRoots, throughput_gain
from nde_talf.selector.schema import SelectorSchema
from nde_talf.selector.selector_settings import SelectorConfig
from nde_talf.selector.step_costs import context_counts

PATIENCE, WEIGHT_DECAY = 5, 0.1
"""Epochs without better held-out throughput until a fold stops; weight decay of AdamW."""
UNPRICED_SHARPNESS = 20.0
"""Initial preference of a network that has to learn prices for the tree that is best throughout."""
GAIN = "held_out_log_tps_argmax"
"""Held-out log throughput of the most probable trees, over the static trees'."""


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
    loggers: Sequence[Logger] = (),
    title: str = "selector",
) -> tuple[Selector, CrossFit]:
    """Cross-fit, then train on all `training` roots for as many epochs as the folds needed.

    With `config.fallback`, a setting whose interval is not all above 1 + `config.min_gain` gets its
    best static action. The gain on `validation` is only logged.
    """
    crossed = cross_fit(training, config, folder, title)
    selector, _ = fit_selector(training, validation, config, crossed.epochs, loggers)
    learned = tuple(not config.fallback or low > 1 + config.min_gain for _, low, _ in crossed.gains)
    selector.schema = replace(selector.schema, learned=learned)
    return selector, crossed


def cross_fit(training: PricedRoots, config: SelectorConfig, folder: Path, title: str) -> CrossFit:
    """Train on all folds of the prompts but one and evaluate on that one, in turn.

    Finished folds are read from `folder`.
    """
    fold_of = prompt_folds(training.roots.prompt, config.folds)
    folds, parts = fold_of.unique().tolist(), []
    for fold in track(folds, f"{title}, cross-fit", len(folds), "fit"):
        path = folder / f"fold-{fold}.json"
        if not path.exists():
            write_sealed(path, _fold(training, fold_of == fold, config))
        parts.append(read_sealed(path, "delete it, and this fold is trained again"))
    order = fold_of.argsort(stable=True)  # the roots in the order of the folds
    paces = torch.cat([torch.tensor(part["paces"]).double() for part in parts], -1)  # [2, R]
    setting, prompt = training.roots.setting[order], training.roots.prompt[order]
    gains = []
    for index in range(len(training.roots.settings)):
        chosen, static = paces[:, setting == index]
        gains.append(throughput_gain(chosen, static, prompt[setting == index]))
    return CrossFit(median_low([part["epochs"] for part in parts]), gains)


def _fold(training: PricedRoots, held_out: Tensor, config: SelectorConfig) -> dict:
    """Train without the held-out roots, and choose at them.

    Returns the epochs, and the held-out roots' seconds per token [chosen, static] [R].
    """
    seen, unseen = training.where(~held_out), training.where(held_out)
    selector, epochs = fit_selector(seen, unseen, config)
    with torch.inference_mode():
        paces = pace_beside_static(selector, unseen, seen.static())
    return {"epochs": epochs, "paces": paces.tolist()}


def pace_beside_static(selector: Selector, roots: PricedRoots, static: Tensor) -> Tensor:
    """Return seconds per token [2, R] of the most probable actions, and of the static ones.

    static: [settings], as `PricedRoots.static` gives it.
    """
    actions = roots.logits(selector).argmax(-1), static[roots.roots.setting]
    return torch.stack([roots.pace(action) for action in actions])


def prompt_folds(prompt: Tensor, folds: int) -> Tensor:
    """Return a fold in 0 .. folds - 1 for every root [R], the same for all roots of a prompt [R].

    With fewer prompts than folds, each prompt is a fold. Raises UserError for one prompt.
    """
    ids, group = prompt.unique(return_inverse=True)
    if len(ids) == 1:
        raise UserError(
            "selector: all roots of the traces are of one training prompt; raise"
            " traces.train_prompts."
        )
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    return order[group] % folds


def new_selector(training: PricedRoots, config: SelectorConfig) -> Selector:
    """Make an untrained selector with its inputs' scales and the static actions.

    With initialisation="static" it prefers the actions that are best over all training roots: the
    network predicts every action's tokens per step over their texts, or with sharpness 0 its
    throughput. Training then learns deviations. "random": torch's own initial weights.
    """
    roots = training.roots
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
        pricing=training.costs.rule,
    )
    selector = Selector(schema)
    selector.standardise(training.inputs())
    if config.initialisation == "static":
        start = training.mean_tokens(torch.arange(len(training))).log()
        if not config.sharpness:
            start = UNPRICED_SHARPNESS * (start - training.seconds().mean(0).log())
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
    selector.table = training.costs.table
    return selector


def fit_selector(
    training: PricedRoots,
    validation: PricedRoots,
    config: SelectorConfig,
    epochs: int | None = None,
    loggers: Sequence[Logger] = (),
) -> tuple[Selector, int]:
    """Train on `training`; return the selector in evaluation mode and its epochs.

    It stops early, at the epoch with the best throughput on `validation`, or else after `epochs` of
    `config.epochs`, and then shows its progress. Equal arguments give equal weights.
    """
    torch.manual_seed(config.seed)
    run = _Training(new_selector(training, config), training, validation, config)
    if epochs is not None:
        for epoch in track(range(epochs), "training the selector", epochs, "epoch"):
            figures = run.epoch(epoch)
            for logger in loggers:
                logger.log_metrics(figures | {"epoch": epoch}, run.step)
        for logger in loggers:
            logger.save()
        return run.selector.eval(), epochs
    best, best_epoch, weights = -math.inf, 0, dict[str, Tensor]()
    for epoch in range(config.epochs):
        gain = run.epoch(epoch)[GAIN]
        if gain > best and math.isfinite(gain):
            best, best_epoch = gain, epoch
            weights = {name: x.clone() for name, x in run.selector.state_dict().items()}
        elif epoch - best_epoch >= PATIENCE or not math.isfinite(gain):
            break
    if not weights:
        raise UserError("selector: no epoch had a finite gain; lower selector.lr.")
    run.selector.load_state_dict(weights)
    return run.selector.eval(), best_epoch + 1


class _Training:
    """AdamW on Eq. 12 and the deviance. `step` counts the steps so far."""

    def __init__(
        self,
        selector: Selector,
        training: PricedRoots,
        validation: PricedRoots,
        config: SelectorConfig,
    ):
        self.selector, self.config, self.step = selector, config, 0
        self.training, self.validation = training, validation
        self.static = training.static()  # [settings]
        self.weights = torch.ones(len(training))
        if config.weighting == "visits":
            actions = self.static[training.roots.setting]
            self.weights = visits(taken(training.efficiency, actions))
        self.optimizer = torch.optim.AdamW(
            selector.parameters(), lr=config.lr, weight_decay=WEIGHT_DECAY
        )
        # To zero at the last step of all `config.epochs`: the epoch that did best in the folds did
        # so at its rates.
        steps = -(-len(training) // config.batch) * config.epochs
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2
        )

    def epoch(self, number: int) -> dict[str, float]:
        """Train on every root once, in an order drawn by seed and epoch; return loss and gain."""
        self.selector.train()
        generator, total = torch.Generator().manual_seed(self.config.seed + number), 0.0
        order = torch.randperm(len(self.training), generator=generator)
        for index in order.split(self.config.batch):
            torch.manual_seed(self.config.seed * 1_000_003 + self.step)  # of dropout
            loss = self._loss(index)
            if not torch.isfinite(loss):
                raise UserError(
                    f"selector: the loss became {float(loss)} at step {self.step}; lower"
                    " selector.lr."
                )
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            total += loss.item() * len(index)
        self.selector.eval()
        return {"loss": total / len(order), GAIN: self._gain()}

    def _loss(self, index: Tensor) -> Tensor:
        """Eq. 12 and the deviance on the roots `index`."""
        config, roots = self.config, self.training
        logits, efficiency = roots.logits(self.selector, index), roots.efficiency[index]
        seconds, weights = roots.seconds(index), self.weights[index]
        loss = selector_loss(
            logits,
            efficiency,
            seconds,
            self.static[roots.roots.setting[index]],
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

    @torch.inference_mode()
    def _gain(self) -> float:
        """Mean over settings of the log throughput over the static actions'."""
        setting, gains = self.validation.roots.setting, []
        paces = pace_beside_static(self.selector, self.validation, self.static)
        for index in setting.unique():
            chosen, static = paces[:, setting == index].mean(-1)  # they add up over the texts
            gains.append((static / chosen).log())
        return float(torch.stack(gains).mean())
