"""Cross-validation on the training prompts: how long to train, and for which sampling settings
choosing beats the static tree.

The prompts that the selector is evaluated on take no part.
"""

from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

import torch
from pytorch_lightning.loggers import Logger
from torch import Tensor

from nde_talf.decoding.common.bootstrap import ratio_of_totals, sums_by_prompt
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_sealed, write_sealed
from nde_talf.decoding.common.progress import console, track
from nde_talf.selector.roots import PricedRoots
from nde_talf.selector.selector import Selector
from nde_talf.selector.settings import SelectorConfig
from nde_talf.selector.training import fit_selector


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
