"""Differences between a pair's contexts, and what choosing trees could win.

`python -m benchmarks.contexts --run checkpoints/NAME` prints two tables from the
stages pair and latency, before any method runs:

- contexts: the entropy of the target and its overlap with the draft, sum_v min(p(v), q(v)), by
  domain and by depth along paths drawn from the draft.
- contexts_ceilings: the best static tree, and tokens/s relative to it of the best static tree of
  every domain and of the best tree of every root. A root's tree is chosen on one half of its
  super-trees and valued on the other half, and the other way round: in hindsight on the same ones
  it would be label noise.

All roots are on the target's own texts after the prompts that the run traces; the prompts of the
evaluation are not touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.timing import parser_of, report
from benchmarks.trajectories import STRIDE, trajectory_trees
from nde_talf.data.text.pair import Pair
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.data.traces.super_trees import labels
from nde_talf.data.traces.trace import NUMBERS
from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.bootstrap import ratio_of_totals, shown, sums_by_prompt
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.sampling.rng import warp
from nde_talf.decoding.super_tree import super_tree_layout
from nde_talf.pipelines.config.schema import MEASURED, table_file
from nde_talf.selector.objective import best_static, mean_tokens, taken
from nde_talf.selector.prices import LatencyTable
from nde_talf.selector.step_costs import StepCosts

DEPTHS, ALL = 8, "all"
SAMPLES = 8  # super-trees at a root: one half chooses, one values
DRAWN, RULES = ("t0.6", "t1.0"), ["traversal", "specinfer"]


@dataclass
class Roots:
    """R roots of a pair under one sampling setting.

    Attributes:
        kind: domain of each root's prompt.
        prompt: [R], which prompt a root belongs to.
        context: [R], committed tokens.
        entropy: [R, DEPTHS], of the target, in nats.
        overlap: [R, DEPTHS].
        samples: by verifier, [R, s, actions], the labels from each of s super-trees.
    """

    kind: list[str]
    prompt: Tensor
    context: Tensor
    entropy: Tensor
    overlap: Tensor
    samples: dict[str, Tensor]

    def of(self, kind: str) -> Tensor:
        """Return which roots are of a domain, or all: [R] bool."""
        return torch.tensor([kind in (ALL, each) for each in self.kind])


@torch.inference_mode()
def drawn(target: CausalModel, draft: CausalModel, prompts: list[Prompt]) -> dict[str, Roots]:
    """Return the roots after `prompts` under each sampling setting."""
    layout = super_tree_layout()
    chunk, found = NUMBERS // target.vocab_size, {}
    for name in DRAWN:
        setting, parts = SETTINGS[name], []
        for number, prompt in enumerate(prompts):
            drawing = setting, setting, layout, SAMPLES, number
            for trees in trajectory_trees(target, draft, [prompt.tokens], *drawing):
                label = labels(trees, target, draft, setting, RULES, layout, chunk)
                p = warp(target.logits(trees.h_p[:, :DEPTHS]), setting)
                q = warp(draft.logits(trees.h_q[:, :DEPTHS]), setting)
                figures = torch.special.entr(p).sum(-1), torch.minimum(p, q).sum(-1)
                roots = len(p) // SAMPLES
                shape = roots, SAMPLES, -1
                means = [figure.view(shape).mean(1) for figure in figures]
                context = len(prompt.tokens) + 1 + STRIDE * torch.arange(roots)
                by_root = [label[verifier].view(shape) for verifier in RULES]
                at = torch.full_like(context, number)
                parts.append(([prompt.kind] * roots, at, context, *means, *by_root))
        kinds, *columns = zip(*parts, strict=True)
        prompt, context, entropy, overlap, *samples = map(torch.cat, columns)
        by_verifier = dict(zip(RULES, samples, strict=True))
        found[name] = Roots(
            [kind for own in kinds for kind in own], prompt, context, entropy, overlap, by_verifier
        )
    return found


def split_half_choice(samples: Tensor, seconds: Tensor) -> tuple[Tensor, Tensor]:
    """Choose root by root on one half of the super-trees, score on the other, and vice versa.

    A bound on the gain of choosing: on the same samples label noise would count as gain.

    Args:
        samples: [R, s, C], estimates of E[tau + 1].
        seconds: [R, C].

    Returns:
        tokens [2 R] and seconds [2 R] of the choices.
    """
    half = samples.shape[1] // 2
    first, second = samples[:, :half].mean(1), samples[:, half:].mean(1)
    chosen = [(half_labels / seconds).argmax(-1) for half_labels in (first, second)]
    tokens = [taken(other, action) for other, action in zip((second, first), chosen, strict=True)]
    return torch.cat(tokens), torch.cat([taken(seconds, action) for action in chosen])


def ceiling(samples: Tensor, seconds: Tensor, roots: Roots) -> dict:
    """Compute what choosing could win over the best static tree.

    Args:
        samples: [R, s, C], labels by super-tree.
        seconds: [R, C], of a step with every tree.
        roots: whose prompts are resampled.

    Returns:
        `static`, the index of the best static tree; `block_efficiency`, its tokens a step; and two
        ratios of tokens/s to it, each [value, low, high]: `by_domain` and `by_root`.
    """
    efficiency = samples.mean(1)
    static = best_static(efficiency, seconds)
    by_domain = torch.empty(len(efficiency), dtype=torch.long)
    for name in set(roots.kind):
        here = roots.of(name)
        by_domain[here] = best_static(efficiency[here], seconds[here])
    base = seconds[:, static] / efficiency[:, static]

    def ratio(pace: Tensor) -> list[float]:
        one = torch.ones_like(base)
        columns = torch.stack([one, pace, one, base], -1).double()
        return ratio_of_totals(sums_by_prompt(columns.numpy(), roots.prompt.numpy()))

    tokens, times = split_half_choice(samples, seconds)
    return {
        "static": static,
        "block_efficiency": mean_tokens(efficiency[:, static]),
        "by_domain": ratio(taken(seconds, by_domain) / taken(efficiency, by_domain)),
        "by_root": ratio((times / tokens).view(2, -1).mean(0)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--prompts", type=int, default=40, help="traced prompts")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    pair = Pair(options.run / "pair")
    found = drawn(
        *pair.models("cpu", "float32"),
        pair.prompts("trace", options.prompts, "--prompts"),
    )
    table = LatencyTable.load(table_file(MEASURED, options.run / "latency"))
    figures, ceilings = [], []
    for name, roots in found.items():
        temperature = SETTINGS[name].temperature
        for kind in (ALL, *sorted(set(roots.kind))):
            here = roots.of(kind)
            for title, values in (("entropy", roots.entropy), ("overlap", roots.overlap)):
                own = values[here]
                cells = [f"{x:.2f}" for x in own.mean(0).tolist()]
                spread = f"{own[:, 0].std():.2f}"
                figures.append([temperature, kind, int(here.sum()), title, *cells, spread])
        for verifier, samples in roots.samples.items():
            costs = StepCosts(table, verifier, int(roots.context.max()))
            own = ceiling(samples, costs.at(roots.context), roots)
            ratios = [shown(own[key], 3) for key in ("by_domain", "by_root")]
            tree, tokens = str(tuple(TREES[own["static"]])), f"{own['block_efficiency']:.2f}"
            ceilings.append([temperature, verifier, tree, tokens, *ratios])
    depths = [f"depth {depth}" for depth in range(DEPTHS)]
    columns = ["temperature", "domain", "roots", "figure", *depths, "std. at depth 0"]
    report("contexts", columns, figures)
    columns = ["temperature", "verifier", "best static tree", "tokens a step"]
    columns += ["best static tree by domain", "best tree by root (split halves)"]
    report("contexts_ceilings", columns, ceilings)


if __name__ == "__main__":
    main()
