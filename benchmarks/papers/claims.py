"""Claims of the papers, decided by decoding 200 held-out prompts: `claims.md`.

    rules="[specinfer,spectr,khisti_lp,naivetree,nss,traversal,gbv]"
    run="model=small model.threads=1 data.prompt_count=500 data.test_fraction=0.4 traces=nde
        traces.verifiers=$rules traces.train_prompts=96 traces.validation_prompts=16
        traces.samples=2 traces.validation_samples=2 traces.stride=12 traces.new_tokens=48
        traces.shard_prompts=8 selector.verifiers=$rules"
    for stage in pair latency traces selector; do
        python -m pipelines.run run=claims $run selector=nde stage=$stage
    done   # for --ours: run=ours base=claims selector=text stage=selector
    python -m benchmarks.papers.claims --run checkpoints/claims --ours FOLDER --out FOLDER

Every campaign decodes its methods side by side, prompt by prompt, with an A/A control of plain
decoding. An effect is a ratio of totals with a 95 % bootstrap over prompts: tokens a target pass,
or tokens/s where the paper speaks of speed. A claim holds where the interval is above 1, fails
where it is below, and is open where it holds 1; then the page says how many prompts would take the
interval off 1 if the effect stayed. `--only` decodes some campaigns and writes no page; an
interrupted command continues. Heads are trained where they are not there yet (`--steps`). Rows of
the place "here" are questions of ours, and decide no claim of a paper.

    python -m benchmarks.papers.claims --pair smollm2 --run FOLDER --head FOLDER --out FOLDER
        [--heads HASS FOLDER ...] [--ours FOLDER] [--priced a100_70b_8b FOLDER]

decides those of NDE and of SALF & TALF on a target alone, with a head as drafter, from a run with
traces.drafter=head (`claims_smollm2.md`): the settings and rules that were traced, and claims on
losses as far as there are --heads. --priced adds a column: NDE as printed in the prices of a
profile of configs/latency, with the selectors of a run of selector=nde selector.table=NAME.
Trees are chosen by Eq. 11 with its latencies, they are decoded, and a step's seconds are Eq. 11's.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path

import torch

from benchmarks.heads import LOSSES, OWN_TEXT, STEPS, TOP_2, ended, folder_of, trained
from benchmarks.papers import dynatree, dyspec, gbv, nde, talf
from benchmarks.papers.nde import RULES, TREED
from benchmarks.papers.shared import EIGHT, Bench, Decoded, options_of
from benchmarks.ratios import speed_ratios
from benchmarks.timing import RESULTS, report
from nde_talf.data.text.shipped import SHIPPED
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.common.bootstrap import shown
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.policies.dynatree import DynaTree, DynaTreeConfig
from nde_talf.decoding.policies.fixed import Shaped, fixed_shape
from nde_talf.decoding.policies.salf import Optimal, Salf
from nde_talf.decoding.sampling.rng import SamplingSetting
from nde_talf.decoding.sampling.sampling_setting import AUTO
from nde_talf.draft_training.export.head_format import load_head
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.protocol import BASELINE, CONTROL, trusted
from nde_talf.evaluation.speed import CPU
from nde_talf.evaluation.static_trees import traced_index
from nde_talf.evaluation.table import markdown
from nde_talf.pipelines.config.schema import PROFILES
from nde_talf.selector.network import Selector
from nde_talf.selector.policy import NeuralPolicy
from nde_talf.selector.prices import LatencyTable

COLUMNS = ["place", "claim", "setting", "here", "by", "effect", "outcome"]
HERE = "here"
"""The place of a question that no paper asks in these words: it decides no paper's claim."""


