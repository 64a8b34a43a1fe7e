"""What verification costs: every method's time as a ratio to one softmax over the same rows; labels likewise.

Verification is timed twice: on rows that are warped already, and as the decode loop runs it, which warps the target's rows that
a rule looks at.

`python -m benchmarks.verification [--vocabulary 32000 150000] [--repeats 15]`
"""

import argparse
from collections.abc import Iterable
from copy import copy
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.timing import Timings, interleaved, report
from decoding.actions import Action
from decoding.names import LABELLED
from decoding.policies.base import DecodingState
from decoding.policies.delayed import Delayed
from decoding.sampling import RAW, Rng, SamplingSetting, warp
from decoding.super_tree import super_tree_layout
from decoding.tree import DraftTree
from decoding.verification import VERIFIERS
from decoding.verification.gains import expected_block_efficiency

TREE = Action(4, 4, 4)
REACH = {"traversal": 3.0, "gbv": 3.0, "khisti": 10.0}
OTHERS = 1.5
LABEL_REACH = {"khisti": 10.0, "naive": "–", "bv": "–"}
SETTING = SamplingSetting(1.0)
WARPING = ", with warping"


class Ratios(NamedTuple):
    """Times of a softmax of the same rows, by either clock."""

    wall: float
    cpu: float


class Rows:
    """Logits of a made-up pair: peaked as a language model's at temperature 1 (the best token holds a third, on average), the
    draft's the target's with noise."""

    def __init__(self, vocabulary: int, seed: int):
        self.vocabulary, self.generator = vocabulary, torch.Generator().manual_seed(seed)

    def __call__(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = 2.2 * torch.randn(count, self.vocabulary, generator=self.generator)
        top = torch.randint(self.vocabulary, (count, 12), generator=self.generator)
        logits.scatter_(-1, top, 14 - 3 * torch.rand(count, 12, generator=self.generator))
        noise = torch.randn(count, self.vocabulary, generator=self.generator)
        return logits, logits + 0.6 * noise


class RowDrafter:
    """Gives every node the next rows."""

    def __init__(self, rows: Rows):
        self.rows, self.logits = rows, []
        self.root = type("Point", (), {"q": self.next()})

    def next(self) -> torch.Tensor:
        p, q = self.rows(1)
        self.logits.append(p)
        return warp(q[0], SETTING)

    def expand(self, tree: DraftTree, nodes: list[int]) -> None:
        for node in nodes:
            tree.q[node] = self.next()


def drawn_tree(rows: Rows, action: Action, rng: Rng) -> tuple[DraftTree, torch.Tensor]:
    """A delayed tree with its distributions, and the target's logits [N, V]."""
    drafter = RowDrafter(rows)
    tree = Delayed(action).draft(DecodingState(0, 1, 1 << 20, RAW, None, None), drafter, rng)
    logits = torch.cat(drafter.logits)
    logits = torch.cat([logits, rows(len(tree) - len(logits))[0]]) if len(tree) > len(logits) else logits[: len(tree)]
    tree.p = [warp(row, SETTING) for row in logits]
    return tree, logits


def verification_ratios(vocabulary: int, trees: int, repeats: int) -> tuple[dict[str, Ratios], list[str]]:
    """(Time of a method on all trees) / (time of the softmax of all their rows), of medians over rounds; and what the A/A
    controls say."""
    rows, ratios, notes = Rows(vocabulary, 0), {}, []
    branching = [name for name, rule in VERIFIERS.items() if "delayed" in rule.trees and name != "greedy"]
    for action, names in ((TREE, branching), (Action(1, 0, 8), ["naive", "bv"])):
        made = [drawn_tree(rows, action, Rng.seeded(seed)) for seed in range(trees)]
        out = [torch.empty_like(logits) for _, logits in made]
        rng = Rng.seeded(100)  # what is accepted varies from call to call, as in decoding

        def softmax(made=made, out=out) -> None:
            for (_, logits), buffer in zip(made, out, strict=True):
                torch.softmax(logits, -1, out=buffer)

        def verify(name: str, made=made, rng=rng) -> None:
            for tree, _ in made:
                VERIFIERS[name](tree, rng)

        scored = [copy(tree) for tree, _ in made]

        def verify_warping(name: str, made=made, scored=scored, rng=rng) -> None:
            for tree, (_, logits) in zip(scored, made, strict=True):
                tree.score(logits, SETTING)
                VERIFIERS[name](tree, rng)

        tasks = {"softmax": softmax, **{name: partial(verify, name) for name in names}}
        tasks |= {f"{name}{WARPING}": partial(verify_warping, name) for name in names}
        times = interleaved(tasks, repeats)
        ratios |= _over_softmax(times, [name for name in tasks if name != "softmax"])
        notes.append(times.note(f" (verification, V = {vocabulary:,}, tree {tuple(action)})"))
    return ratios, notes


def _over_softmax(times: Timings, names: Iterable[str]) -> dict[str, Ratios]:
    return {name: Ratios(*(own[name] / own["softmax"] for own in (times.seconds, times.cpu))) for name in names}


def label_ratios(vocabulary: int, repeats: int) -> tuple[dict[str, Ratios], str]:
    """All 324 actions of one super-tree: time of a method's labels over the softmax of the target's rows; and what the A/A
    control says."""
    layout, rows = super_tree_layout(), Rows(vocabulary, 1)
    logits, draft_logits = rows(layout.inner)
    # Branches that continue alike share their rows, as real ones do: the first path's row counts.
    rng, tokens = Rng.seeded(0), torch.zeros(1, len(layout), dtype=torch.long)
    p, q = warp(logits, SETTING), warp(draft_logits, SETTING)
    seen: dict[tuple[int, int], int] = {}
    for row in range(1, len(layout)):
        parent = int(layout.parents[row])
        tokens[0, row] = token = rng.categorical(q[parent])
        if row < layout.inner:
            first = seen.setdefault((parent, token), row)
            p[row], q[row] = p[first], q[first]
    out = torch.empty_like(logits)
    tasks = {"softmax": lambda: torch.softmax(logits, -1, out=out)}
    for name in LABELLED:
        tasks[name] = lambda name=name: expected_block_efficiency(p[None], q[None], tokens, name, check=False)
    times = interleaved(tasks, repeats)
    return _over_softmax(times, LABELLED), times.note(f" (labels, V = {vocabulary:,})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000, 150_000])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--trees", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, notes = {}, []
    for v in options.vocabulary:
        found[v], said = verification_ratios(v, options.trees, options.repeats)
        notes += said
    labels, said = label_ratios(options.vocabulary[0], options.repeats)
    names = [name for name in VERIFIERS if name in found[options.vocabulary[0]]]
    kinds = [(warping, clock) for warping in ("", WARPING) for clock in ("", ", CPU")]
    columns = ["method", *(f"verify{warping}, V = {v:,}{clock}" for v in found for warping, clock in kinds), "aim"]
    columns += [f"labels, V = {options.vocabulary[0]:,}{clock}" for clock in ("", ", CPU")] + ["aim"]
    rows = []
    for name in names:
        verify = [ratio for v in found for warping in ("", WARPING) for ratio in found[v][name + warping]]
        reach = REACH.get(name, OTHERS)
        rows.append([name, *verify, reach, *labels.get(name, ("–", "–")), LABEL_REACH.get(name, 2.0)])
    report("verification", "python -m benchmarks.verification", columns, rows, [*notes, said])


if __name__ == "__main__":
    main()
