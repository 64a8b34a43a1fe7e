"""The tree policies of the DynaTree, SALF & TALF and DySpec papers on a run's pair, in the papers' own tables: all methods of a
table interleaved prompt by prompt, with 95 % bootstrap intervals over prompts.

`python -m benchmarks.policies 002|003|004 [--run checkpoints/default] [--drafter lm|head]`, after `python -m pipelines.run`.
Besides what this machine measures, every method is priced for a machine where a target pass takes the same time for any tree
and a draft pass a given fraction of it, the setting that the papers have in mind:

    (tokens a step) / (1 + fraction x draft passes a step)
"""

import argparse
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from pipelines.quiet import quiet  # isort: skip (before torch)

import torch
from torch import Tensor

from benchmarks.forwards import ForwardClock, watched
from benchmarks.rows import doubts, rate
from benchmarks.timing import report
from data.text.pair import Pair
from decoding.actions import Action
from decoding.common.bootstrap import shown
from decoding.drafter import Drafter, LMDrafter
from decoding.loop import SpeculativeDecoder
from decoding.model import CausalModel
from decoding.policies.base import TreePolicy
from decoding.policies.beam import Beam
from decoding.policies.delayed import Autoregressive, Delayed
from decoding.policies.dynatree import DynaTree, DynaTreeConfig
from decoding.policies.dyspec import DySpec, DySpecThreshold
from decoding.policies.fixed import Shaped, fixed_shape, positional_rates, sequoia_shape
from decoding.policies.salf import Optimal, Salf
from decoding.sampling import Rng, SamplingSetting
from decoding.verification import VERIFIERS
from draft_training.export import load_head
from draft_training.head_drafter import EagleDrafter
from evaluation.benchmark import Record, read_records, run_benchmark
from evaluation.protocol import BASELINE, CONTROL
from evaluation.solver_acceptance import draft_paths
from evaluation.speed import CPU, speed_ratio

PLAIN = BASELINE, CONTROL
Methods = dict[str, tuple[TreePolicy, str]]  # name -> policy, verifier
THRESHOLDS = [round(0.1 * i, 1) for i in range(10)]
# What the papers print for the same rows: 002 Tables 1, 3, 4 (WikiText-2), 003 Tables 2 and 4 (TALF, mean), 004 Table 1 (C4).
PAPER = {
    ("002", 0.0): {
        BASELINE: "1.00x, 1.00",
        "linear, 5": "1.27x, 4.84",
        "fixed tree, 5 x 2": "1.42x, 5.75",
        "+ breadth and depth": "1.61x",
        "+ history": "1.65x, 7.08",
    },
    ("003", 0.0): {
        "beam": "1.97x, 3.88",
        "SALF 0.0 (optimal)": "2.32x, 4.26",
        **{
            f"SALF {threshold}": f"{speed}x, {tokens}"
            for threshold, speed, tokens in zip(
                THRESHOLDS[1:],
                (2.36, 2.46, 2.55, 2.58, 2.62, 2.59, 2.58, 2.51, 2.37),
                (4.26, 4.26, 4.23, 4.18, 4.10, 3.99, 3.83, 3.63, 3.32),
                strict=True,
            )
        },
    },
    ("004", 0.0): {
        BASELINE: "23.0 ms, 1",
        "DySpec, threshold": "7.3 ms, 5.25",
        "Sequoia": "8.7 ms, 4.99",
        "SpecInfer, 8 x 8": "12.9 ms, 3.32",
    },
    ("004", 0.6): {
        BASELINE: "21.9 ms, 1",
        "DySpec, threshold": "9.9 ms, 3.71",
        "Sequoia": "11.9 ms, 3.45",
        "SpecInfer, 8 x 8": "12.2 ms, 3.44",
    },
}
COLUMNS = [
    "setting",
    "method",
    "tokens a pass",
    "ms a token",
    "speedup",
    "in CPU time",
    "nodes",
    "draft passes a step",
    "outside the models",
    "priced speedup",
    "paper",
]


