"""Claims of the papers, decided by decoding 200 held-out prompts: `claims.md`.

    python -m benchmarks.papers.claims --run checkpoints/small --out FOLDER

Every campaign decodes its methods side by side, prompt by prompt, with an A/A control of plain
decoding. An effect is a ratio of totals with a 95 % bootstrap over prompts: tokens a target pass,
or tokens/s where the paper speaks of speed. A claim holds where the interval lies above 1, fails
where it lies below, and is open where it holds 1; then it says how many prompts would take the
interval off 1 if the effect stayed. `--only` decodes some campaigns and writes no page; an
interrupted command goes on. Heads are trained where they are not there yet (`--steps`). Rows of
the place "here" are questions of ours, and decide no claim of a paper.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.heads import ended
from benchmarks.papers import dynatree, dyspec, gbv, talf
from benchmarks.papers.shared import Bench, Decoded, options_of
from benchmarks.timing import report
from nde_talf.data.text.shipped import SHIPPED
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.bootstrap import ratio_of_totals, shown
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.policies.dynatree import DynaTree, DynaTreeConfig
from nde_talf.decoding.policies.fixed import Shaped, fixed_shape
from nde_talf.decoding.policies.salf import Optimal, Salf
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.decoding.setting import AUTO
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.protocol import BASELINE, CONTROL, trusted
from nde_talf.evaluation.speed import CPU, speed_ratio
from nde_talf.selector.network import Selector
from nde_talf.selector.policy import NeuralPolicy

TEMPERATURES = (0.6, 1.0)
STATIC = {
    0.6: {"Traversal": (4, 0, 3), "SpecInfer": (2, 0, 4)},
    1.0: {"Traversal": (4, 0, 3), "SpecInfer": (4, 0, 3)},
}
"""Best static trees of the shipped pair, chosen on training prompts (`rules.md`)."""
TREED = {
    "SpecInfer": "specinfer",
    "SpecTr": "spectr",
    "Khisti": "khisti_lp",
    "NaiveTree": "naivetree",
    "NSS": "nss",
}
"""The optimal-transport rules of the NDE paper as they are printed, which it runs on trees."""
HERE = "here"
"""The place of a question that no paper asks in these words: it decides no paper's claim."""


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
    """

    name: str
    setting: SamplingSetting
    methods: dict[str, tuple]
    claims: tuple[Claim, ...]
    drafts: SamplingSetting | str = AUTO


def nde(bench: Bench) -> Iterator[Campaign]:
    """Rules on root-node rollouts, delayed trees, and the shipped selectors."""
    authors = (  # GBV's claims at temperature 1, at which its authors draft too
        Claim("GBV abstract", "improve block efficiency", "GBV", ("BV",)),
        Claim("GBV 6.4", "Traversal beats GBV at temperature 1.0", "Traversal", ("GBV",)),
    )
    for t in TEMPERATURES:
        rules = TREED | {"Traversal": "traversal", "GBV": "gbv", "Khisti, ours": "khisti"}
        root = {name: (Delayed(Action(4, 0, 8)), rule) for name, rule in rules.items()}
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
        chosen: dict[str, tuple] = {}
        for rule, tree in STATIC[t].items():
            key = rule.lower()
            chosen[rule] = Delayed(Action(*tree)), key
            selector = Selector.from_pretrained(SHIPPED / "selector" / "export" / key)
            chosen[f"{rule} NDE"] = NeuralPolicy(selector), key
        outperform = "SpecInfer to outperform Traversal Verification"
        yield Campaign(
            f"nde-selectors-{t:g}",
            SamplingSetting(t),
            chosen,
            (
                Claim("NDE abstract", outperform, "SpecInfer NDE", ("Traversal",), True),
                Claim(
                    "NDE 6",
                    "improves on the baseline algorithms",
                    "SpecInfer NDE",
                    ("SpecInfer",),
                    True,
                ),
                Claim(HERE, "NDE over its baseline", "Traversal NDE", ("Traversal",), True),
            ),
        )


def multipath(bench: Bench) -> Iterator[Campaign]:
    """GBV on paths of 8 tokens at 0.2, drafted at temperature 1 as its authors do."""
    named = {f"{rule}, K = {k}": (rule, k) for rule in ("GBV", "Traversal") for k in (2, 4)}
    methods = {name: gbv.method(rule.lower(), k, 8) for name, (rule, k) in named.items()}
    methods["BV"] = gbv.method("gbv", 1, 8)
    claims = [
        claim
        for k in (2, 4)
        for claim in (
            Claim("GBV abstract", "improve block efficiency", f"GBV, K = {k}", ("BV",)),
            Claim("GBV 6.4", "beats traversal at 0.2", f"GBV, K = {k}", (f"Traversal, K = {k}",)),
        )
    ]
    words = "increasing the number of draft paths monotonically improves"
    claims.append(Claim("GBV 6", words, "GBV, K = 4", ("GBV, K = 2",)))
    yield Campaign("gbv-0.2", SamplingSetting(0.2), methods, tuple(claims), SamplingSetting(1.0))


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
    """DySpec with trees of 16 nodes, drafted at temperature 0.6 as its authors do."""
    words = "higher acceptance rate … than fixed trees"
    for t in (0.0, 0.6):
        setting = SamplingSetting(t)
        claims = tuple(
            Claim("DySpec abstract", words, ours, (theirs,))
            for ours, theirs in (
                ("DySpec", "Sequoia"),
                ("DySpec, heap", "Sequoia"),
                ("DySpec", "SpecInfer"),
            )
        )
        methods = dyspec.methods(bench, 16, setting)
        yield Campaign(f"dyspec-16-{t:g}", setting, methods, claims, dyspec.DRAWN)


def heads(bench: Bench) -> Iterator[Campaign]:
    """Heads of three losses, with beam search, the optimal fill, SALF, and sampled trees."""
    trained = talf.trained(bench, bench.options.steps)
    drafters = {loss: EagleDrafter(head) for loss, head in trained.items()}
    beams = {f"{loss}, beam": (Beam(), "nss", own) for loss, own in drafters.items()}
    own = drafters["TALF"]
    fills = {
        "TALF, optimal": (Optimal(), "nss", own),
        "TALF, SALF": (Salf(), "nss", own),
        "TALF, SALF, th = 0.9": (Salf(threshold=0.9), "nss", own),
    }
    sampled = {
        f"{loss}, sampled": (Delayed(Action(4, 1, 3)), "specinfer", own)
        for loss, own in drafters.items()
    }
    before = ("EAGLE-2, beam", "HASS, beam")
    claims = (
        *(Claim("SALF & TALF 4.3", "TALF improves τ", "TALF, beam", (loss,)) for loss in before),
        *(
            Claim("SALF & TALF 4.2", "consistent mean improvements", "TALF, SALF", (loss,), True)
            for loss in before
        ),
    )
    on_fills = (
        Claim("SALF & TALF 4.3", "optimal increases τ", "TALF, optimal", ("TALF, beam",)),
        Claim("SALF & TALF 4.3", "SALF: τ decreases", "TALF, optimal", ("TALF, SALF",)),
        Claim("SALF & TALF 4.3", "… performance increases", "TALF, SALF", ("TALF, optimal",), True),
        Claim(
            "SALF & TALF 4.4", "th = 0.6 over 0.9", "TALF, SALF", ("TALF, SALF, th = 0.9",), True
        ),
    )
    yield Campaign("talf-0", SamplingSetting(0.0), beams | fills, claims + on_fills)
    on_sampled = tuple(
        Claim(HERE, "sampled trees", "TALF, sampled", (f"{loss}, sampled",))
        for loss in ("EAGLE-2", "HASS")
    )
    salf = {"TALF, SALF": fills["TALF, SALF"]}
    yield Campaign("talf-1", SamplingSetting(1.0), beams | salf | sampled, claims + on_sampled)


def diverging(bench: Bench) -> Iterator[Campaign]:
    """Rules on a draft that diverges from the target with depth: EAGLE's loss trains one pass."""
    own = EagleDrafter(talf.trained(bench, bench.options.steps)["EAGLE-2"])
    rules = {name: TREED[name] for name in ("SpecInfer", "NSS")}
    deep = {
        name + late: (Delayed(action), rule, own)
        for name, rule in rules.items()
        for late, action in (("", Action(4, 0, 6)), (", delayed by 2", Action(4, 2, 4)))
    }
    yield Campaign(
        "nde-depth-1",
        SamplingSetting(1.0),
        deep,
        tuple(
            Claim(HERE, "one fixed delay, diverging draft", f"{name}, delayed by 2", (name,))
            for name in rules
        ),
    )


