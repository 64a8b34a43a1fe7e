"""One method against others, prompt by prompt: ratios of tokens/s, with intervals. Pure functions."""

from collections.abc import Iterable

import numpy as np

from evaluation.benchmark import Record
from evaluation.bootstrap import draws, interval
from evaluation.methods import TITLES, selector_title

MEAN = "mean over settings"


def selectors_versus(records: list[Record], selectors: dict[str, Iterable[str]]) -> dict[str, dict]:
    """Every selector (by its name; values: the verifiers it chooses among) against the best static trees of all of them, of
    Traversal's, and the cheap rules, as far as there are records."""
    names = {record.method for record in records}
    others = {}
    for rule in dict.fromkeys((*(rule for own in selectors.values() for rule in own), "traversal")):
        title = TITLES[rule]
        trees = {name for name in names if name.startswith(f"{title} (")}
        others |= {
            f"{title}, best static": {name for name in trees if "τ" not in name},
            f"{title}, L1 = previous τ − 1": {name for name in trees if "τ" in name},
            f"{title}, by entropy": {f"{title}, by entropy"} & names,
            f"{title}, by domain": {f"{title}, by domain"} & names,
        }
    others = {label: own for label, own in others.items() if own}
    return {title: versus(records, title, others) for title in map(selector_title, selectors) if title in names}


def versus(records: list[Record], method: str, others: dict[str, set[str]]) -> dict[str, dict[str, list[float]]]:
    """For each of `others`, by sampling setting: [ratio, low, high] of the total tokens/s of `method` to that of the other,
    which may have another name under every setting (a static method's name holds its tree). 95 % bootstrap over prompts,
    both sides resampled together. MEAN is the geometric mean over the settings."""
    found: dict[str, dict[str, list[float]]] = {}
    settings = list(dict.fromkeys(record.setting for record in records))
    for other, names in others.items():
        logs = []
        for setting in settings:
            here = [record for record in records if record.setting == setting]
            ours, theirs = (_by_prompt(here, own) for own in ({method}, names))
            prompts = sorted(ours.keys() & theirs.keys())
            if not prompts:
                continue
            values = np.array([[*ours[p], *theirs[p]] for p in prompts])
            resampled = values[draws(len(prompts), len(logs))]  # anew for every setting, for their mean
            logs.append((_log_ratio(values.sum(0)), _log_ratio(resampled.sum(1))))
            found.setdefault(other, {})[setting] = _ratio(*logs[-1])
        if len(logs) > 1:
            found[other][MEAN] = _ratio(*(np.mean([log[i] for log in logs], axis=0) for i in (0, 1)))
    return found


def _by_prompt(records: list[Record], names: set[str]) -> dict[str, tuple[float, float]]:
    """Tokens and seconds by prompt of the method with one of `names`."""
    return {r.prompt: (r.tokens, r.seconds) for r in records if r.method in names and r.seconds > 0}


def _log_ratio(sums: np.ndarray) -> np.ndarray:
    ours, theirs = sums[..., 0] / sums[..., 1], sums[..., 2] / sums[..., 3]
    return np.log(ours / theirs)


def _ratio(log: np.ndarray, resampled: np.ndarray) -> list[float]:
    return np.exp(interval(log, resampled)).tolist()