@dataclass
class Sample:
    """What two policies of the DySpec paper have to know beforehand, measured on prompts that the table does not use."""

    target: CausalModel
    draft: CausalModel
    prompts: list[list[int]]
    setting: SamplingSetting
    drawn: SamplingSetting

    def rates(self) -> list[float]:
        """Sequoia's positional acceptance rates, along the LM draft's paths from the target's own trajectories."""
        p, q = self._rows
        return positional_rates(p, q, 16, torch.Generator().manual_seed(0))

    def beliefs(self) -> list:
        """Beside the rates what DySpec takes for them: the draft's probability of a token drawn from it, in the mean."""
        return [str(self.setting), float((self._rows[1] ** 2).sum(-1).mean()), *self.rates()[:4]]

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        p, q = draft_paths(self.target, self.draft, self.prompts, self.setting, self.drawn, depths=8)
        return p.flatten(0, 1), q.flatten(0, 1)

    def threshold(self, nodes: int) -> float:
        """Median of the lowest value at which the heap draws with this budget: below it, the threshold variant would spend the
        budget before it gets deep."""
        lowest, policy = [], DySpec(nodes)
        rule = VERIFIERS["without_replacement"]
        decoder = SpeculativeDecoder(self.target, LMDrafter(self.draft), policy, rule, self.drawn)
        for prompt in self.prompts[:4]:
            for _ in islice(decoder.stream(prompt, self.setting, Rng.seeded(0)), 1, 7):
                lowest.append(policy.values[-1])
        return median(lowest)


# rho_stop, rho_deep and tau of the DynaTree paper, which tunes them on held-out text and does not print them.
TUNED = {"stop": 0.005, "deep": 0.1, "prune": 0.002}


def dynatree(nodes: int, greedy: bool, sample: Sample) -> Methods:
    """DynaTree paper."""
    rule = "greedy" if greedy else "nss"
    fixed = Shaped(fixed_shape(5, 2, nodes), "top_k")
    return {
        "linear, 5": (Shaped(fixed_shape(5, 1, 5), "top_k"), rule),
        "fixed tree, 5 x 2": (fixed, rule),
        "+ breadth and depth": (DynaTree(DynaTreeConfig(nodes=nodes, window=0, **TUNED)), rule),
        "+ history": (DynaTree(DynaTreeConfig(nodes=nodes, **TUNED)), rule),
    }


def salf(nodes: int, greedy: bool, sample: Sample) -> Methods:
    """SALF & TALF paper: k = B = 10 and depth 7 as in EAGLE-2."""
    rule = "greedy" if greedy else "nss"
    return {
        "beam": (Beam(k=10, depth=7, nodes=nodes), rule),
        "SALF 0.0 (optimal)": (Optimal(nodes=nodes, batch=10), rule),
        **{f"SALF {threshold}": (Salf(nodes=nodes, batch=10, threshold=threshold), rule) for threshold in THRESHOLDS[1:]},
        "SALF 0.6, filled": (Salf(nodes=nodes, batch=10, threshold=0.6, fill=True), rule),
    }


def dyspec(nodes: int, greedy: bool, sample: Sample) -> Methods:
    """DySpec paper."""
    side = round(nodes**0.5)
    return {
        "DySpec, heap": (DySpec(nodes), "without_replacement"),
        "DySpec, threshold": (DySpecThreshold(sample.threshold(nodes), nodes), "without_replacement"),
        "Sequoia": (Shaped(sequoia_shape(sample.rates(), nodes, 12), "without_replacement"), "without_replacement"),
        f"SpecInfer, {side} x {side}": (Delayed(Action(side, 0, side)), "specinfer"),
    }


# By paper: methods; budget; temperatures of the target and, for each, of the draft; prompts; new tokens. Under a greedy target
# a draft at its own temperature underrates its likely paths; DySpec paper fixes 0.6.
TABLES = {
    "002": (dynatree, 64, {0.0: 0.5}, 10, 96),
    "003": (salf, 60, {0.0: 0.5, 1.0: 1.0}, 6, 48),
    "004": (dyspec, 64, {0.0: 0.6, 0.6: 0.6}, 10, 48),
}


