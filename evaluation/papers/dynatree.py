"""“DynaTree” (Chen et al.): Tables 1 to 6, Figures 3 to 8.

All from the loop, greedy. The paper's two texts, WikiText-2 and PG-19, are two sets of prompts of
the run: `wikitext2` and `pg19` where it has them, or two others. The thresholds that the paper
tunes and does not print are TUNED.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

from nde_talf.data.traces.budget import cache_bytes
from nde_talf.decoding.policies.dynatree import DynaTree as Policy
from nde_talf.decoding.policies.dynatree import DynaTreeConfig
from nde_talf.decoding.policies.fixed import Shaped, fixed_shape
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.evaluation.papers.bench import Bench, Work
from nde_talf.evaluation.papers.decoded import Decoded, Loop, Methods, mean_of, milliseconds_a_token
from nde_talf.evaluation.papers.frame import Claim, Plot, Row, Table
from nde_talf.evaluation.papers.resampled import Samples, as_interval, as_text, mean, ratio
from nde_talf.evaluation.protocol import BASELINE

NODES = 256
TUNED = {"stop": 0.005, "deep": 0.1, "prune": 0.002}
"""rho_stop, rho_deep and tau."""
AR, LINEAR, FIXED, GROWN, FULL = (
    "AR",
    "Linear, K = 5",
    "Fixed tree, D = 5, B = 2",
    "+ breadth and depth",
    "DynaTree",
)
ABLATED = "+ history (DynaTree)"
GREEDY, DRAWN = SamplingSetting(0.0), SamplingSetting(0.5)
CONFIG = DynaTreeConfig(nodes=NODES, **TUNED)
TEXTS = ("wikitext2", "pg19", "prose", "manual")
PARTS = (0.25, 0.5, 1.0)
CUTS = (16, 32, 0)
LONGEST = {LINEAR: 5}  # what the paper divides a path by for its acceptance; 7 for a tree
SPEED, SPEEDUP, PATH, ACCEPTANCE = "tokens/s", "speedup", "path length", "acceptance, %"
ITERATION, ITERATIONS = "tokens an iteration", "iterations"
SWEEP = {
    "Depth: D0 = 3, Dmax = 6": {"depth": 3, "max_depth": 6},
    "Depth: D0 = 8, Dmax = 12": {"depth": 8, "max_depth": 12},
    "Branches: Bmin = 1, Bmax = 2": {"branches": (1, 2, 2)},
    "Branches: Bmin = 1, Bmax = 4": {"branches": (1, 2, 4)},
    "Thresholds: (0.9, 0.7)": {"confident_low": 0.7},
    "Thresholds: (0.8, 0.4)": {"confident_high": 0.8},
    "Cross: high-throughput preset": {
        "depth": 8,
        "max_depth": 12,
        "branches": (1, 2, 4),
        "confident_low": 0.7,
    },
}


class DynaTree:
    """Measurements, tables and claims on a run."""

    name, title = "dynatree", "DynaTree (Chen et al.)"

    def __init__(self, bench: Bench):
        self.bench = bench
        texts = [kind for kind in TEXTS if kind in bench.sets]
        self.texts = texts[:2] if len(texts) > 1 else bench.sets[:2]
        loop = partial(Loop, setting=GREEDY, draft=DRAWN, usual=256)
        self.loops = {
            f"part {part:g}": loop(
                f"dynatree-{part:g}", methods=methods, kinds=self.texts, part=part
            )
            for part in PARTS
        }
        self.loops |= {
            f"cut {cut}": loop(f"dynatree-cut{cut}", methods=methods, kinds=self.texts[:1], cut=cut)
            for cut in CUTS[:-1]
        }
        self.loops["sweep"] = loop("dynatree-sweep", methods=sweep, kinds=self.texts[:1])
        self.loops["fixed"] = loop("dynatree-fixed", methods=fixed_trees, kinds=self.texts[:1])
        self.loops[f"cut {CUTS[-1]}"] = self.loops["part 1"]

    def works(self) -> list[Work]:
        unique = {loop.name: loop for loop in self.loops.values()}
        return [
            loop.work(self.bench, 9 if "sweep" in name or "fixed" in name else 4)
            for name, loop in unique.items()
        ]

    @cached_property
    def decoded(self) -> dict[str, Decoded]:
        return {name: Decoded.of(self.bench, loop) for name, loop in self.loops.items()}

    def figure(self, loop: str, method: str, of: str, kind: str | None) -> Samples | None:
        """A cell of a loop."""
        own, method = self.decoded[loop], {AR: BASELINE, ABLATED: FULL}.get(method, method)
        match of:
            case "tokens/s":
                return own.speed(method, kind)
            case "speedup":
                return own.speedup(method, kind)
            case "tokens an iteration":
                return own.length(method, kind)
            case "iterations":
                return mean_of(own, method, "steps", kind)
            case "TTFT":
                found = mean_of(own, method, "first_seconds", kind)
                return None if found is None else 1e3 * found
            case "TPOT":
                return milliseconds_a_token(own, method, kind)
            case "over the fixed tree, %":
                found = ratio(own.speed(method, kind), own.speed(FIXED, kind))
                return None if found is None else 100 * (found - 1)
        length = own.length(method, kind)
        if length is None or method == BASELINE:
            return None
        return length - 1 if of == PATH else 100 * (length - 1) / LONGEST.get(method, 7)

    def tables(self) -> list[Table]:
        methods = [(name,) for name in (AR, LINEAR, FIXED, FULL)]
        doubts = self.decoded["part 1"].doubts()
        table = partial(Table, keys=("Method",), notes=doubts, works=[self.loops["part 1"].name])
        text = ", ".join(self.texts)

        def by_text(row: Row, column: str) -> Samples | None:
            kind, of = column.split(", ", 1)
            return self.figure("part 1", row[0], of, kind)

        def columns(*names: str) -> list[str]:
            return [f"{kind}, {name}" for kind in self.texts for name in names]

        def first(row: Row, column: str) -> Samples | None:
            return self.figure("part 1", row[0], column, self.texts[0])

        def swept(row: Row, column: str) -> Samples | None:
            return self.figure("sweep", row[0], column, self.texts[0])

        steps = [(FIXED,), (GROWN,), (ABLATED,)]
        found = [
            table("Table 1", f"Tokens/s and speed-up over plain decoding ({text})", rows=methods,
                  columns=columns(SPEED, SPEEDUP), cell=by_text),
            table("Table 2", "Milliseconds to the first token, and a token after it", rows=methods,
                  columns=columns("TTFT", "TPOT"), cell=by_text),
            table("Table 3", "Verification. Acceptance is the path length over 5 (linear) or 7 (trees), which gives the "
                  "paper's column from its own path lengths", rows=methods,
                  columns=columns(ACCEPTANCE, ITERATION, PATH, ITERATIONS), cell=by_text),
            table("Table 4", f"Ablation on {self.texts[0]}", rows=steps, columns=[SPEED, SPEEDUP, "over the fixed tree, %"],
                  cell=first),
            table("Table 5", f"Sensitivity on {self.texts[0]}", rows=[(name,) for name in (AR, FIXED, *SWEEP)],
                  columns=[SPEED, SPEEDUP, ACCEPTANCE], cell=swept, works=[self.loops["sweep"].name]),
            table("Table 6", "Memory, MB: weights and caches at the end of a text, computed from their sizes", rows=methods,
                  columns=[*self.texts, "change, %"], cell=self._memory),
            table("Figure 3", "Tokens/s by text", rows=methods, columns=self.texts,
                  cell=lambda row, kind: self.figure("part 1", row[0], SPEED, kind), plot=Plot("bars", "", "tokens/s")),
            table("Figure 3 right", "Speed-up by text", rows=methods, columns=self.texts,
                  cell=lambda row, kind: self.figure("part 1", row[0], SPEEDUP, kind), plot=Plot("bars", "", "speed-up")),
            table("Figure 4 left", "Ablation: tokens/s and iterations", rows=steps, columns=[SPEED, ITERATIONS], cell=first,
                  plot=Plot("bars", "", "tokens/s; iterations")),
            table("Figure 4 right", "Ablation: tokens an iteration and acceptance", rows=steps, columns=[ITERATION, ACCEPTANCE],
                  cell=first, plot=Plot("bars", "", "tokens; %")),
        ]  # fmt: skip
        total = self.bench.tokens(256)
        parts = {str(max(1, round(total * part))): f"part {part:g}" for part in PARTS}
        for letter, of in zip("abcd", (SPEED, ITERATION, PATH, ACCEPTANCE), strict=True):
            found.append(
                table(f"Figure 5{letter}", f"By generated tokens on {self.texts[0]}: {of}", rows=methods, columns=list(parts),
                      cell=lambda row, column, of=of: self.figure(parts[column], row[0], of, self.texts[0]),
                      plot=Plot("lines", "generated tokens", of), works=[self.loops[name].name for name in parts.values()])
            )  # fmt: skip
        shapes = [(f"D = {depth}",) for depth in (3, 5, 8)]
        cuts = {"full" if not cut else str(cut): f"cut {cut}" for cut in CUTS}
        longer = [self.loops[name].name for name in cuts.values()]
        found += [
            table("Figure 6", "Sensitivity of DynaTree: tokens/s", rows=[(name,) for name in (AR, *SWEEP)], columns=[SPEED],
                  cell=swept, plot=Plot("bars", "", "tokens/s"), works=[self.loops["sweep"].name]),
            table("Figure 7", "Fixed trees by depth and branching, speed-up (the paper also prunes them by a threshold)",
                  rows=shapes, columns=["B = 1", "B = 2", "B = 3"], plot=Plot("bars", "", "speed-up"),
                  cell=lambda row, b: self.figure("fixed", f"{row[0]}, {b}", SPEEDUP, None), works=[self.loops["fixed"].name]),
            table("Figure 8", f"By prompt length on {self.texts[0]}: tokens/s", rows=methods, columns=list(cuts),
                  cell=lambda row, cut: self.figure(cuts[cut], row[0], SPEED, self.texts[0]),
                  plot=Plot("lines", "longest prompt, tokens", "tokens/s"), works=longer),
            table("Figure 8 right", f"By prompt length on {self.texts[0]}: speed-up", rows=methods, columns=list(cuts),
                  cell=lambda row, cut: self.figure(cuts[cut], row[0], SPEEDUP, self.texts[0]),
                  plot=Plot("lines", "longest prompt, tokens", "speed-up"), works=longer),
        ]  # fmt: skip
        return found

    def _memory(self, row: Row, column: str) -> Samples | None:
        if column == "change, %":
            ours, plain = (
                mean([self._memory((name,), kind) for kind in self.texts]) for name in (row[0], AR)
            )
            found = ratio(ours, plain)
            return None if found is None else 100 * (found - 1)
        target, draft = self.bench.models
        own, name = self.decoded["part 1"], BASELINE if row[0] == AR else row[0]
        length = {prompt.id: len(prompt.tokens) for prompt in self.bench.prompts.every}
        tokens = mean_of(
            own, name, lambda r: length[r.prompt] + r.tokens + r.nodes / max(r.steps, 1), column
        )
        models = [target] if row[0] == AR else [target, draft]
        weights = sum(
            p.numel() * p.element_size() for model in models for p in model.module.parameters()
        )
        return None if tokens is None else (weights + tokens * sum(map(cache_bytes, models))) / 1e6

    def claims(self) -> list[Claim]:
        own = self.decoded["part 1"]

        def over(one: str, other: str, of: str) -> dict:
            return {kind: ratio(self.figure("part 1", one, of, kind), self.figure("part 1", other, of, kind))
                    for kind in self.texts}  # fmt: skip

        note = (
            "The paper tunes three thresholds and does not print them; ours are fixed, not tuned."
            f" On {own.prompts}, greedy."
        )
        plain = {name: as_text(as_interval(own.speedup(name))) for name in (FULL, GROWN, FIXED)}
        timed = (
            f"{note} Over plain decoding:"
            f" {', '.join(f'{name} {figure}' for name, figure in plain.items())}."
        )
        return [
            Claim("DynaTree is faster than a fixed tree", "1.65× against 1.42× (WikiText-2), 1.44× against 1.37× (PG-19)",
                  partial(over, FULL, FIXED, SPEED), timed, own.doubts()),
            Claim("DynaTree commits more tokens an iteration than a fixed tree",
                  "7.08 against 5.75 (WikiText-2), 6.17 against 5.75 (PG-19)", partial(over, FULL, FIXED, ITERATION), note),
            Claim("Adapting to history is faster", "218.5 against 213.2 tokens/s", partial(over, FULL, GROWN, SPEED), timed,
                  own.doubts()),
        ]  # fmt: skip


def methods(nodes: int | None = None) -> Methods:
    """Table 1's methods and the ablation's, with at most so many drafted tokens."""
    config = replace(CONFIG, nodes=nodes or NODES)
    return {
        LINEAR: (Shaped(fixed_shape(5, 1, 5), "top_k"), "greedy"),
        FIXED: (Shaped(fixed_shape(5, 2, config.nodes), "top_k"), "greedy"),
        GROWN: (Policy(replace(config, window=0)), "greedy"),
        FULL: (Policy(config), "greedy"),
    }


def sweep() -> Methods:
    """Table 5's."""
    found = {name: (Policy(replace(CONFIG, **own)), "greedy") for name, own in SWEEP.items()}
    return {FIXED: methods()[FIXED], **found}


def fixed_trees() -> Methods:
    """Figure 7's."""
    return {
        f"D = {depth}, B = {b}": (Shaped(fixed_shape(depth, b, NODES), "top_k"), "greedy")
        for depth in (3, 5, 8)
        for b in (1, 2, 3)
    }
