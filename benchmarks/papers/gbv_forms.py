"""GBV and Traversal as their papers print them, and as the GBV authors' code has them.

    python -m benchmarks.papers.gbv_forms

The authors' Traversal takes a rejected token out of q, and does not visit a repeated draw; ours
keeps q, and counts the repeat. Their GBV ranks by min(1, p / q): of equally ranked children it
selects the one drawn first, where its law of the selected branch says the one of larger id.

On trees that the shipped pair drafts at temperature 1, the table has the mean over roots of
E[tau + 1 | tree] of each form, and how far (total variation) the law of the authors' GBV is from
the target's after one token.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.timing import report
from nde_talf.decoding.common.bootstrap import ratio_of_totals, shown
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.rules.gbv import power_sum
from nde_talf.decoding.sampling.rng import Rng, SamplingSetting
from nde_talf.decoding.tree import DraftTree, Verdict
from nde_talf.pipelines.config.schema import PathsConfig
from nde_talf.pipelines.runs.decoder import open_run
from nde_talf.pipelines.runs.finished import Run
from nde_talf.pipelines.runs.run_models import pair_of

FORMS = "GBV", "GBV, theirs", "Traversal", "Traversal, theirs"


def rows(tree: DraftTree, node: int) -> tuple[Tensor, Tensor]:
    """Distributions p and q [V] at a node, in float64."""
    return tree.p[node].double(), tree.q_at(node).double()


def traversal(tree: DraftTree, theirs: bool, node: int = 0, w0: float = 1.0) -> tuple[float, float]:
    """The chance that something below `node` or it is accepted, and the expected depth of that."""
    children, depth = tree.children[node], tree.depth[node]
    if not children:
        return w0, w0 * depth
    p, q = rows(tree, node)
    c, d, left, rest, expected = 0.0, 1.0, 1.0, 1.0, 0.0
    for at, child in enumerate(children):
        x, again = tree.tokens[child], child in children[:at]
        if again and theirs:
            continue
        qx = float(q[x]) / left
        if not again and (weight := min(1.0, max(w0 * float(p[x]) - c * float(q[x]), 0) / d / qx)):
            accepted, below = traversal(tree, theirs, child, weight)
            expected, rest = expected + rest * below, rest * (1 - accepted)
        c += d / left
        left -= float(q[x]) if theirs else 0.0
        z = float((w0 * p - c * q).clamp(min=0).sum())
        d = z + (1 - w0)
        if z <= 0:
            return 1 - rest, expected
        if left <= 0:
            break
    return 1 - rest * (1 - z / d), expected + rest * z / d * depth


def tilted(p: Tensor, q: Tensor, k: int, lower: float, theirs: bool) -> tuple[Tensor, ...]:
    """A node's ranks [V], law of the selected branch, and mass ranked up to each and below it."""
    score = p / (q + torch.finfo(torch.float32).eps)
    score = score.clamp(max=1) if theirs else score
    order = score.argsort(stable=True)
    upto = torch.empty_like(q)
    upto[order] = q[order].cumsum(0)
    g, f = (lower + (1 - lower) * x for x in (upto, (upto - q).clamp(min=0)))
    law = q * power_sum(g, f, k, None)
    return score, law / law.sum(), g, f


def gbv(tree: DraftTree, k: int, theirs: bool) -> float:
    """E[tau] of block verification of the branch that is selected."""
    node, lower, w, keep = 0, 0.0, 1.0, []
    while True:
        p, q = rows(tree, node) if tree.children[node] else (tree.p[node].double(), None)
        if q is None:
            keep.append(w)
            break
        score, law, g, f = tilted(p, q, k, lower, theirs)
        if keep or node:
            z = float((w * p - law).clamp(min=0).sum())
            keep.append(z / (z + 1 - w) if w < 1 else 1.0)
        children = tree.children[node]
        at = [(float(score[x := tree.tokens[child]]), 0 if theirs else x) for child in children]
        node = children[at.index(max(at))]
        x = tree.tokens[node]
        w = min(1.0, w * float(p[x] / law[x]))
        lower = float(f[x] / g[x])
    return float((1 - np.cumprod(1 - np.array(keep)[::-1])).sum())


def bias(p: Tensor, q: Tensor, k: int) -> float:
    """Total variation between the authors' GBV and p, on k branches of one token.

    Of equally ranked tokens the first drawn is selected, each with its share of their mass.
    """
    score, law, *_ = tilted(p, q, k, 0.0, True)
    _, group = score.unique(return_inverse=True)
    mass = torch.zeros_like(q).index_add(0, group, q)
    upto = mass.cumsum(0)
    selected = (
        (upto**k - (upto - mass).clamp(min=0) ** k)[group] * q / mass[group].clamp(min=1e-300)
    )
    accepted = torch.minimum(selected, selected * p / law.clamp(min=1e-300))
    rest = (p - law).clamp(min=0)
    emitted = accepted + (1 - accepted.sum()) * rest / rest.sum().clamp(min=1e-300)
    return float((emitted - p).abs().sum() / 2)


def measured(prompts: Iterable[list[int]], k: int, temperature: float, tokens: int) -> list[list]:
    """For each root its prompt, E[tau + 1] by form, and the bias."""
    found: list[list] = []
    options = {"k": k, "l1": 0, "l2": 8}
    decoder, _ = open_run(drafter="lm", policy="delayed", options=options, draft_temperature="1")
    rule = VERIFIERS["traversal"]

    def spy(tree: DraftTree, rng: Rng) -> Verdict:
        values = [gbv(tree, k, False), gbv(tree, k, True)]
        values += [traversal(tree, theirs)[1] for theirs in (False, True)]
        found.append([at, *(1 + value for value in values), bias(*rows(tree, 0), k)])
        return rule(tree, rng)

    decoder = replace(decoder, verifier=replace(rule, rule=spy))
    for at, prompt in enumerate(prompts):
        decoder.generate(prompt, tokens, SamplingSetting(temperature), Rng.seeded(at))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pair = pair_of(Run("small", PathsConfig().checkpoints))
    prompts = [p.tokens for p in pair.every_prompt() if p.split == "test"][: options.prompts]
    table = []
    for temperature in (0.2, 1.0):
        for k in (2, 4):
            found = np.array(measured(prompts, k, temperature, options.new_tokens))
            sums = [found[found[:, 0] == at].sum(0) for at in np.unique(found[:, 0])]
            over = [
                shown(ratio_of_totals(np.array([[s[1 + a], s[1 + b]] for s in sums])), 3)
                for a, b in ((0, 2), (0, 3), (1, 3), (1, 0), (3, 2))
            ]
            means = [f"{x:.3f}" for x in found[:, 1:5].mean(0)]
            biases = f"{found[:, 5].mean():.3f}, {found[:, 5].max():.3f}"
            table.append([f"{temperature:g}", k, len(found), *means, *over, biases])
            print(table[-1], flush=True)
    compared = ["GBV / Traversal", "GBV / theirs", "both theirs", "GBV: theirs / ours"]
    columns = ["T", "K", "roots", *FORMS, *compared, "Traversal: theirs / ours", "bias: mean, max"]
    report("gbv_forms", columns, table)


if __name__ == "__main__":
    main()