def rows(paper: str, temperature: float, records: list[Record], fraction: float) -> list[list]:
    """One row a method of one setting."""
    by_method = {name: [r for r in records if r.method == name] for name in dict.fromkeys(r.method for r in records)}
    printed = PAPER.get((paper, temperature), {})
    return [
        [
            own[0].setting,
            name,
            shown(rate(own, "tokens", "steps")),
            "{:.1f} [{:.1f}, {:.1f}]".format(*(1e3 * x for x in rate(own, "seconds", "tokens"))),
            shown(speed_ratio(own, by_method[BASELINE])),
            shown(speed_ratio(own, by_method[BASELINE], CPU)),
            f"{rate(own, 'nodes', 'steps')[0]:.1f}",
            f"{rate(own, 'draft_passes', 'steps')[0]:.1f}",
            f"{100 * median(1 - r.forward_seconds / r.seconds for r in own):.0f} %",
            f"{sum(r.tokens for r in own) / sum(r.steps + fraction * r.draft_passes for r in own):.2f}",
            printed.get(name, "–"),
        ]
        for name, own in sorted(by_method.items(), key=lambda item: (item[0] != BASELINE, item[0] != CONTROL))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--drafter", choices=["lm", "head"], default="lm")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--nodes", type=int, help="budget of a tree")
    parser.add_argument(
        "--draft-share", type=float, default=0.1, help="a draft pass over a target pass, for the priced speedup"
    )
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    make, nodes, temperatures, prompt_count, new_tokens = TABLES[options.table]
    nodes, new_tokens = options.nodes or nodes, options.new_tokens or new_tokens
    pair = Pair(options.run / "pair")
    prompts = [(p.id, p.kind, p.tokens) for p in pair.prompts("test", options.prompts or prompt_count, "--prompts")]
    sample = [p.tokens for p in pair.every_prompt() if p.split == "trace"][:12]
    found: list[list] = []
    beliefs: list[list] = []
    notes: list[str] = []
    with TemporaryDirectory() as folder:
        for temperature, own in temperatures.items():
            setting, drawn, clock = SamplingSetting(temperature), SamplingSetting(own), ForwardClock()
            target, draft = pair.models("cpu", "float32")  # afresh: the clock wraps them
            clock.watch(target)
            clock.watch(draft, draft=True)
            drafter: Drafter = LMDrafter(draft)
            if options.drafter == "head":
                head = load_head(options.run / "draft" / "export", target)
                clock.watch(head, draft=True)
                drafter = EagleDrafter(head)

            measured = Sample(target, draft, sample, setting, drawn)
            policies = {name: (Autoregressive(), "nss") for name in PLAIN} | make(nodes, temperature == 0, measured)
            methods = {
                name: watched(
                    name,
                    SpeculativeDecoder(target, None if name in PLAIN else drafter, policy, VERIFIERS[rule], drawn),
                    setting,
                    new_tokens,
                    clock,
                )
                for name, (policy, rule) in policies.items()
            }
            records = Path(folder) / f"{temperature}.jsonl"
            run_benchmark(methods, prompts, setting, records, seed=0)
            if options.table == "004":
                beliefs.append(measured.beliefs())
            read = list(read_records(records))
            found += rows(options.table, temperature, read, options.draft_share)
            notes += doubts(read)
    command = f"python -m benchmarks.policies {options.table} --run checkpoints/{options.run.name}"
    if options.drafter != "lm":
        command += f" --drafter {options.drafter}"
    name = f"policies_{options.table}" + ("" if options.drafter == "lm" else f"_{options.drafter}")
    report(name, command, COLUMNS, found, notes)
    if beliefs:
        columns = ["setting", "probability of a drawn token", *(f"child {i} accepted" for i in range(1, 5))]
        report(f"{name}_acceptance", command, columns, beliefs)


if __name__ == "__main__":
    main()
