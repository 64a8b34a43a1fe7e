"""What a selector wins on prompts that it was not trained on, asked of the training prompts alone: how long to train, and for
which sampling settings choosing beats the static tree at all. The prompts it is judged on take no part."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low

import torch
from pytorch_lightning.loggers import Logger
from torch import Tensor

from decoding.common.errors import UserError
from decoding.common.files import read_sealed, write_sealed
from decoding.common.progress import console, track
from selector.choices import Choices
from selector.resampling import resampling
from selector.selector import Selector
from selector.settings import SelectorConfig
from selector.training import fit_selector


@dataclass(frozen=True)
class CrossFit:
    """epochs: until held-out throughput was best, the median over the folds. gains: by sampling setting, tokens/s of selectors
    on the fold they were not trained on over the best static option's, [ratio, low, high] with a 95 % bootstrap interval over
    prompts."""

    epochs: int
    gains: list[list[float]]

    def learned(self, least_gain: float) -> tuple[bool, ...]:
        """Settings for which choosing wins: the whole interval is above 1 + `least_gain`, what choosing itself may cost."""
        return tuple(low > 1 + least_gain for _, low, _ in self.gains)


def train_selector(
    training: Choices,
    validation: Choices,
    config: SelectorConfig,
    folder: Path,
    logger: Logger | list[Logger] | None = None,
    title: str = "selector",
) -> tuple[Selector, CrossFit]:
    """Cross-fit, then train on all `training` roots for as many epochs as the folds asked for. Settings without a gain get
    their best static option. `validation` is watched only."""
    crossed = cross_fit(training, config, folder, title)
    selector, _ = fit_selector(training, validation, replace(config, epochs=crossed.epochs), folder, logger, stop_early=False)
    selector.schema = replace(selector.schema, learned=crossed.learned(config.least_gain))
    return selector, crossed


def cross_fit(training: Choices, config: SelectorConfig, folder: Path, title: str) -> CrossFit:
    """Train on all folds of the prompts but one, and judge on that one, in turn. Finished folds are read from `folder`."""
    fold_of = prompt_folds(training.roots.prompt, config.folds)
    results = []
    for fold in track(range(config.folds), f"{title}, cross-fit", config.folds, "fold"):
        own = folder / f"fold-{fold}"
        if (result := _finished(own / "result.json")) is None:
            result = _fold(training, fold_of == fold, config, own)
            write_sealed(own / "result.json", result)
        results.append(result)
    steps = torch.cat([torch.tensor(result["steps"], dtype=torch.float64) for result in results], -1)
    order = torch.cat([(fold_of == fold).nonzero()[:, 0] for fold in range(config.folds)])
    gains = gains_by_setting(steps, training.roots.prompt[order], training.roots.setting[order])
    return CrossFit(median_low([result["epochs"] for result in results]), gains)


def _finished(path: Path) -> dict | None:
    """The result of a finished fold; None, and a notice, for one that is not as it was written."""
    if not path.exists():
        return None
    try:
        return read_sealed(path, "make it again")
    except UserError:
        console.print(f"[yellow]![/] {path} is damaged or from before checksums; this fold is made again")
        return None


def gains_by_setting(steps: Tensor, prompt: Tensor, setting: Tensor) -> list[list[float]]:
    """`CrossFit.gains` of `steps` [tables, 4, R] (see `_fold`) at roots of `prompt` [R] and `setting` [R]; all tables
    together."""
    gains = []
    for index in range(int(setting.max()) + 1):
        here = setting == index
        columns = steps[:, :, here].transpose(0, 1).flatten(1)  # [4, tables x roots]
        gains.append(resampling(prompt[here].repeat(len(steps)))(*columns))
    return gains


def _fold(training: Choices, held_out: Tensor, config: SelectorConfig, folder: Path) -> dict:
    """epochs, and for every table [tokens, seconds, static tokens, static seconds] [R] of the held-out roots; seconds in units
    of the static option's mean, so that tables can be added up."""
    own, other = training.where(~held_out), training.where(held_out)
    selector, epochs = fit_selector(own, other, config, folder, progress=False)
    static, steps = own.static(), []
    for table in range(len(training.costs)):
        scalars, seconds = other.priced(table)
        with torch.inference_mode():
            chosen = selector(*other.roots.states, scalars, seconds).argmax(-1)
        base = static[table, other.roots.setting]
        seconds = seconds / seconds.gather(-1, base[:, None]).mean()
        steps.append([x.gather(-1, at[:, None])[:, 0].tolist() for at in (chosen, base) for x in (other.efficiency, seconds)])
    return {"epochs": epochs, "steps": steps}


def prompt_folds(prompt: Tensor, folds: int) -> Tensor:
    """A fold in 0 .. folds - 1 for every root, all roots of a prompt [R] together. Raises UserError for fewer prompts than
    folds."""
    ids, group = prompt.unique(return_inverse=True)
    if len(ids) < folds:
        raise UserError(
            f"selector.folds={folds}: the traces hold {len(ids)} training prompts; raise traces.train_prompts or lower "
            "selector.folds (2 at least)."
        )
    shuffled = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    return (shuffled % folds)[group]