CAMPAIGNS: dict[str, Callable[[Bench], Iterator[Campaign]]] = {
    "nde": nde,
    "gbv": multipath,
    "dynatree": grown,
    "dyspec": greedy_expansion,
    "talf": heads,
    "depth": diverging,
}


def efficiency(ours: list[Record], theirs: list[Record]) -> list[float]:
    """Divide tokens a target pass of two methods on the same prompts: [ratio, low, high]."""
    left, right = ({r.block: (r.tokens, r.steps) for r in each} for each in (ours, theirs))
    both = [[*left[block], *right[block]] for block in sorted(left.keys() & right.keys())]
    return ratio_of_totals(np.array(both, dtype=float))


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


def decided(campaign: Campaign, decoded: Decoded) -> Iterator[list]:
    """Yield a row for each claim of a campaign."""
    plain = decoded.of(BASELINE)
    clock = speed_ratio(decoded.of(CONTROL), plain, CPU)
    for claim in campaign.claims:
        ours = decoded.of(claim.ours)

        def against(name: str, ours: list[Record] = ours) -> tuple[list[float], list[float]]:
            theirs = decoded.of(name)
            return efficiency(ours, theirs), speed_ratio(ours, theirs, CPU) or []

        effects = {name: against(name) for name in claim.theirs}
        best = min(effects, key=lambda name: effects[name][claim.speed][0])
        both = effects[best]
        fair = not claim.speed or trusted(clock or [])
        yield [
            claim.place,
            claim.words,
            str(campaign.setting),
            f"{claim.ours} over {best}",
            "speed" if claim.speed else "τ",
            shown(both[claim.speed]),
            outcome(both[claim.speed], len(ours), fair),
        ]


