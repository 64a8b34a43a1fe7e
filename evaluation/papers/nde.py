"""“Dynamic Delayed Tree Expansion” (NDE, Thomas et al.): Tables 2 to 15 and Figure 1.

Every cell but the loop's comes from labels. Tokens/s are priced by the run's latency table. As in
the paper each method has the K in 1..4 and L in 0..8 that are best for the set of prompts, the
sampling setting and the measure. The rows of NDE take the tree that the run's selector chooses at
every root.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import product

import numpy as np
from torch import Tensor

from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.files import checksum, content_digest, read_json
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.evaluation.loops import TITLES
from nde_talf.evaluation.papers.acceptance import CURVES, DEPTHS, L1, Rates, measuring
from nde_talf.evaluation.papers.bench import Bench, Work
from nde_talf.evaluation.papers.decoded import Decoded, Loop
from nde_talf.evaluation.papers.frame import Cell, Claim, Plot, Row, Table
from nde_talf.evaluation.papers.labelled import (
    AFTER_TRUNK,
    EIGHT,
    FROM_ROOT,
    PATHS,
    ROOT_TREES,
    SPEED,
    TOKENS,
    Labels,
    branching,
    tracing,
    unpriced,
)
from nde_talf.evaluation.papers.resampled import Samples, as_interval, as_text, mean, ratio
from nde_talf.evaluation.protocol import CONTROL
from nde_talf.evaluation.solver_acceptance import OPTIMAL
from nde_talf.selector.evaluate import probabilities
from nde_talf.selector.network import Selector
from nde_talf.selector.policy import NeuralPolicy
from nde_talf.selector.roots import PricedRoots

OT = ("khisti", "naivetree", "nss", "specinfer", "spectr")
RULES = ("nss", "bv", "khisti", "naivetree", "naive", "specinfer", "spectr", "traversal", "gbv")
RULE = {TITLES[rule]: rule for rule in RULES}
ON_PATHS = ("naive", "bv")
COLUMNS = dict(
    zip(
        EIGHT,
        ("T=0.2", "T=0.4", "T=0.6", "T=0.8", "T=1", "T=1.2", "top-p 0.9", "top-p 0.99"),
        strict=True,
    )
)
HERE = "here"
LOOP = "t1.0"  # the setting at which the winners are decoded


class Nde:
    """Measurements, tables and claims on a run."""

    name, title = "nde", "NDE (Dynamic Delayed Tree Expansion, Thomas et al.)"

    def __init__(self, bench: Bench):
        self.bench = bench

    @cached_property
    def labels(self) -> Labels | None:
        return Labels.of(self.bench)

    @cached_property
    def traced(self) -> Labels | None:
        """More prompts, for claims without a selector."""
        return Labels.of_traces(self.bench)

    @cached_property
    def rates(self) -> Rates:
        return Rates(self.bench)

    @cached_property
    def decoded(self) -> Decoded:
        return Decoded.of(self.bench, self._loop())

    def works(self) -> list[Work]:
        def loop() -> Work:
            return self._loop().work(self.bench, len(RULES) + len(OT))

        return [
            tracing(self.bench),
            measuring(self.bench),
            Work(
                "nde",
                lambda: loop().seconds(),
                lambda deadline: loop().run(deadline),
                lambda: self.decoded.prompts,
            ),
        ]

    def _loop(self) -> Loop:
        """The winners by the labels that there are now, and the selectors; a file of records for
        every such choice.
        """
        labels, exports = Labels.of(self.bench), self.bench.run / "selector" / "export"
        trees = (
            {rule: labels.best(rule, LOOP, _trees(rule), SPEED) for rule in RULES} if labels else {}
        )
        digest = content_digest([trees, checksum(exports) if exports.exists() else None])[:8]
        return Loop(f"nde-{digest}", SETTINGS[LOOP], partial(self._methods, trees))

    def _methods(self, trees: dict[str, int]) -> dict[str, tuple]:
        """Each rule with its tree, and the selectors."""
        found = {TITLES[rule]: (Delayed(TREES[tree]), rule) for rule, tree in trees.items()}
        for rule in OT:
            if selector := self._selector(rule):
                found[f"{TITLES[rule]} NDE"] = NeuralPolicy(selector, self.bench.table), rule
        return found

    def _selector(self, rule: str) -> Selector | None:
        folder = self.bench.run / "selector" / "export" / rule
        return (
            Selector.from_pretrained(folder).eval() if (folder / "config.json").exists() else None
        )

    @cached_property
    def _chosen(self) -> dict[str, Tensor]:
        """[R]: the trees that each rule's selector chooses at the labelled roots."""
        found = {}
        for rule in OT if self.labels else ():
            if selector := self._selector(rule):
                roots = PricedRoots.of(
                    self.labels.roots, [rule], [self.labels.table], selector.schema.pricing
                )
                found[rule] = probabilities(selector, roots, 0).argmax(-1)
        return found

    def figure(
        self, rule: str, setting: str, of: str, kind: str, trees: list[int] | None = None
    ) -> Samples | None:
        """A method's cell: with the best of `trees` for this set, setting and measure."""
        return (
            None
            if self.labels is None
            else self.labels.best_figure(rule, setting, trees or _trees(rule), of, kind)
        )

    def chosen(self, rule: str, setting: str, of: str, kind: str | None) -> Samples | None:
        """NDE's cell: with the trees of the selector."""
        trees = self._chosen.get(rule)
        return None if trees is None else self.labels.figure(rule, setting, trees, of, kind)

    def average(self, method: str, of: str, settings=EIGHT, kinds=None) -> Samples | None:
        """A row's mean over settings and sets: of a rule, of a rule's NDE, or of Traversal with one
        K.
        """
        rule, trees = RULE[method.split(",")[0].removesuffix(" NDE")], None
        if ", K=" in method:
            trees = branching(int(method[-1]))
        if method.endswith((" NDE", "delayed expansion")):
            cell = partial(self.chosen, rule)
        else:
            cell = partial(self.figure, rule, trees=trees)
        return mean(
            [
                cell(setting=setting, of=of, kind=kind)
                for setting in settings
                for kind in kinds or self.bench.sets
            ]
        )

    def tables(self) -> list[Table]:
        table = partial(
            Table, works=("labels",), notes=unpriced(self.bench.table) + self._missing()
        )
        average, sets = self.average, self.bench.sets
        methods, over = (
            [(TITLES[rule],) for rule in RULES],
            [(f"{TITLES[rule]} NDE",) for rule in OT],
        )
        long = [
            *(
                row
                for rule in OT
                for row in ((f"{TITLES[rule]}, delayed expansion",), (TITLES[rule],))
            ),
            ("Naive",),
            ("BV",),
            *((f"Traversal, K={k}",) for k in (2, 3, 4)),
        ]

        def gain(of: str) -> Cell:
            return lambda row, _: ratio(average(row[0], of), average(_own(row[0]), of))

        def here(of: str) -> Cell:
            return lambda row, _: average(row[0], of)

        def by_set(of: str) -> Cell:
            return lambda row, kind: average(row[0], of, kinds=[kind])

        def by_setting(of: str) -> Cell:
            names = {title: name for name, title in COLUMNS.items()}
            return lambda row, column: average(row[0], of, [names[column]])

        best = f"mean over {len(sets)} sets and eight settings, each with its best K and L"
        key, rows = ("Method",), [("Traversal",), *over]
        note = [
            "The paper's row “NaiveTree NDE” is over Naive, by its own Tables 2, 3, 6 and 7; so is"
            " ours."
        ]
        found = [
            table("Table 2", f"Block efficiency, {best}", key, methods, [HERE], here(TOKENS)),
            table("Table 3", f"Tokens/s, {best}", key, methods, [HERE], here(SPEED)),
            table(
                "Table 4",
                "Block efficiency of NDE over its own baseline",
                key,
                over,
                [HERE],
                gain(TOKENS),
            ),
            table(
                "Table 5", "Tokens/s of NDE over its own baseline", key, over, [HERE], gain(SPEED)
            ),
            table(
                "Table 6", "Block efficiency of Traversal and NDE", key, rows, [HERE], here(TOKENS)
            ),
            table("Table 7", "Tokens/s of Traversal and NDE", key, rows, [HERE], here(SPEED)),
            table(
                "Table 8", "Tokens/s by set, mean over the settings", key, long, sets, by_set(SPEED)
            ),
            table(
                "Table 9",
                "Block efficiency by set, mean over the settings",
                key,
                long,
                sets,
                by_set(TOKENS),
            ),
        ]
        found[2:4] = [Table(**{**vars(own), "notes": [*own.notes, *note]}) for own in found[2:4]]
        for number, model in zip((10, 12, 14), ("Qwen", "Gemma", "Llama"), strict=True):
            text = f"by setting, mean over the sets; the paper's figures are {model}'s"
            settings = list(COLUMNS.values())
            found.append(
                table(f"Table {number}", f"Tokens/s {text}", key, long, settings, by_setting(SPEED))
            )
            found.append(
                table(
                    f"Table {number + 1}",
                    f"Block efficiency {text}",
                    key,
                    long,
                    settings,
                    by_setting(TOKENS),
                )
            )
        depths = [str(depth) for depth in range(DEPTHS)]
        curves = [(name,) for name in CURVES]
        found.append(
            Table("Figure 1", "Acceptance rate with four draws, and L1 distance of target and draft, by depth on a path drawn "
                  "from the draft; all methods, mean over the settings", ("Method",), curves, depths, self.rates.curve, 3,
                  Plot("lines", "depth in the draft tree", "acceptance rate; L1 distance"), works=("acceptance",))
        )  # fmt: skip
        names = [*methods, *over, (CONTROL,)]
        found.append(
            Table("Table 3 in the loop", f"Winners by the labels of all sets, decoded at {SETTINGS[LOOP]}; speed-up in "
                  f"{'CPU' if self.bench.clock == 'cpu_seconds' else 'wall'} time", ("Method",), names,
                  ["tokens a target call", "labels say", "tokens/s", "over plain decoding"], self._looped,
                  notes=self.decoded.doubts(), works=("labels", "nde"))
        )  # fmt: skip
        return found

    def _missing(self) -> list[str]:
        there = [rule for rule in OT if (self.bench.run / "selector" / "export" / rule).exists()]
        note = (
            f"The run has selectors of {', '.join(there) or 'no rule'}; stage=selector trains them."
        )
        return [] if len(there) == len(OT) else [note]

    def _looped(self, row: Row, column: str) -> Samples | None:
        name, own = row[0], self.decoded
        if column == "labels say":
            if self.labels is None or name == CONTROL:
                return None
            rule = RULE[name.removesuffix(" NDE")]
            if name.endswith(" NDE"):
                return self.chosen(rule, LOOP, TOKENS, None)
            tree = self.labels.best(rule, LOOP, _trees(rule), SPEED)
            return self.labels.figure(rule, LOOP, [tree], TOKENS)[:, 0]
        call = {
            "tokens a target call": own.length,
            "tokens/s": own.speed,
            "over plain decoding": own.speedup,
        }[column]
        return call(name)

    def claims(self) -> list[Claim]:
        priced = "Tokens/s are priced by the latency table, not decoded."
        here, traced = (f" {labels}." if labels else "" for labels in (self.labels, self.traced))

        def average(rule: str, of: str) -> Samples | None:
            cells = [self.traced.best_figure(rule, setting, _trees(rule), of, kind)
                     for setting in EIGHT for kind in self.bench.sets] if self.traced else []  # fmt: skip
            return mean(cells)

        def single() -> str:
            best = [self.traced.best(rule, setting, list(range(len(TREES))), SPEED)
                    for rule in OT for setting in EIGHT] if self.traced else []  # fmt: skip
            best = [tree for tree in best if tree is not None]
            paths = sum(TREES[tree].k == 1 for tree in best)
            return (
                f"Of all trees the fastest static one is a single path in {paths} of {len(best)}"
                " cases (rule and setting)."
            )

        def crossed(rule: str, setting: str, of: str) -> Samples | None:
            return self.traced.crossed(rule, setting, _trees(rule), of) if self.traced else None

        def traversal(of: str) -> dict:
            others = [rule for rule in RULES if rule not in ("traversal", "gbv")]
            best = max(
                others, key=lambda rule: -np.inf if (own := average(rule, of)) is None else own[0]
            )
            name = f"over {TITLES[best]}, the best other method"
            elsewhere = [
                ratio(crossed("traversal", setting, of), crossed(best, setting, of))
                for setting in EIGHT
            ]
            return {
                name: ratio(average("traversal", of), average(best, of)),
                f"{name}, trees chosen on other prompts": mean(elsewhere),
            }

        def falls() -> dict:
            first, last = "0", str(DEPTHS - 1)
            names, curve = (
                [(name,) for name in CURVES if name not in (OPTIMAL, L1)],
                self.rates.curve,
            )
            return {
                f"{own[0]}, depth 0 over {last}": ratio(curve(own, first), curve(own, last))
                for own in names
            }

        def flat() -> str:
            ends = [own[2] for own in map(as_interval, falls().values()) if own and len(own) == 3]
            return (
                f" By the upper ends no rate falls by more than {100 - 100 / max(ends):.1f} %."
                if ends
                else ""
            )

        def delay() -> dict:
            if self.traced is None:
                return {"OT methods": None}
            crossed = self.traced.crossed
            return {f"{TITLES[rule]}, tokens/s": mean([ratio(crossed(rule, s, AFTER_TRUNK, SPEED),
                                                             crossed(rule, s, FROM_ROOT, SPEED)) for s in EIGHT])
                    for rule in OT}  # fmt: skip

        def chosen_over(rule: str, other: str, settings: Sequence[str] = EIGHT) -> Samples | None:
            """NDE of a rule over the best static trees of another from the root, all sets together,
            mean over the settings.
            """
            if self.labels is None:
                return None
            static = [
                self.labels.crossed(other, setting, ROOT_TREES, SPEED) for setting in settings
            ]
            return mean(
                [
                    ratio(self.chosen(rule, s, SPEED, None), own)
                    for s, own in zip(settings, static, strict=True)
                ]
            )

        def chosen_over_by_set(
            rule: str, other: str, trees: list[int] = ROOT_TREES
        ) -> Samples | None:
            """The same over the tree that is best for the set and setting on the prompts that the
            selectors learned from.
            """
            ours, theirs, labels, traced = [], [], self.labels, self.traced
            for setting, kind in product(known, self.bench.sets) if labels and traced else ():
                tree = traced.best(other, setting, trees, SPEED, kind)
                static = (
                    None if tree is None else labels.figure(other, setting, [tree], SPEED, kind)
                )
                if static is not None:
                    ours.append(self.chosen(rule, setting, SPEED, kind))
                    theirs.append(static[:, 0])
            return ratio(mean(ours), mean(theirs))

        def compared(rule: str, other: str) -> dict:
            found = {f"{TITLES[rule]} over {TITLES[other]}": chosen_over(rule, other)}
            return found | (
                {f"{TITLES[rule]} over {TITLES[other]} by set": chosen_over_by_set(rule, other)}
                if known
                else {}
            )

        def own() -> dict:
            return {name: figure for rule in OT for name, figure in compared(rule, rule).items()}

        def over_traversal() -> dict:
            return compared("specinfer", "traversal")

        same = ("K and L are chosen by set and setting on the same prompts, as in the paper; on other prompts: one tree for "
                "all sets.")  # fmt: skip
        file = self.bench.run / "traces" / "manifest.json"
        learned = read_json(file)["settings"]["traces"] if file.exists() else {"settings": []}
        known = [setting for setting in EIGHT if setting in learned["settings"]]

        def on_known(pairs: Sequence[tuple[str, str]]) -> str:
            """The same ratios under the settings that the selectors learned from, and over NDE's
            own trees, one a set.
            """
            if not known:
                return ""
            learners = (
                f"The selectors learned from {learned['train_prompts']} prompts under"
                f" {', '.join(known)}"
            )
            alone, wide = (
                ", ".join(
                    f"{TITLES[rule]} {as_text(as_interval(compare(rule, other)), 3)}"
                    for rule, other in pairs
                )
                for compare in (
                    partial(chosen_over, settings=known),
                    partial(chosen_over_by_set, trees=[*range(len(TREES))]),
                )
            )
            return (
                f" {learners}; under these settings alone: {alone}. Over the best by set of all"
                f" {len(TREES)} trees that NDE chooses from, of up to 16 tokens, which the paper's"
                f" baseline has not: {wide}."
            )

        how = (
            "The baseline's trees are chosen on other prompts than they are measured on, one for"
            " all sets; “by set”: one for each set and setting, on the prompts that the selectors"
            " learned from and under their settings. The tables choose on the same prompts and by"
            f" set, as the paper does. Tokens/s, priced by the latency table, not decoded.{here}"
        )
        return [
            Claim("Traversal accepts the most tokens of the eight methods", "5.31 against 4.61 tokens (Table 2)",
                 partial(traversal, TOKENS), f"{same}{traced}"),
            Claim("Traversal is the fastest of the eight methods", "15.89 against 13.55 tokens/s (Table 3)",
                 partial(traversal, SPEED), f"{same} {priced} With a single path Traversal is BV.{traced}"),
            Claim("The acceptance rate falls with depth", "all methods fall (Figure 1, no numbers)", falls,
                 f"Mean over the eight settings, on {self.rates.prompts}.{flat()}"),
            Claim("Branching after a delay beats branching at the root, for every OT method", "+16 to 30 % tokens/s with NDE",
                 delay, "The best static tree that branches after a trunk over the best that branches at the root, chosen on "
                 f"other prompts than they are measured on. {single()} {priced}{traced}"),
            Claim("NDE beats its own baseline", "+16 to 30 % tokens/s (Table 5)", own,
                  how + on_known([(rule, rule) for rule in OT])),
            Claim("SpecInfer with NDE beats Traversal", "16.69 against 15.89 tokens/s", over_traversal,
                  how + on_known([("specinfer", "traversal")])),
        ]  # fmt: skip


def _trees(rule: str) -> list[int]:
    return PATHS if rule in ON_PATHS else ROOT_TREES


def _own(name: str) -> str:
    """The baseline of a row of Tables 4 and 5."""
    name = name.removesuffix(" NDE")
    return "Naive" if name == "NaiveTree" else name
