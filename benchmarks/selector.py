"""Gain of selectors over everything that could be run in their place, from finished runs.

`python -m benchmarks.selector [--run checkpoints/paper] [--online RUN ...] [--out FOLDER]`.
--online: runs with `evaluation=campaign`, of other settings or seeds, that are reported together;
without it all evaluations beside --run whose names begin with its name. Unfinished ones count as
far as they have come. Writes results/selector.md (--name, --out).
"""

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from benchmarks.ratios import speed_ratios
from benchmarks.timing import RESULTS, doubts
from nde_talf.decoding.common.bootstrap import shown
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json
from nde_talf.evaluation.benchmark import Record, read_records
from nde_talf.evaluation.loops import TITLES
from nde_talf.evaluation.protocol import (
    BASELINE,
    BY_DOMAIN,
    CONTROL,
    GREEDY_TREE,
    HEAD_TREE,
    SELECTOR,
    STATIC_TREE,
)
from nde_talf.evaluation.speed import CPU
from nde_talf.evaluation.table import by_setting, markdown, row
from nde_talf.pipelines.runs.manifest import BEGUN

MEAN = "mean over settings"
INTRODUCTION = """# Selector: against everything that could be run in its place

`{command}`: {machine}.

All figures are tokens/s of one method over another's, both as totals on the same prompts,
with one and the same forward pass; brackets are 95 % bootstrap intervals, prompts resampled. The
A/A control is plain decoding under a second name.

## Online

Decoded: {decoded}. All methods of a setting are decoded prompt by prompt in one process, in an
order drawn anew for every prompt. Everything with a parameter was tuned by the clock on prompts
that are neither decoded here nor traced for training. "By domain" gets the domain of every
prompt. "Best rival" is what was fastest on these very prompts of all that is not learned, so its
interval does not account for having chosen it, in its favour. At temperature 0 one selector stands
for all rules, since a draft that is warped as the target is draws one token."""
MAIN, TRAVERSAL = SELECTOR.format("traversal"), STATIC_TREE.format("traversal")
OWN_STATIC = {SELECTOR.format(rule): STATIC_TREE.format(rule) for rule in TITLES}
LEARNED = {*OWN_STATIC, HEAD_TREE}
"""Keys of what is learned: selectors, and heads."""
GREEDY = "T=0"
IN_CPU_TIME = "the mean in CPU time"
PASSES = 10_000  # more than a run has


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/paper"))
    parser.add_argument("--online", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the page")
    parser.add_argument("--name", default="selector", help="of the page")
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
    (options.out / f"{options.name}.md").write_text(text)
    print(text)


class Decoded:
    """The evaluation of a run, finished or as far as it has come.

    Attributes:
        methods: by setting and key of a method, its title under every setting, and the title of
            the method that was decoded for it (`evaluation.plan.Titles.roles`). At temperature 0
            Traversal's static tree is the one of all rules.
    """

    def __init__(self, run: Path):
        self.report = run / "report"
        made = read_json(self.report / BEGUN)["settings"]
        self.settings = made["evaluation"]
        self.seed = made["seed"] + self.settings.get("seed", 0)
        self.records = list(read_records(self.report / "records.jsonl"))
        self.methods: dict[str, dict[str, tuple[str, str]]] = {}
        for path in sorted(self.report.glob("roles-*.json")):
            plan = read_json(path)
            self.methods[plan["setting"]] = {
                TRAVERSAL if key == GREEDY_TREE else key: (title, plan["same"].get(name, name))
                for key, (title, name, _) in plan["roles"].items()
            }


class Campaign(NamedTuple):
    """Decoded records by setting and key of the method.

    Passes are numbered through all runs, so that a block is one of one run.

    Attributes:
        decoded: titles of the decoded methods, by setting and key.
        titles: by key, the same under all settings.
    """

    records: dict[str, dict[str, list[Record]]]
    decoded: dict[str, dict[str, str]]
    titles: dict[str, str]

    @classmethod
    def of(cls, runs: Sequence[Decoded]) -> "Campaign":
        records: dict[str, dict[str, list[Record]]] = {}
        decoded: dict[str, dict[str, str]] = {}
        titles: dict[str, str] = {}
        for number, run in enumerate(runs):
            methods = by_setting(
                replace(record, pass_=record.pass_ + number * PASSES) for record in run.records
            )
            for setting, roles in run.methods.items():
                for key, (title, name) in roles.items():
                    if own := methods.get(setting, {}).get(name):
                        records.setdefault(setting, {}).setdefault(key, []).extend(own)
                        decoded.setdefault(setting, {})[key] = name
                        titles.setdefault(key, title)
        order = sorted(records, key=lambda setting: (setting == GREEDY, setting))
        return cls({setting: records[setting] for setting in order}, decoded, titles)

    @property
    def sampled(self) -> list[str]:
        return [setting for setting in self.records if setting != GREEDY]

    def keys(self, learned: bool) -> list[str]:
        """Keys of selectors and heads, or of all others but the control."""
        every = (key for key in self.titles if key != CONTROL)
        return [key for key in every if (key in LEARNED) == learned]

    def speed(self, setting: str, role: str) -> float:
        own = self.records[setting].get(role, [])
        return sum(r.tokens for r in own) / sum(r.seconds for r in own) if own else 0.0

    def fastest(self, setting: str, roles: Iterable[str]) -> str:
        return max(roles, key=lambda role: self.speed(setting, role))

    def best_rivals(self) -> dict[str, str]:
        """By setting, what was fastest of all that is not learned."""
        return {s: self.fastest(s, self.keys(learned=False)) for s in self.records}

    def one_rival(self) -> str:
        """Fastest method over the sampled settings, by the geometric mean."""
        return max(
            self.keys(learned=False),
            key=lambda role: prod(self.speed(s, role) for s in self.sampled),
        )

    def over(self, ours: str, theirs: str | dict[str, str]) -> dict[str, list[float] | None]:
        """Compare a role with another, or with one a setting: [ratio, low, high].

        MEAN is over the sampled settings, IN_CPU_TIME that mean in CPU time.
        """
        others = dict.fromkeys(self.records, theirs) if isinstance(theirs, str) else theirs
        pairs = {
            s: (roles.get(ours, []), roles.get(others[s], [])) for s, roles in self.records.items()
        }
        sampled = [pairs[s] for s in self.sampled]
        ratios, mean = speed_ratios(sampled)
        return {
            **dict(zip(self.sampled, ratios, strict=True)),
            MEAN: mean,
            IN_CPU_TIME: speed_ratios(sampled, CPU)[1],
            **({GREEDY: speed_ratios([pairs[GREEDY]])[1]} if GREEDY in pairs else {}),
        }


def _machine(runs: list[Decoded]) -> str:
    for run in runs:
        if (run.report / "results.json").exists():
            made = read_json(run.report / "results.json")["environment"]
            return f"{made['conditions']}, torch {made['torch']}"
    return "an unfinished run"


def _online(runs: list[Decoded]) -> Iterator[str]:
    campaign = Campaign.of(runs)
    roles = [own for roles in campaign.records.values() for own in roles.values()]
    command = shlex.join(["python", "-m", "benchmarks.selector", *sys.argv[1:]])
    yield INTRODUCTION.format(
        command=command, machine=_machine(runs), decoded="; ".join(_decoded(runs))
    )
    yield from doubts([record for own in roles for record in own])
    learned, best = campaign.keys(learned=True), campaign.best_rivals()
    named = "; ".join(
        f"{s}: {campaign.titles[key]} ({campaign.decoded[s][key]}),"
        f" {campaign.speed(s, key):.0f} tokens/s"
        for s, key in best.items()
    )
    yield f"Best rival of each setting: {named}."
    one = campaign.one_rival() if campaign.sampled else best[GREEDY]
    yield f"The one that is best over the sampled settings: {campaign.titles[one]}."

    yield "### What the selectors win, mean over the sampled settings"
    columns = ["own best static tree", "Traversal's best static", "best static told the domain"]
    columns += ["best one rival", "best rival of each setting"]
    ratios = {
        role: [
            campaign.over(role, other)
            for other in (OWN_STATIC.get(role, role), TRAVERSAL, BY_DOMAIN, one, best)
        ]
        for role in learned
    }
    yield markdown(
        ["", *columns],
        (
            [campaign.titles[key], *(shown(ratio[MEAN], 3) for ratio in own)]
            for key, own in ratios.items()
        ),
    )
    if len(runs) > 1:
        yield "### Over its own best static tree, run by run"
        yield from _by_run(runs)
    yield "### Over Traversal's best static tree, setting by setting"
    yield _compared({campaign.titles[k]: campaign.over(k, TRAVERSAL) for k in learned})
    if MAIN in learned:
        yield f"### {campaign.titles[MAIN]} over every rival"
        rivals = campaign.keys(learned=False)
        yield _compared({campaign.titles[k]: campaign.over(MAIN, k) for k in rivals})
    yield "### The methods"
    columns = ["role", "tuned", "block efficiency", "tokens/s", "over plain decoding"]
    columns.append("overhead in a step")
    for setting, methods in campaign.records.items():
        rows = (_method(campaign, setting, role) for role in methods)
        yield f"{setting}\n\n" + markdown(columns, rows)


def _by_run(runs: list[Decoded]) -> Iterator[str]:
    """Compare every run's selectors with their static trees; last, the mean over all of them."""
    columns, rows = dict[str, None](), dict[str, tuple[dict[str, list[float] | None], str]]()
    for run in runs:
        one = Campaign.of([run])
        pairs = {
            f"{one.titles[role]}, {setting}": (
                one.records[setting][role],
                one.records[setting][other],
            )
            for setting in one.sampled
            for role, other in OWN_STATIC.items()
            if {role, other} <= one.records[setting].keys()
        }
        columns |= dict.fromkeys(pairs)
        ratios, mean = speed_ratios(list(pairs.values()))
        rows[run.report.parent.name] = dict(zip(pairs, ratios, strict=True)), shown(mean, 3)
    lines = ([run, *(shown(own.get(c), 3) for c in columns), m] for run, (own, m) in rows.items())
    yield markdown(["", *columns, "mean"], lines)


def _compared(ratios: dict[str, dict[str, list[float] | None]]) -> str:
    """A row a role, a column a setting."""
    columns = list(next(iter(ratios.values()), {}))
    rows = ([role, *(shown(own[s], 3) for s in columns)] for role, own in ratios.items())
    return markdown(["", *columns], rows)


def _method(campaign: Campaign, setting: str, key: str) -> list[str]:
    methods, name = campaign.records[setting], campaign.decoded[setting][key]
    title, own = campaign.titles[key], row(key, methods[key], methods.get(BASELINE, []))
    overhead = f"{100 * own.shares['policy']:.1f} %" if own.shares else "–"
    speeds = [shown(own.block_efficiency), f"{own.tokens_per_second:.0f}", shown(own.speedup)]
    return [title, "" if name == title else name, *speeds, overhead]


def _decoded(runs: list[Decoded]) -> Iterator[str]:
    """Amount of text that each of `runs` decoded."""
    for run in runs:
        own = Counter(record.setting for record in run.records if record.method == BASELINE)
        prompts = ", ".join(f"{count} prompts at {setting}" for setting, count in own.items())
        yield f"{run.settings['new_tokens']} tokens each with seed {run.seed}, {prompts}"


if __name__ == "__main__":
    main()
