"""What selectors win over everything that could be run in their place, from the files of finished
runs.

`python -m benchmarks.selector [--run checkpoints/paper] [--online RUN ...] [--out FOLDER]`. The commands that make the committed pages' runs are in PAGES. --online: runs with
`evaluation=campaign`, of other settings or seeds, that are reported together; without it all
evaluations beside --run whose names begin with its name. Unfinished ones count as far as they have
come. Writes results/selector.md and docs/selector.png, or both into --out.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from benchmarks.rows import doubts
from benchmarks.timing import RESULTS
from nde_talf.decoding.common.bootstrap import shown
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json
from nde_talf.evaluation.benchmark import Record, read_records, together
from nde_talf.evaluation.methods import BEST_STATIC, NGRAM, TITLES, selector_title
from nde_talf.evaluation.plots import offline_picture
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.speed import CPU, MEAN, speed_ratios
from nde_talf.evaluation.table import markdown, row
from nde_talf.pipelines.stage import BEGUN

DOCS = Path(__file__).parents[1] / "docs"
PAPER = """R="model=paper data.prompt_count=520 data.test_fraction=0.5 traces=testbed selector=small model.threads=1"
R="$R traces.stride=16 traces.validation_samples=4"
S="selector.verifiers=[traversal,specinfer,spectr,khisti,naivetree,nss,gbv] selector.across=true"
for stage in pair latency traces selector; do python -m pipelines.run $R $S run=paper stage=$stage; done
for s in t0.2 t0.6 t1.0 p0.9; do
  python -m pipelines.run $R $S run=paper-$s base=paper stage=evaluate evaluation=campaign evaluation.settings=[$s] \
    evaluation.new_tokens=32
done
G="run=paper-t0 base=paper traces.settings=[t0] traces.train_prompts=120 selector.verifiers=[traversal]"
G="$G evaluation.settings=[t0] evaluation.new_tokens=32"
for stage in traces selector; do python -m pipelines.run $R $G stage=$stage; done
python -m pipelines.run $R $G stage=evaluate evaluation=campaign
python -m benchmarks.selector --run checkpoints/paper"""
SECOND = """R="model=testbed2 traces=testbed selector=small model.threads=1 traces.settings=[t0.6,t1.0]"
R="$R traces.train_prompts=110 traces.validation_prompts=24 traces.stride=16 traces.validation_samples=4"
S="selector.verifiers=[traversal,specinfer,spectr,khisti,naivetree,nss,gbv] selector.across=true"
F="data.mix.mathematics.source=gsm8k_train.jsonl data.mix.encyclopedia.source=wikitext2_valid.txt"   # where no hub is reached
F="$F data.mix.chat.source=alpaca_question.jsonl"
C="data.mix.chat.template='User: {turns}\\nAssistant: {reference}'"
for stage in pair latency traces selector; do python -m pipelines.run $R $S $F "$C" run=second stage=$stage; done
for s in t0.6 t1.0; do
  python -m pipelines.run $R $S $F "$C" run=second-$s base=second stage=evaluate evaluation=campaign \
    evaluation.settings=[$s] evaluation.prompts=120 evaluation.new_tokens=32
done
python -m benchmarks.selector --run checkpoints/second --out benchmarks/results/second"""
PAGES = {
    "paper": (
        (
            "One pair (`model=paper`: a 12-layer target and a 1-layer draft, both trained here) on"
            " traffic of several domains"
        ),
        PAPER,
        (
            "The models were trained once, by `python -m pipelines.run model=paper stage=pair`, and"
            " given to these runs with `model.target=`, `model.draft=` and `data=traffic_full`."
        ),
    ),
    "second": (
        (
            "A second pair (`model=testbed2`: a 10-layer target and a 2-layer draft, both trained"
            " here) on mathematics, an encyclopedia and chat, for which nothing was tuned before"
            " this one run"
        ),
        SECOND,
        "Chat is 80 questions with answers, so that few of its prompts are decoded.",
    ),
}
"""By name of the run: the pair, the commands that made it, and a remark."""
INTRODUCTION = """# Selector: against everything that could be run in its place