DYSPEC_TOKENS = {16: 40, 64: 24, 256: 16, 768: 12}
"""Tokens after each prompt, by the nodes of a tree."""


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, as a method that is to be ahead of others.

    Attributes:
        place: paper and section; `HERE` for a question of ours.
        words: a short quotation, or the question.
        ours: the method that is to be ahead.
        theirs: those it is held against: the best of them by this measurement.
        speed: whether the paper speaks of speed, not of tokens a target pass.
    """

    place: str
    words: str
    ours: str
    theirs: tuple[str, ...]
    speed: bool = False


@dataclass(frozen=True)
class Campaign:
    """Methods that are decoded side by side, and the claims that they decide.

    Attributes:
        name: of the records.
        methods: (policy, rule) or (policy, rule, drafter), by name.
        drafts: the setting that drafts are drawn with.
        tokens: decoded after each prompt.
        joint: claims that the mean over all campaigns with them decides, not each.
        prices: profile of latencies that seconds are taken from; "": the clock.
    """

    name: str
    setting: SamplingSetting
    methods: dict[str, tuple]
    claims: tuple[Claim, ...]
    drafts: SamplingSetting | str = AUTO
    tokens: int = 40
    joint: tuple[Claim, ...] = ()
    prices: str = ""


def rules(bench: Bench) -> Iterator[Campaign]:
    """Rules on root-node rollouts, and on trees with one fixed delay."""
    authors = (  # GBV's claims at temperature 1, at which its authors draft too
        Claim("GBV abstract", "improve block efficiency", "GBV", ("BV",)),
        Claim("GBV 6.4", "Traversal beats GBV at temperature 1.0", "Traversal", ("GBV",)),
    )
    for t in (0.6, 1.0):
        every = RULES | {"GBV": "gbv", "Khisti, ours": "khisti"}
        root = {name: (Delayed(Action(4, 0, 8)), rule) for name, rule in every.items()}
        late = {
            f"{name}, delayed by 2": (Delayed(Action(4, 2, 6)), rule)
            for name, rule in TREED.items()
        }
        others = (*TREED, "GBV", "BV")
        yield Campaign(
            f"nde-rules-{t:g}",
            SamplingSetting(t),
            root | late | {"BV": (Delayed(Action(1, 0, 8)), "bv")},
            (
                *(
                    Claim("NDE 4.2", "Traversal is the best-performing", "Traversal", others, by)
                    for by in (False, True)
                ),
                *(
                    Claim(HERE, "one fixed delay", f"{name}, delayed by 2", (name,))
                    for name in TREED
                ),
                Claim(HERE, "our tournament", "Khisti, ours", ("Khisti",)),
                *(authors if t == 1 else ()),
            ),
        )


def selectors(bench: Bench) -> Iterator[Campaign]:
    """NDE as it is printed over the best static tree of rules and at settings that were traced.

    Trees and selectors come from training prompts of the run; `--ours` has the selectors that our
    objective trains on the same roots.
    """
    roots, options = nde.labelled(bench), bench.options
    ours = [name for name, rule in RULES.items() if (options.ours / rule).is_dir()]
    words, outperform = "improves on the baseline", "SpecInfer to outperform Traversal"
    claims = [
        Claim("NDE 6", words, f"{name} NDE", (name,), speed)
        for speed in (False, True)
        for name in TREED
        if RULES[name] in roots.samples
    ]
    claims.append(Claim("NDE abstract", outperform, "SpecInfer NDE", ("Traversal",), True))
    own = [Claim(HERE, "our objective", f"{name} NDE, ours", (name,), True) for name in ours]
    own.append(Claim(HERE, outperform, "SpecInfer NDE, ours", ("Traversal",), True))
    for at in EIGHT:
        if traced_index(roots.settings, SETTINGS[at]) is None:
            continue
        for profile, folder in {"": None, **options.priced}.items():
            paper = (profile_table(profile), Path(folder)) if profile else None
            methods = nde.methods(bench, roots, at, paper)
            if missing := {claim.ours for claim in claims} - methods.keys():
                where = folder or "--run"
                raise UserError(f"{where} has no {missing}: selector=nde selector.verifiers=[...]")
            for name in () if profile else ours:
                selector = Selector.from_pretrained(options.ours / RULES[name])
                methods[f"{name} NDE, ours"] = NeuralPolicy(selector), RULES[name]
            yield Campaign(
                "-".join(filter(None, ("nde", at, profile))),
                SETTINGS[at],
                methods,
                (),
                tokens=24 if options.head else 16,
                joint=(*claims, *own),
                prices=profile,
            )


def multipath(bench: Bench) -> Iterator[Campaign]:
    """GBV on paths of 8 tokens, drafted at temperature 1 as its authors do; K = 1 is BV."""
    more = "increasing the number of draft paths monotonically improves"
    for t, tokens, *paths in ((0.2, 40, 2, 4), (0.6, 24, 2, 3, 4)):
        methods = {f"GBV, K = {k}": gbv.method("gbv", k, 8) for k in paths}
        methods |= {f"Traversal, K = {k}": gbv.method("traversal", k, 8) for k in (2, 4)}
        methods["BV"] = gbv.method("gbv", 1, 8)
        steps = ["BV", *(f"GBV, K = {k}" for k in paths)]
        claims = [Claim("GBV abstract", "improve block efficiency", steps[-1], ("BV",))]
        claims += [Claim("GBV 6", more, b, (a,)) for a, b in pairwise(steps)]
        place = "GBV 6.4" if t == 0.2 else HERE
        for k in (2, 4):
            other = f"Traversal, K = {k}"
            claims.append(Claim(place, "GBV beats traversal", f"GBV, K = {k}", (other,)))
        if t == 0.6:
            methods |= {n: (Delayed(Action(1, 0, 8)), n.lower()) for n in ("TV", "Naive")}
            words = "improves upon naive speculative sampling"
            claims.append(Claim("NDE 3.1", words, "TV", ("Naive",)))
        yield Campaign(
            f"gbv-{t:g}", SamplingSetting(t), methods, tuple(claims), SamplingSetting(1.0), tokens
        )


def grown(bench: Bench) -> Iterator[Campaign]:
    """DynaTree as its authors ran it beside fixed trees of depth 5, greedy."""
    greedy, drawn = SamplingSetting(0.0), SamplingSetting(0.5)
    config = DynaTreeConfig(nodes=63, **dynatree.tuned(bench, greedy, drawn))
    fixed, printed = "fixed tree, D = 5, B = 2", "DynaTree, history by step"
    methods = {
        "chain, K = 5": (Shaped(fixed_shape(5, 1, 5), "top_k"), "greedy"),
        fixed: (Shaped((fixed_shape(5, 2, 62),), "top_k"), "greedy"),
        "DynaTree": (dynatree.AsRun(config), "greedy"),
        "DynaTree, no history": (DynaTree(replace(config, window=0)), "greedy"),
        printed: (DynaTree(config), "greedy"),
    }
    claims = (
        Claim("DynaTree Table 3", "tokens an iteration", "DynaTree", (fixed,)),
        Claim(
            "DynaTree abstract", "improves throughput over a fixed-tree", "DynaTree", (fixed,), True
        ),
        Claim("DynaTree abstract", "outperforming linear", "DynaTree", ("chain, K = 5",), True),
        Claim("DynaTree 4.4", "History … a further", "DynaTree", ("DynaTree, no history",), True),
        Claim(HERE, "history by step", printed, (fixed,), True),
    )
    yield Campaign("dynatree", greedy, methods, claims, drawn)


def greedy_expansion(bench: Bench) -> Iterator[Campaign]:
    """DySpec with trees of 16 to 768 nodes, drafted at temperature 0.6 as its authors do."""
    words = "higher acceptance rate …"
    for t, nodes in product((0.0, 0.6), DYSPEC_TOKENS):
        setting = SamplingSetting(t)
        claims = tuple(
            Claim("DySpec abstract", f"{words}, {nodes} nodes", ours, (theirs,))
            for ours, theirs in (
                ("DySpec", "Sequoia"),
                ("DySpec, heap", "Sequoia"),
                ("DySpec", "SpecInfer"),
            )
        )
        methods = dyspec.methods(bench, nodes, setting)
        name, tokens = f"dyspec-{nodes}-{t:g}", DYSPEC_TOKENS[nodes]
        yield Campaign(name, setting, methods, claims, dyspec.DRAWN, tokens)


def heads(bench: Bench) -> Iterator[Campaign]:
    """Heads of three losses, with beam search, the optimal fill, SALF, and sampled trees."""
    options, steps = bench.options, "-".join(map(str, bench.options.steps))
    if options.heads:
        steps, target = "given", bench.models[0]
        every = {loss: load_head(folder, target) for loss, folder in options.heads.items()}
    else:
        every = trained(bench, options.steps, (*LOSSES, TOP_2, OWN_TEXT))
    drafters = {loss: EagleDrafter(head) for loss, head in every.items()}
    beams = {f"{loss}, beam": (Beam(), "nss", own) for loss, own in drafters.items()}
    own = drafters["TALF"]
    fills = {
        "TALF, optimal": (Optimal(), "nss", own),
        "TALF, SALF": (Salf(), "nss", own),
        **{f"TALF, SALF, th = {t}": (Salf(threshold=t), "nss", own) for t in (0.3, 0.9)},
    }
    sampled = {
        f"{loss}, sampled": (Delayed(Action(4, 1, 3)), "specinfer", own)
        for loss, own in drafters.items()
        if loss in LOSSES
    }
    before = ("EAGLE-2, beam", "HASS, beam")
    claims = (
        *(Claim("SALF & TALF 4.3", "TALF improves τ", "TALF, beam", (loss,)) for loss in before),
        *(
            Claim("SALF & TALF 4.2", "consistent mean improvements", "TALF, SALF", (loss,), True)
            for loss in before
        ),
        Claim("SALF & TALF 4.4", "we increase k … enhancing τ", "TALF, beam", (f"{TOP_2}, beam",)),
        Claim(HERE, "the target's own text", f"{OWN_TEXT}, beam", ("TALF, beam",)),
    )
    on_fills = (
        Claim("SALF & TALF 4.3", "optimal increases τ", "TALF, optimal", ("TALF, beam",)),
        Claim("SALF & TALF 4.3", "SALF: τ decreases", "TALF, optimal", ("TALF, SALF",)),
        Claim("SALF & TALF 4.4", "lower th … higher τ", "TALF, SALF, th = 0.3", ("TALF, SALF",)),
        Claim("SALF & TALF 4.3", "… performance increases", "TALF, SALF", ("TALF, optimal",), True),
        Claim(
            "SALF & TALF 4.4", "th = 0.6 over 0.9", "TALF, SALF", ("TALF, SALF, th = 0.9",), True
        ),
    )
    yield Campaign(
        f"talf-{steps}-0", SamplingSetting(0.0), beams | fills, claims + on_fills, tokens=24
    )
    on_sampled = tuple(
        Claim(HERE, "sampled trees", "TALF, sampled", (f"{loss}, sampled",))
        for loss in ("EAGLE-2", "HASS")
    )
    salf = {"TALF, SALF": fills["TALF, SALF"]}
    if len(every) == 1:  # all claims at temperature 1 compare losses
        return
    yield Campaign(
        f"talf-{steps}-1",
        SamplingSetting(1.0),
        beams | salf | sampled,
        claims + on_sampled,
        tokens=24,
    )


def diverging(bench: Bench) -> Iterator[Campaign]:
    """Rules on a draft that diverges from the target with depth: EAGLE's loss trains one pass."""
    own = EagleDrafter(trained(bench, bench.options.steps)["EAGLE-2"])
    rules = {"SpecInfer": "specinfer", "NSS": "nss"}
    deep = {
        name + late: (Delayed(action), rule, own)
        for name, rule in rules.items()
        for late, action in (("", Action(4, 0, 6)), (", delayed by 2", Action(4, 2, 4)))
    }
    steps = "-".join(map(str, bench.options.steps))
    yield Campaign(
        f"nde-depth-{steps}-1",
        SamplingSetting(1.0),
        deep,
        tuple(
            Claim(HERE, "one fixed delay, diverging draft", f"{name}, delayed by 2", (name,))
            for name in rules
        ),
        tokens=24,
    )


