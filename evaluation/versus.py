"""One method against others, prompt by prompt: ratios of tokens/s, with intervals. Pure functions."""

from collections.abc import Iterable

from evaluation.benchmark import Record
from evaluation.identity import TITLES
from evaluation.methods import selector_title
from evaluation.speed import WALL, speed_ratios

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


def versus(
    records: list[Record], method: str, others: dict[str, set[str]], clock: str = WALL
) -> dict[str, dict[str, list[float]]]:
    """For each of `others`, by sampling setting: [ratio, low, high] of the total tokens/s of `method` to that of the other,
    which may have another name under every setting (a static method's name holds its tree). MEAN is the geometric mean over
    the settings. clock: see `evaluation.speed`."""
    found: dict[str, dict[str, list[float]]] = {}
    settings = list(dict.fromkeys(record.setting for record in records))
    for other, names in others.items():
        pairs = [
            tuple([r for r in records if r.setting == setting and r.method in own] for own in ({method}, names))
            for setting in settings
        ]
        ratios, mean = speed_ratios(pairs, clock)
        if own := {setting: ratio for setting, ratio in zip(settings, ratios, strict=True) if ratio}:
            found[other] = own | ({MEAN: mean} if mean else {})
    return found