{pair}. Batch size 1, {machine}.
All figures are tokens/s of one method over those of another, both as totals on the same prompts, with one and the same
forward pass; brackets are 95 % bootstrap intervals, prompts resampled, and for a mean over settings the same
resampled prompts in all of them. The A/A control is plain decoding under a second name."""
ONLINE_NOTE = """\
All methods of a setting are decoded prompt by prompt in one process, in an order drawn anew for every prompt. Everything with a
parameter was tuned on {tuning} prompts that are neither decoded here nor traced for training, by the clock: each family got at
least 12 trials, a static tree the best three by labels and prices of 233. "By domain" is told the domain of every prompt.
"Overhead in a step" is the time until a policy has chosen its tree; in it the draft's
distribution at the root is computed, which drafting needs anyway. "Best rival" is what was fastest on these very prompts of
all that is not learned, so its interval does not account for having chosen it, in its favour."""
GREEDY_NOTE = """\
At temperature 0 a draft that is warped as the target is draws one token, so that all rules accept the same tokens and only the
length of a path is left to choose. One selector stands for all rules there; it is trained on traces of its own at that
temperature. "Draft trees" are those of other papers' policies, of the draft's most probable tokens."""
OFFLINE_NOTE = """\
Of the selectors' training run, by labels and prices, against the selector's own best static tree of the setting. How long to
train, and whether to choose at all, comes from folds of the training prompts; the held-out prompts take no part. "Root by root"
chooses by the labels themselves, in hindsight: between scoring on other super-trees than were chosen by (too low: labels are
noisy) and on the same (too high). "Of the way" is how much of that gain the selector gets, against the higher and against the
lower of the two."""
OFFLINE = {
    "selector": "NDE",
    "static_domain": "best static by domain",
    "over_domain": "NDE over by domain",
    "entropy_rule": "by draft entropy",
    "traversal_static": "Traversal's best static",
}
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
    parser.add_argument(
        "--out", type=Path, help="a folder for both files in place of the committed ones"
    )
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
    offline = read_json(options.run / "selector" / "offline.json")
    page = PAGES.get(options.run.name, ("The run's pair", "", ""))
    text = "\n\n".join(_sections(page, offline, online)) + "\n"
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    ((options.out or RESULTS) / "selector.md").write_text(text)
    offline_picture(offline).figure().savefig((options.out or DOCS) / "selector.png")
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
    """What was decoded, by setting and role, and what each role was under each setting."""

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
        """[ratio, low, high] of a role to another, which may be another one under every setting,
        and MEAN over the sampled ones.

        IN_CPU_TIME: that mean in CPU time.
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


def _sections(page: tuple[str, str, str], offline: dict, runs: list[Decoded]) -> Iterator[str]:
    results = next(
        (run.report / "results.json" for run in runs if (run.report / "results.json").exists()),
        None,
    )
    machine = read_json(results)["environment"] if results else {}
    known = [machine[key] for key in ("device", "CPU", "dtype") if key in machine]
    pair, commands, remark = page
    where = ", ".join([*known, f"torch {machine['torch']}"] if machine else ["an unfinished run"])
    yield INTRODUCTION.format(pair=pair, machine=where)
    if commands:
        yield f"```\n{commands}\n```\n\n{remark}"
    yield "## Online"
    yield from _online(runs)
    yield "## Offline: held-out roots"
    yield OFFLINE_NOTE
    rows = (
        _offline_row(name, *entry)
        for name, tables in offline.items()
        for entry in _settings(tables["measured"])
    )
    columns = [
        "selector",
        "setting",
        "roots",
        "best static tree",
        *OFFLINE.values(),
        "root by root",
        "of the way",
        "worst 5 %",
    ]
    yield markdown(columns, rows)


def _online(runs: list[Decoded]) -> Iterator[str]:
    found, records = Campaign.of(runs), together(record for run in runs for record in run.records)
    yield ONLINE_NOTE.format(
        tuning=" or ".join({str(run.settings["calibration_prompts"]): 0 for run in runs})
    )
    if GREEDY in found.records:
        yield GREEDY_NOTE
    yield f"Decoded: {'; '.join(_decoded(runs))}."
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
    yield "### What lost"
    yield from _lost(found, learned, best)
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


def _lost(found: Campaign, learned: list[str], best: dict[str, str]) -> Iterator[str]:
    """In words: the selectors that are not faster than the best rival, and the rivals that are
    slower than plain decoding.
    """
    lines = []
    for setting in found.records:
        ratios = {role: found.over(role, best).get(setting) for role in learned}
        slower = [
            f"{role} ({shown(own, 3)})" for role, own in ratios.items() if own and own[1] <= 1
        ]
        plain = [
            r
            for r in found.roles(learned=False)
            if 0 < found.speed(setting, r) < found.speed(setting, BASELINE)
        ]
        said = f"not shown to be faster than {best[setting]}: {'; '.join(slower) or 'none'}"
        lines.append(
            f"- {setting}: {said}. Slower than plain decoding: {', '.join(plain) or 'none'}."
        )
    yield "\n".join(lines)


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


def _settings(own: dict) -> list[tuple[str, dict]]:
    return [
        *own["settings"].items(),
        ("all", {**own["all"], "roots": own["validation_roots"], "static": ""}),
    ]


def _offline_row(name: str, setting: str, own: dict) -> list[str]:
    static = str(tuple(own["static"])) if own["static"] else ""
    ratios = (shown(own.get(key), 3) for key in OFFLINE)
    bounds = own["split_half"][0], own["same_half"][0]
    way = [
        f"{100 * (own['selector'][0] - 1) / (bound - 1):.0f}" if bound > 1 else "–"
        for bound in reversed(bounds)
    ]
    root = f"{bounds[0]:.3f} to {bounds[1]:.3f}"
    return [
        name,
        setting,
        str(own["roots"]),
        static,
        *ratios,
        root,
        f"{way[0]} to {way[1]} %",
        f"{own['worst_5_percent']:.2f}",
    ]


if __name__ == "__main__":
    main()
