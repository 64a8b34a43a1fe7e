"""What can be won on a pair: how far the target is ahead of its draft, and how much the best tree
of every root would gain.

`python -m benchmarks.pairs [--run checkpoints/default ...]`, after stages pair and latency of every
run. Two tables:

- pairs: the losses on held-out text by domain; how often the greedy tokens agree; the CPU time of a
  target pass over that of a draft pass; the overlap sum_v min(p(v), q(v)) along paths drawn from
  the draft, by depth (Figure 1 of the NDE paper has the L1 distance, twice 1 - overlap).
- pairs_ceiling: the best static tree, and the hindsight ceiling: tokens/s of the best tree of each
  root over those of the best static tree. A root's tree is chosen on one half of its super-trees
  and valued on the other half, and the other way round. So label noise is no gain: the figure errs
  towards less. The static tree is the best one on the labels it is valued on, which errs the same
  way. No selector is trained for it, and no method is timed.

All roots are on the target's own texts after the prompts that the run traces; the prompts of the
evaluation are not touched.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.timing import report
from nde_talf.data.text.pair import Pair
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.label_chunks import chunk_rows, labels
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.data.traces.super_trees import Prefix
from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.bootstrap import ratio_of_totals, shown, sums_by_prompt
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.super_tree import super_tree_layout
from nde_talf.evaluation.solver_acceptance import trajectory_trees
from nde_talf.pipelines.config import MEASURED, table_file
from nde_talf.pipelines.manifest import read_manifest
from nde_talf.selector.latency import LatencyTable, StepCosts
from nde_talf.selector.objective import best_static, mean_step, split_half_choice, taken

STRIDE, DEPTHS, ALL = 16, 8, "all"


@dataclass
class Measured:
    """R roots of a pair under one sampling setting.

    Attributes:
        kind: domain of each root's prompt.
        prompt: [R], which prompt a root belongs to.
        context: [R], committed tokens.
        overlap: [R, DEPTHS], by depth, means over the super-trees.
        samples: by verifier, [R, s, 233], the labels from each of s super-trees.
    """

    kind: list[str]
    prompt: Tensor
    context: Tensor
    overlap: Tensor
    samples: dict[str, Tensor]

    def of(self, kind: str) -> Tensor:
        """[R] bool: the roots of a domain, or all."""
        return torch.tensor([kind in (ALL, own) for own in self.kind])


@torch.inference_mode()
def measured(
    target: CausalModel,
    draft: CausalModel,
    prompts: list[Prompt],
    name: str,
    verifiers: list[str],
    samples: int,
    new_tokens: int,
) -> Measured:
    """Labels and overlap at the roots after `prompts` under the sampling setting `name`."""
    setting, layout, parts = SETTINGS[name], super_tree_layout(), []
    chunk = chunk_rows(target.vocab_size, 0, layout)
    for number, prompt in enumerate(prompts):
        found = trajectory_trees(
            target,
            draft,
            [prompt.tokens],
            setting,
            setting,
            layout,
            samples,
            STRIDE,
            new_tokens,
            seed=number,
        )
        for trees in found:
            own = labels(trees, target, draft, [(setting, setting)], verifiers, layout, chunk)[0]
            trunk = type(trees)(trees.tokens, trees.h_p[:, :DEPTHS], trees.h_q[:, :DEPTHS])
            overlap = torch.minimum(*trunk.distributions(target, draft, setting, setting)).sum(-1)
            roots = len(overlap) // samples
            context = len(prompt.tokens) + 1 + STRIDE * torch.arange(roots)
            by_root = {verifier: each.view(roots, samples, -1) for verifier, each in own.items()}
            parts.append(
                (number, prompt.kind, context, overlap.view(roots, samples, -1).mean(1), by_root)
            )
    return Measured(
        [kind for _, kind, context, *_ in parts for _ in context],
        torch.cat([torch.full_like(context, number) for number, _, context, *_ in parts]),
        torch.cat([context for _, _, context, *_ in parts]),
        torch.cat([overlap for *_, overlap, _ in parts]),
        {verifier: torch.cat([own[verifier] for *_, own in parts]) for verifier in verifiers},
    )


@torch.inference_mode()
def cost_ratio(target: CausalModel, draft: CausalModel, tokens: Tensor, passes: int = 60) -> float:
    """CPU time of a one-token pass of the target after `tokens` [L], over that of the draft:
    medians of interleaved passes.
    """
    prefixes, seconds = (Prefix(target, tokens), Prefix(draft, tokens)), ([], [])
    for number in range(passes):
        for prefix, own in zip(prefixes, seconds, strict=True):
            started = time.process_time()
            position = torch.tensor([[len(tokens) + number]])
            prefix.model.logits(
                prefix.model.hidden(tokens[None, -1:], position, None, prefix.cache)
            )
            own.append(time.process_time() - started)
    return statistics.median(seconds[0]) / statistics.median(seconds[1])


def ceiling(samples: Tensor, seconds: Tensor, prompt: Tensor, kind: Sequence[str]) -> dict:
    """What choosing could win over the best static tree.

    Args:
        samples: [R, s, C], labels by super-tree.
        seconds: [R, C], of a step with every tree.
        prompt: [R], which prompt a root belongs to.
        kind: [R], its domain.

    Returns:
        `static`, the index of the best static tree; `block_efficiency`, its tokens a step; and two
        ratios of tokens/s to it, each [value, low, high]: `by_domain`, the best static tree of
        every domain, and `ceiling`, the best tree of every root.
    """
    efficiency = samples.mean(1)
    static = best_static(efficiency, seconds)
    by_domain = torch.empty(len(efficiency), dtype=torch.long)
    for name in set(kind):
        here = torch.tensor([each == name for each in kind])
        by_domain[here] = best_static(efficiency[here], seconds[here])
    base = seconds[:, static] / efficiency[:, static]

    def ratio(pace: Tensor) -> list[float]:
        columns = torch.stack(
            [torch.ones_like(pace), pace, torch.ones_like(base), base], -1
        ).double()
        return ratio_of_totals(sums_by_prompt(columns.numpy(), prompt.numpy()))

    tokens, times = split_half_choice(samples, seconds)
    return {
        "static": static,
        "block_efficiency": mean_step(efficiency[:, static], seconds[:, static])[0],
        "by_domain": ratio(taken(seconds, by_domain) / taken(efficiency, by_domain)),
        "ceiling": ratio((times / tokens).view(2, -1).mean(0)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, nargs="+", default=[Path("checkpoints/default")])
    parser.add_argument("--prompts", type=int, default=30, help="traced prompts of each pair")
    parser.add_argument(
        "--new-tokens", type=int, default=64, help="tokens of the target after each prompt"
    )
    parser.add_argument(
        "--samples", type=int, default=8, help="super-trees at each root, an even number"
    )
    parser.add_argument("--settings", nargs="+", default=["t0.6", "t1.0"], choices=SETTINGS)
    parser.add_argument("--verifiers", nargs="+", default=["traversal", "specinfer"])
    parser.add_argument("--tables", nargs="+", default=[MEASURED, "a100_70b_8b", "h100_27b_270m"])
    options = parser.parse_args(arguments)
    if options.samples < 2 or options.samples % 2:
        raise UserError(
            f"--samples {options.samples}: one half chooses and the other half values, so it is an"
            " even number."
        )
    torch.set_num_threads(1)
    figures, ceilings = [], []
    for run in options.run:
        metrics = read_manifest(run / "pair")["metrics"]
        pair = Pair(run / "pair")
        target, draft = pair.models("cpu", "float32")
        ratio = cost_ratio(target, draft, pair.rows("held_out")[0])
        prompts = pair.prompts("trace", options.prompts, "--prompts")
        tables = {
            name: LatencyTable.load(table_file(name, run / "latency")) for name in options.tables
        }
        for name in options.settings:
            found = measured(
                target, draft, prompts, name, options.verifiers, options.samples, options.new_tokens
            )
            for kind in (ALL, *sorted(set(found.kind) | set(metrics.get("domains", {})))):
                text = metrics if kind == ALL else metrics.get("domains", {}).get(kind, {})
                losses = [
                    f"{text[key]:.3f}" if key in text else "–"
                    for key in ("target_nats", "draft_nats", "greedy_agreement")
                ]
                here = found.of(kind)
                overlap = (
                    [f"{x:.3f}" for x in found.overlap[here].mean(0).tolist()]
                    if here.any()
                    else ["–"] * DEPTHS
                )
                cost = f"{ratio:.1f}" if kind == ALL else ""
                figures.append(
                    [
                        run.name,
                        SETTINGS[name].temperature,
                        kind,
                        *losses,
                        cost,
                        int(here.sum()),
                        *overlap,
                    ]
                )
            for verifier in options.verifiers:
                for title, table in tables.items():
                    costs = StepCosts(table, [verifier], int(found.context.max()))
                    own = ceiling(
                        found.samples[verifier],
                        costs.at(found.context)[0],
                        found.prompt,
                        found.kind,
                    )
                    tree = tuple(TREES[own["static"]])
                    ratios = [shown(own[key], 3) for key in ("by_domain", "ceiling")]
                    efficiency = f"{own['block_efficiency']:.2f}"
                    ceilings.append(
                        [
                            run.name,
                            SETTINGS[name].temperature,
                            verifier,
                            title,
                            str(tree),
                            efficiency,
                            *ratios,
                        ]
                    )
    command = " ".join(["python -m benchmarks.pairs --run", *map(str, options.run)])
    report(
        "pairs",
        command,
        [
            "pair",
            "T",
            "domain",
            "target nats",
            "draft nats",
            "greedy agreement",
            "cost ratio",
            "roots",
        ]
        + [f"overlap at {d}" for d in range(DEPTHS)],
        figures,
    )
    report(
        "pairs_ceiling",
        command,
        [
            "pair",
            "T",
            "verifier",
            "prices",
            "best static tree",
            "its tokens a step",
            "static by domain",
            "ceiling",
        ],
        ceilings,
        [
            f"{options.prompts} prompts, {options.samples} super-trees a root. Ratios of tokens/s"
            " to the best static tree."
        ],
    )


if __name__ == "__main__":
    main()