CAMPAIGNS: dict[str, Callable[[Bench], Iterator[Campaign]]] = {
    "nde": selectors,
    "rules": rules,
    "gbv": multipath,
    "dynatree": grown,
    "dyspec": greedy_expansion,
    "talf": heads,
    "depth": diverging,
}
PAIRS = {"small": ("claims", [*CAMPAIGNS]), "smollm2": ("claims_smollm2", ["nde", "talf"])}
"""The page of a pair, and its campaigns."""


def profile_table(name: str) -> LatencyTable:
    """Read the latencies of a profile."""
    return LatencyTable.load(PROFILES / f"{name}.json")


def effect(sides: Sequence[tuple[list[Record], list[Record]]], speed: bool) -> list[float]:
    """Divide tokens a target pass, or a second, of ours by theirs: [ratio, low, high].

    The geometric mean over `sides`, the records of ours and theirs by campaign; prompts are
    resampled jointly.
    """
    return speed_ratios(sides, CPU if speed else "steps")[1] or []


def outcome(effect: list[float], prompts: int, clock: bool) -> str:
    """Say holds, fails, or open with the prompts that would decide it if the effect stayed.

    >>> outcome([1.1, 1.02, 1.2], 200, True), outcome([1.02, 0.98, 1.06], 200, True)
    ('holds', 'open (800)')
    """
    ratio, low, high = effect
    if not clock:
        return "open (clock not trusted)"
    if low > 1:
        return "holds"
    if high < 1:
        return "fails"
    half = (high - low) / 2
    needed = prompts * (half / max(abs(ratio - 1), 1e-3)) ** 2
    return f"open ({needed:.0f})" if needed < 1e5 else "open (no effect seen)"


