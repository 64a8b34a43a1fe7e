"""What selectors win over everything that could be run in their place, from files of finished runs.

`python -m benchmarks.selector [--run checkpoints/paper] [--online RUN ...] [--out FOLDER]`.
--online: runs with `evaluation=campaign`, of other settings or seeds, that are reported together;
without it all evaluations beside --run whose names begin with its name. Unfinished ones count as
far as they have come. Writes results/selector.md, or selector.md into --out.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.timing import RESULTS, doubts
from nde_talf.decoding.common.bootstrap import interval, samples, shown
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json
from nde_talf.evaluation.benchmark import Record, read_records
from nde_talf.evaluation.methods import BEST_STATIC, NGRAM, TITLES, selector_title
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.speed import CPU, WALL, sums_by_prompt
from nde_talf.evaluation.table import markdown, row
from nde_talf.pipelines.stage import BEGUN

MEAN = "mean over settings"
INTRODUCTION = """# Selector: against everything that could be run in its place

Batch size 1, {machine}. All figures are tokens/s of one method over those of another, both as
totals on the same prompts, with one and the same forward pass; brackets are 95 % bootstrap
intervals, prompts resampled. The A/A control is plain decoding under a second name.

## Online

Decoded: {decoded}. All methods of a setting are decoded prompt by prompt in one process, in an
order drawn anew for every prompt. Everything with a parameter was tuned by the clock on prompts
that are neither decoded here nor traced for training. "By domain" is told the domain of every
prompt. "Best rival" is what was fastest on these very prompts of all that is not learned, so its
interval does not account for having chosen it, in its favour. At temperature 0 one selector stands
for all rules, since a draft that is warped as the target is draws one token."""
LEARNED = "selector (NDE)"
MAIN = selector_title("traversal")
MIXED = f"{NGRAM} + {MAIN}"
TRAVERSAL, BY_DOMAIN = f"{TITLES['traversal']}, {BEST_STATIC}", f"{TITLES['traversal']}, by domain"
GREEDY = "T=0"
IN_CPU_TIME = "the mean in CPU time"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/paper"))
    parser.add_argument("--online", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the page")
    options = parser.parse_args()
    beside = sorted(
        path.parent.parent
        for path in options.run.parent.glob(f"{options.run.name}*/report/{BEGUN}")
    )
    online = [Decoded(run) for run in options.online or beside]
    if not online:
        raise UserError(
            f"{options.run}: no evaluation beside it; run stage=evaluate evaluation=campaign."
        )
    text = "\n\n".join([*_online(online)]) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "selector.md").write_text(text)
    print(text)


class Decoded:
    """The evaluation of a run, finished or as far as it has come.

    Attributes:
        roles: by setting, the decoded method of every role (see `evaluation.methods.Plan.roles`).
    """

    def __init__(self, run: Path):
        self.report = run / "report"
        made = read_json(self.report / BEGUN)["settings"]
        self.seed, self.settings = (
            made["seed"] + made["evaluation"].get("seed", 0),
            made["evaluation"],
        )
        self.records = list(read_records(self.report / "records.jsonl"))
        plans = [read_json(path) for path in sorted(self.report.glob("roles-*.json"))]
        self.roles = {
            plan["setting"]: {
                role: plan["same"].get(name, name) for role, name in plan["roles"].items()
            }
            for plan in plans
        }


class Campaign(NamedTuple):
    """Decoded records by setting and role, and the method of each role under each setting."""

    records: dict[str, dict[str, list[Record]]]
    titles: dict[str, dict[str, str]]

    @classmethod
    def of(cls, runs: Sequence[Decoded]) -> "Campaign":
        records: dict[str, dict[str, list[Record]]] = {}
        titles: dict[str, dict[str, str]] = {}
        for run in runs:
            for setting, roles in run.roles.items():
                own = [record for record in run.records if record.setting == setting]
                for role, name in roles.items():
                    found = [record for record in own if record.method == name]
                    if found:
                        records.setdefault(setting, {}).setdefault(role, []).extend(found)
                        titles.setdefault(setting, {})[role] = name
        merged = {
            setting: {role: together(own) for role, own in roles.items()}
            for setting, roles in records.items()
        }
        return cls({s: merged[s] for s in sorted(merged, key=lambda s: (s == GREEDY, s))}, titles)

    @property
    def sampled(self) -> list[str]:
        return [setting for setting in self.records if setting != GREEDY]

    def roles(self, learned: bool) -> list[str]:
        """Those of selectors, or all others but the control."""
        found = dict.fromkeys(
            role for roles in self.records.values() for role in roles if role != CONTROL
        )
        return [role for role in found if (LEARNED in role) == learned]

    def speed(self, setting: str, role: str) -> float:
        own = self.records[setting].get(role, [])
        return sum(r.tokens for r in own) / sum(r.seconds for r in own) if own else 0.0

    def best_rival(self, setting: str) -> str:
        """What was fastest under a setting of all that is not learned."""
        return max(self.roles(learned=False), key=lambda role: self.speed(setting, role))

    def one_rival(self) -> str:
        """What was fastest over the sampled settings, by the geometric mean."""
        return max(
            self.roles(learned=False),
            key=lambda role: prod(self.speed(s, role) for s in self.sampled),
        )

    def over(self, ours: str, theirs: dict[str, str]) -> dict[str, list[float] | None]:
        """Compare a role with others, one a setting: [ratio, low, high].

        MEAN is over the sampled settings, IN_CPU_TIME that mean in CPU time.
        """
        pairs = {
            s: (roles.get(ours, []), roles.get(theirs[s], [])) for s, roles in self.records.items()
        }
        sampled = [pairs[s] for s in self.sampled]
        (found, mean), (in_cpu, mean_in_cpu) = speed_ratios(sampled), speed_ratios(sampled, CPU)
        return {
            **dict(zip(self.sampled, found, strict=True)),
            MEAN: found[0] if len(found) == 1 else mean,
            IN_CPU_TIME: in_cpu[0] if len(in_cpu) == 1 else mean_in_cpu,
            **({GREEDY: speed_ratios([pairs[GREEDY]])[0][0]} if GREEDY in pairs else {}),
        }

    def over_role(self, ours: str, theirs: str) -> dict[str, list[float] | None]:
        """The same of one role under all settings."""
        return self.over(ours, dict.fromkeys(self.records, theirs))


def together(records: Iterable[Record]) -> list[Record]:
    """Sum the generations of a method after a prompt under a setting into one record."""
    merged: dict[tuple[str, str, str], Record] = {}
    names = {field.name for field in fields(Record)}
    counted = names - {"setting", "method", "prompt", "kind", "pass_"}
    for record in records:
        key = record.setting, record.method, record.prompt
        if key in merged:
            sums = {
                name: _sum(getattr(merged[key], name), getattr(record, name)) for name in counted
            }
            record = replace(record, pass_=0, **sums)
        merged[key] = record
    return list(merged.values())


def _sum(a, b):
    if isinstance(a, dict):
        return {name: a.get(name, 0) + b.get(name, 0) for name in a | b}
    return a + b


def speed_ratios(
    pairs: Sequence[tuple[list[Record], list[Record]]], clock: str = WALL
) -> tuple[list[list[float] | None], list[float] | None]:
    """Ratios of every pair (one a setting), and the geometric mean of at least two.

    The same resampled prompts count in all settings.
    """
    sums = [sums_by_prompt(*pair, clock) for pair in pairs]
    prompts = sorted(set().union(*sums))
    indices = samples(len(prompts)) if prompts else None
    logs = []  # of the ratio itself, and resampled
    for totals in filter(None, sums):
        values = np.array([totals.get(prompt, np.zeros(4)) for prompt in prompts])
        logs.append((_log_ratio(values.sum(0)), _log_ratio(values[indices].sum(1))))
    ratios = iter([_interval(*log) for log in logs])
    mean = (np.mean(part, axis=0) for part in zip(*logs, strict=True))
    return [next(ratios) if totals else None for totals in sums], (
        _interval(*mean) if len(logs) > 1 else None
    )


def _log_ratio(sums: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may miss a setting's prompts
        return np.log(sums[..., 0] / sums[..., 1] / (sums[..., 2] / sums[..., 3]))


def _interval(log: np.ndarray, resampled: np.ndarray) -> list[float]:
    return np.exp(interval(log, resampled)).tolist()


def _machine(runs: list[Decoded]) -> str:
    for run in runs:
        if (run.report / "results.json").exists():
            made = read_json(run.report / "results.json")["environment"]
            known = [str(made[key]) for key in ("device", "CPU", "dtype") if key in made]
            return ", ".join([*known, f"torch {made['torch']}"])
    return "an unfinished run"


def _online(runs: list[Decoded]) -> Iterator[str]:
    found, records = Campaign.of(runs), together(record for run in runs for record in run.records)
    yield INTRODUCTION.format(machine=_machine(runs), decoded="; ".join(_decoded(runs)))
    yield from doubts(records)
    learned, best = (
        found.roles(learned=True),
        {setting: found.best_rival(setting) for setting in found.records},
    )
    named = "; ".join(
        f"{s}: {_called(found, s, role)}, {found.speed(s, role):.0f} tokens/s"
        for s, role in best.items()
    )
    yield f"Best rival of each setting: {named}."
    one = found.one_rival() if found.sampled else best[GREEDY]
    yield f"The one that is best over the sampled settings: {one}."

    yield "### What the selectors win, mean over the sampled settings"
    against = [
        "own best static tree",
        "Traversal's best static",
        "best static told the domain",
        "best one rival",
    ]
    header = ["", *against, "best rival of each setting"]
    ratios = {role: list(_columns(found, role, one, best)) for role in learned}
    for key, clock in (
        (MEAN, "By the wall clock"),
        (IN_CPU_TIME, "In CPU time, which other work on the machine disturbs less"),
    ):
        rows = (
            [role, *(shown(ratio.get(key), 3) for ratio in own)] for role, own in ratios.items()
        )
        yield f"{clock}:\n\n" + markdown(header, rows)
    for title, against in (
        ("Traversal's best static tree", None),
        ("the best rival of the setting", best),
    ):
        yield f"### Over {title}, setting by setting"
        columns = [
            *found.sampled,
            MEAN,
            IN_CPU_TIME,
            *([GREEDY] if GREEDY in found.records else []),
        ]
        ratios = {
            role: found.over(role, against) if against else found.over_role(role, TRAVERSAL)
            for role in learned
        }
        yield markdown(
            ["", *columns],
            ([role, *(shown(own.get(s), 3) for s in columns)] for role, own in ratios.items()),
        )
    for ours in (MAIN, MIXED):
        if ours in learned:
            yield f"### {ours} over every rival"
            rivals = {role: found.over_role(ours, role) for role in found.roles(learned=False)}
            yield markdown(
                ["", *columns],
                ([role, *(shown(own.get(s), 3) for s in columns)] for role, own in rivals.items()),
            )
    yield "### The methods"
    for setting, roles in found.records.items():
        yield f"{setting}\n\n" + markdown(
            [
                "role",
                "tuned",
                "block efficiency",
                "tokens/s",
                "over plain decoding",
                "overhead in a step",
            ],
            (_method(found, setting, role) for role in roles),
        )


def _columns(found: Campaign, role: str, one: str, best: dict[str, str]) -> Iterable[dict]:
    own = next(
        (
            f"{title}, {BEST_STATIC}"
            for name, title in TITLES.items()
            if role == selector_title(name)
        ),
        TRAVERSAL,
    )
    static = [
        r for r in found.roles(learned=False) if r.endswith(BEST_STATIC) and not r.startswith(NGRAM)
    ]
    if role == selector_title("across"):
        yield found.over(
            role, {s: max(static, key=lambda r: found.speed(s, r)) for s in found.records}
        )
    else:
        yield found.over_role(role, f"{NGRAM} + {TRAVERSAL}" if role == MIXED else own)
    for other in (TRAVERSAL, BY_DOMAIN, one):
        yield found.over_role(role, other)
    yield found.over(role, best)


def _called(found: Campaign, setting: str, role: str) -> str:
    name = found.titles[setting][role]
    return role if name == role else f"{role}, {name}" if not name.startswith(role) else name


def _method(found: Campaign, setting: str, role: str) -> list[str]:
    own = row(role, found.records[setting][role], found.records[setting].get(BASELINE, []))
    overhead = f"{100 * own.shares['policy']:.1f} %" if own.shares else "–"
    name = found.titles[setting][role]
    return [
        role,
        "" if name == role else name,
        shown(own.block_efficiency),
        f"{own.tokens_per_second:.0f}",
        shown(own.speedup),
        overhead,
    ]


def _decoded(runs: list[Decoded]) -> Iterable[str]:
    counts: dict[str, Counter] = {}
    for run in runs:
        own = Counter(record.setting for record in run.records if record.method == BASELINE)
        counts.setdefault(
            f"{run.settings['new_tokens']} tokens each with seed {run.seed}", Counter()
        ).update(own)
    for what, own in counts.items():
        yield f"{what}, " + ", ".join(
            f"{count} prompts at {setting}" for setting, count in own.items()
        )


if __name__ == "__main__":
    main()