def main() -> None:
    """Read the command line."""
    parser = options_of(__doc__, 40)
    parser.add_argument("--only", nargs="+", choices=CAMPAIGNS, help="decode these and stop")
    parser.add_argument("--steps", type=int, nargs=2, default=(1300, 500), help="as talf has them")
    parser.set_defaults(prompts=96)
    options = parser.parse_args()
    bench, rows, controls = Bench(options), [], []
    for name in options.only or CAMPAIGNS:
        for campaign in CAMPAIGNS[name](bench):
            decoded = bench.decode(
                f"claims-{campaign.name}", campaign.setting, campaign.methods, campaign.drafts
            )
            rows += decided(campaign, decoded)
            control = speed_ratio(decoded.of(CONTROL), decoded.of(BASELINE), CPU)
            controls.append(f"{campaign.name} {shown(control)}")
    if options.only:
        return
    heads = []
    for name in ("warm", *talf.LOSSES):
        overlap, gain = ended(talf.folder_of(bench, options.steps) / name)
        heads.append(f"{name} {' '.join(f'{x:.2f}' for x in overlap)} ({gain:+.3f})")
    notes = [
        f"A/A by CPU time: {', '.join(controls)}.",
        f"Heads, overlap after 0 to 4 drafts (gain of the last third): {', '.join(heads)}.",
        "Static trees and selectors are priced on the machine of rules.md; DynaTree's thresholds"
        " are tuned for its authors' history alone; heads have equal steps, not equal time.",
    ]
    columns = ["place", "claim", "setting", "here", "by", "effect", "outcome"]
    report("claims", columns, rows, notes)


if __name__ == "__main__":
    main()