def repriced(decoded: Decoded, campaign: Campaign, bench: Bench) -> Decoded:
    """Take the seconds of all records from Eq. 11 with the latencies of a profile."""
    table, numbers = profile_table(campaign.prices), {str(tuple(t)): i for i, t in enumerate(TREES)}
    contexts = {prompt.id: len(prompt.tokens) for prompt in bench.prompts}

    def priced(record: Record) -> Record:
        policy, steps = campaign.methods[record.method][0], record.actions
        if isinstance(policy, Delayed):
            steps = {str(tuple(policy.action)): record.steps}
        middle = torch.tensor([contexts[record.prompt] + record.tokens // 2])
        costs = table.steps_eq11(middle)[0].tolist()
        seconds = sum(count * costs[numbers[tree]] for tree, count in steps.items())
        return replace(record, seconds=seconds, cpu_seconds=seconds)

    return Decoded({name: [*map(priced, decoded.of(name))] for name in campaign.methods})


def against(claim: Claim, decoded: Iterable[Decoded]) -> tuple[str, list[float]]:
    """Return the best of a claim's rivals, and the effect over it."""
    effects = {
        name: effect([(each.of(claim.ours), each.of(name)) for each in decoded], claim.speed)
        for name in claim.theirs
    }
    best = min(effects, key=lambda name: effects[name][0])
    return best, effects[best]


def decided(
    setting: str,
    claims: Iterable[Claim],
    decoded: Sequence[Decoded],
    priced: Iterable[Sequence[Decoded]] = (),
) -> Iterator[list]:
    """Yield a row for each claim, decided by one campaign or by the mean over several.

    Claims on methods that were not decoded are left out.

    priced: the same campaigns in the prices of each profile.
    """
    control = effect([(each.of(CONTROL), each.of(BASELINE)) for each in decoded], True)
    for claim in claims:
        if not all(decoded[0].of(name) for name in (claim.ours, *claim.theirs)):
            continue
        best, found = against(claim, decoded)
        prompts = len(decoded[0].of(claim.ours))
        clock = not claim.speed or bool(trusted(control, found))
        others = (against(claim, own)[1] for own in priced if own[0].of(claim.ours))
        yield [
            claim.place,
            claim.words,
            setting,
            f"{claim.ours} over {best}",
            "speed" if claim.speed else "τ",
            shown(found),
            outcome(found, prompts, clock),
            *(f"{shown(other)}: {outcome(other, prompts, True)}" for other in others),
        ]


def read() -> Namespace:
    """Read the command line."""
    parser = options_of(__doc__, 40)
    parser.add_argument("--pair", choices=PAIRS, default="small")
    parser.add_argument("--only", nargs="+", choices=CAMPAIGNS, help="decode these and stop")
    parser.add_argument("--steps", type=int, nargs=2, default=STEPS, help="as heads has them")
    parser.add_argument("--ours", type=Path, help="folder with exports of our selectors")
    for name in ("--heads", "--priced"):
        parser.add_argument(name, nargs=2, action="append", default=[], metavar=("NAME", "FOLDER"))
    parser.set_defaults(prompts=100)
    options = parser.parse_args()
    options.ours = options.ours or SHIPPED.with_name(options.pair) / "selector" / "export"
    if options.head:
        options.heads.append(("TALF", options.head))
    options.heads, options.priced = dict(options.heads), dict(options.priced)
    return options


def main() -> None:
    """Decode the campaigns, and report."""
    options = read()
    page, every = PAIRS[options.pair]
    columns = [*COLUMNS, *(f"by Eq. 11, {profile}" for profile in options.priced)]
    bench, rows, controls, notes = Bench(options), [], [], []
    for name in options.only or every:
        joint: dict[str, dict[str, Decoded]] = {profile: {} for profile in ("", *options.priced)}
        for campaign in CAMPAIGNS[name](bench):
            options.new_tokens, setting = campaign.tokens, str(campaign.setting)
            decoded = bench.decode(
                f"claims-{campaign.name}", campaign.setting, campaign.methods, campaign.drafts
            )
            rows += decided(setting, campaign.claims, [decoded])
            control = effect([(decoded.of(CONTROL), decoded.of(BASELINE))], True)
            doubt = "" if trusted(control) else " (clock not trusted)"
            controls.append(f"{campaign.name} {shown(control)}{doubt}")
            if campaign.prices:
                decoded = repriced(decoded, campaign, bench)
            if campaign.joint:
                joint[campaign.prices][setting] = decoded
        here, *priced = ([*own.values()] for own in joint.values())
        if here:
            rows += decided(f"mean of {len(here)}", campaign.joint, here, priced)
            notes.append(by_setting(campaign.joint, joint[""]))
    if not options.only:
        rows = [row + ["–"] * (len(columns) - len(row)) for row in rows]
        notes += [f"A/A by CPU time: {', '.join(controls)}.", *beside(bench)]
        report(page, columns, rows, notes)


def beside(bench: Bench) -> Iterator[str]:
    """Yield the notes below the table: roots, heads, time to the first token, mask blocks."""
    yield f"{len(bench.prompts)} held-out prompts."
    roots = len(nde.labelled(bench).setting)
    yield f"NDE as printed learned from {roots:,} roots, the paper's selectors from 1,750 prompts."
    if bench.options.head:
        return
    heads, steps = [], bench.options.steps
    for name in ("warm", *LOSSES, TOP_2, OWN_TEXT):
        folder = folder_of(bench, steps, name)
        (overlap, gain), (_, agreed) = ended(folder), ended(folder, "agreement")
        by_depth = " ".join(f"{x:.2f}" for x in overlap)
        heads.append(f"{name} {by_depth} ({gain:+.3f}; {agreed:+.3f})")
    gains = "gains of the last third: of overlap; of agreement by the most likely token"
    yield f"Heads, overlap after 0 to 4 drafts ({gains}): {', '.join(heads)}."
    picture = talf.curves(bench, steps, RESULTS / "claims.png")
    yield f"{picture} (![tokens a pass over time](claims.png))."
    (tree,) = grown(bench)
    methods = {**tree.methods, BASELINE: (Autoregressive(), "nss")}
    first = dynatree.first_tokens(bench, methods, tree.setting, tree.drafts)
    yield f"DynaTree:\n\n{markdown(['method', 'ms to the first token', 'MB'], first)}"
    policy, _ = dyspec.methods(bench, 768, dyspec.DRAWN)["DySpec"]
    blocks = dyspec.decoded_in_blocks(bench, policy)
    yield f"DySpec, 768 nodes, blocks of 32 x 32 a pass: {blocks}."


def by_setting(claims: Iterable[Claim], decoded: dict[str, Decoded]) -> str:
    """The effects of the claims about speed, as a table with a column a setting."""
    rows = (
        [
            f"{claim.ours} over {claim.theirs[0]}",
            *(
                shown(effect([(own.of(claim.ours), own.of(claim.theirs[0]))], True))
                for own in decoded.values()
            ),
        ]
        for claim in claims
        if claim.speed and all(own.of(claim.ours) for own in decoded.values())
    )
    return markdown(["speed", *decoded], rows)


if __name__ == "__main__":
    main()
