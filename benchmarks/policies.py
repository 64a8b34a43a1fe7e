"""The tree policies of the DynaTree, SALF & TALF and DySpec papers (002, 003, 004) on a run's pair
with either drafter, priced for a machine of the kind that the papers have in mind.

The papers' own tables are `python -m evaluation.papers`.

`python -m benchmarks.policies 002|003|004 [--run checkpoints/default] [--drafter lm|head]`, after
`python -m pipelines.run`. All methods of a table are interleaved prompt by prompt, with 95 %
bootstrap intervals over prompts. Besides what this machine measures, every method is priced for a
machine where a target pass takes the same time for any tree and a draft pass a given fraction of
it:

    (tokens a step) / (1 + fraction x draft passes a step)
"""

import argparse
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import torch

from benchmarks.forwards import ForwardClock, watched
from benchmarks.rows import doubts, rate
from benchmarks.timing import report
from nde_talf.data.text.pair import Pair
from nde_talf.decoding.common.bootstrap import shown
from nde_talf.decoding.drafter import Drafter, LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Autoregressive
from nde_talf.decoding.policies.salf import Optimal, Salf
from nde_talf.decoding.rules import VERIFIERS
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.draft_training.export import load_head
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.evaluation.benchmark import Record, read_records, run_benchmark
from nde_talf.evaluation.papers import dynatree as dynatree_paper
from nde_talf.evaluation.papers import dyspec as dyspec_paper
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.speed import CPU, speed_ratio

PLAIN = BASELINE, CONTROL
Methods = dict[str, tuple[TreePolicy, str]]  # name -> policy, verifier
THRESHOLDS = [round(0.1 * i, 1) for i in range(10)]
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
]


Models = tuple[CausalModel, CausalModel]


def dynatree(
    nodes: int, setting: SamplingSetting, models: Models, prompts: list[list[int]]
) -> Methods:
    """DynaTree paper."""
    return dynatree_paper.methods(nodes)


def salf(nodes: int, setting: SamplingSetting, models: Models, prompts: list[list[int]]) -> Methods:
    """SALF & TALF paper: k = B = 10 and depth 7 as in EAGLE-2."""
    rule = "greedy" if setting.temperature == 0 else "nss"
    return {
        "beam": (Beam(k=10, depth=7, nodes=nodes), rule),
        "SALF 0.0 (optimal)": (Optimal(nodes=nodes, batch=10), rule),
        **{
            f"SALF {threshold}": (Salf(nodes=nodes, batch=10, threshold=threshold), rule)
            for threshold in THRESHOLDS[1:]
        },
        "SALF 0.6, filled": (Salf(nodes=nodes, batch=10, threshold=0.6, fill=True), rule),
    }


def dyspec(
    nodes: int, setting: SamplingSetting, models: Models, prompts: list[list[int]]
) -> Methods:
    """DySpec paper."""
    return dyspec_paper.methods(
        *models, prompts, nodes, setting, dyspec_paper.threshold(*models, prompts, nodes)
    )


def beliefs(models: Models, prompts: list[list[int]], setting: SamplingSetting) -> list:
    """What DySpec takes for an acceptance rate, the draft's mean probability of a token drawn from
    it, beside the rates of the first four children.
    """
    rows = torch.cat([q for _, q in dyspec_paper.rows_on_paths(*models, prompts, setting)])
    rates = dyspec_paper.acceptance_rates(*models, prompts, setting)
    return [str(setting), float((rows**2).sum(-1).mean()), *rates[:4]]


# By paper: methods; budget; temperatures of the target and, for each, of the draft; prompts; new
# tokens. Under a greedy target a draft at its own temperature underrates its likely paths; DySpec
# paper fixes 0.6.
TABLES = {
    "002": (dynatree, 64, {0.0: 0.5}, 10, 96),
    "003": (salf, 60, {0.0: 0.5, 1.0: 1.0}, 6, 48),
    "004": (dyspec, 64, {0.0: 0.6, 0.6: 0.6}, 10, 48),
}


def rows(records: list[Record], fraction: float) -> list[list]:
    """One row a method of one setting."""
    by_method = {
        name: [r for r in records if r.method == name]
        for name in dict.fromkeys(r.method for r in records)
    }
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
            (
                f"{sum(r.tokens for r in own) / sum(r.steps + fraction * r.draft_passes for r in own):.2f}"
            ),
        ]
        for name, own in sorted(
            by_method.items(), key=lambda item: (item[0] != BASELINE, item[0] != CONTROL)
        )
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
        "--draft-share",
        type=float,
        default=0.1,
        help="a draft pass over a target pass, for the priced speedup",
    )
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    make, nodes, temperatures, prompt_count, new_tokens = TABLES[options.table]
    nodes, new_tokens = options.nodes or nodes, options.new_tokens or new_tokens
    pair = Pair(options.run / "pair")
    prompts = [
        (p.id, p.kind, p.tokens)
        for p in pair.prompts("test", options.prompts or prompt_count, "--prompts")
    ]
    sample = [p.tokens for p in pair.every_prompt() if p.split == "trace"][:12]
    found: list[list] = []
    believed: list[list] = []
    notes: list[str] = []
    with TemporaryDirectory() as folder:
        for temperature, own in temperatures.items():
            setting, drawn, clock = (
                SamplingSetting(temperature),
                SamplingSetting(own),
                ForwardClock(),
            )
            target, draft = pair.models("cpu", "float32")  # afresh: the clock wraps them
            clock.watch(target)
            clock.watch(draft, draft=True)
            drafter: Drafter = LMDrafter(draft)
            if options.drafter == "head":
                head = load_head(options.run / "draft" / "export", target)
                clock.watch(head, draft=True)
                drafter = EagleDrafter(head)

            policies = {name: (Autoregressive(), "nss") for name in PLAIN}
            policies |= make(nodes, setting, (target, draft), sample)
            methods = {
                name: watched(
                    name,
                    SpeculativeDecoder(
                        target, None if name in PLAIN else drafter, policy, VERIFIERS[rule], drawn
                    ),
                    setting,
                    new_tokens,
                    clock,
                )
                for name, (policy, rule) in policies.items()
            }
            records = Path(folder) / f"{temperature}.jsonl"
            run_benchmark(methods, prompts, setting, records, seed=0)
            if options.table == "004":
                believed.append(beliefs((target, draft), sample, setting))
            read = list(read_records(records))
            found += rows(read, options.draft_share)
            notes += doubts(read)
    command = f"python -m benchmarks.policies {options.table} --run checkpoints/{options.run.name}"
    if options.drafter != "lm":
        command += f" --drafter {options.drafter}"
    name = f"policies_{options.table}" + ("" if options.drafter == "lm" else f"_{options.drafter}")
    report(name, command, COLUMNS, found, notes)
    if believed:
        columns = [
            "setting",
            "probability of a drawn token",
            *(f"child {i} accepted" for i in range(1, 5)),
        ]
        report(f"{name}_acceptance", command, columns, believed)


if __name__ == "__main__":
    main()
