"""“DySpec”: Tables 1 to 5.

    python -m benchmarks.papers.dyspec --run checkpoints/default

“DySpec” is the threshold variant, which the paper runs. Sequoia's acceptance rates and the
threshold are measured beforehand, on prompts that no table uses.
"""

import argparse
from collections.abc import Sequence
from copy import copy
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.papers.shared import LENGTH, MS, SPEED, Bench, options_of, table
from benchmarks.trajectories import draft_paths
from nde_talf.decoding.actions import Action
from nde_talf.decoding.drafters.lm import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.models.tree_session import TreeSession
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.policies.dyspec import DySpec, DySpecThreshold
from nde_talf.decoding.policies.fixed import Shaped, sequoia_shape
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling.device_rng import inverse_cdf
from nde_talf.decoding.sampling.rng import Rng, SamplingSetting

DRAWN = SamplingSetting(0.6)
RULE = "without_replacement"
BLOCK = 32


def positional_rates(
    p: Tensor, q: Tensor, children: int, generator: torch.Generator
) -> list[float]:
    """Return the chances that each child is accepted, a mean over the rows of p, q [R, V].

    One draw of the children a row, by the without-replacement rule.
    """
    p, q = p.double(), q.double()
    reach, rates = torch.ones(len(p), dtype=torch.float64, device=p.device), []
    for _ in range(children):
        live = q.sum(-1) > 0
        q = torch.where(live[:, None], q / q.sum(-1, keepdim=True).clamp(min=1e-300), q)
        token = inverse_cdf(q, torch.rand(len(q), 1, generator=generator, dtype=torch.float64))
        chance = (p.gather(-1, token) / q.gather(-1, token).clamp(min=1e-300)).clamp(max=1)[
            :, 0
        ] * live
        rates.append(float((reach * chance).mean()))
        reach = reach * (1 - chance)
        p = (p - q).clamp(min=0)
        p = p / p.sum(-1, keepdim=True).clamp(min=1e-300)
        q = q.scatter(-1, token, 0.0)
    return rates


def methods(bench: Bench, budget: int, setting: SamplingSetting) -> dict[str, tuple]:
    """The paper's methods with one budget of drafted tokens."""
    side = round(budget**0.5)
    shape = sequoia_shape(acceptance_rates(bench, setting), budget, 12)
    return {
        "DySpec": (DySpecThreshold(threshold(bench, budget), budget), RULE),
        "DySpec, heap": (DySpec(budget), RULE),
        "Sequoia": (Shaped(shape, RULE), RULE),
        "SpecInfer": (Delayed(Action(side, 0, side)), "specinfer"),
    }


def acceptance_rates(bench: Bench, setting: SamplingSetting) -> list[float]:
    """Sequoia's positional acceptance rates, of up to 16 children, along the draft's paths."""
    rows = draft_paths(*bench.models, bench.tuning, setting, DRAWN, 8)
    p, q = (each.flatten(0, 1) for each in rows)
    return positional_rates(p, q, 16, torch.Generator().manual_seed(0))


def threshold(bench: Bench, budget: int) -> float:
    """Take the median of the lowest value at which the heap draws with this budget.

    With a lower one the threshold variant would spend the budget before it gets deep.
    """
    (target, draft), policy, lowest = bench.models, DySpec(budget), []
    decoder = SpeculativeDecoder(target, LMDrafter(draft), policy, VERIFIERS[RULE], DRAWN)
    for prompt in bench.tuning[:4]:
        for _ in islice(decoder.stream(prompt, DRAWN, Rng.seeded(0)), 1, 3):
            lowest.append(policy.lowest)
    return median(lowest)


def depth_first(parents: Sequence[int]) -> list[int]:
    """Nodes of a tree (parents[n] < n, -1 for the root) in depth-first order."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += reversed(children[node])
    return order


def reordered(parents: Sequence[int], order: Sequence[int]) -> list[int]:
    """The parents once node order[i] is called i."""
    place = {node: index for index, node in enumerate(order)}
    return [place[parents[node]] if parents[node] >= 0 else -1 for node in order]


def nonzero_blocks(parents: Sequence[int], block: int) -> int:
    """Count the block x block tiles of a tree's mask [N, N] that hold an entry.

    Row n sees its ancestors and itself. A kernel that works block by block skips the others.
    """
    columns: list[set[int]] = []  # tiles that each node sees
    tiles: set[tuple[int, int]] = set()
    for node, parent in enumerate(parents):
        columns.append({node // block} | (columns[parent] if parent >= 0 else set()))
        tiles |= {(node // block, tile) for tile in columns[node]}
    return len(tiles)


class InBlocks:
    """A target session that runs a tree's rows in depth-first order and counts the mask's blocks.

    Hidden states come back in the tree's order, so that the decode loop notices nothing.
    """

    def __init__(self, session: TreeSession, reorder: bool, blocks: list[int]):
        self.session, self.reorder, self.blocks = session, reorder, blocks

    def grow(self, tokens: list[int], parents: list[int]) -> Tensor:
        """See `TreeSession`."""
        order = depth_first(parents) if self.reorder else [*range(len(parents))]
        parents = reordered(parents, order)
        self.blocks.append(nonzero_blocks(parents, BLOCK))
        self.place = {node: row for row, node in enumerate(order)}
        states = self.session.grow([tokens[node] for node in order], parents)
        return states[[self.place[node] for node in range(len(order))]]

    def commit(self, nodes: list[int]) -> None:
        """See `TreeSession`."""
        self.session.commit([self.place[node] for node in nodes])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


def decoded_in_blocks(bench: Bench, policy: TreePolicy) -> str:
    """Decode every tenth prompt in both orders: mean blocks a pass, and how many texts agree."""
    target, texts, counts = bench.models[0], [], []
    for reorder in (False, True):
        own, blocks = copy(target), list[int]()
        own.session = lambda *a, reorder=reorder, blocks=blocks: InBlocks(
            target.session(*a), reorder, blocks
        )
        decoder = SpeculativeDecoder(own, LMDrafter(bench.models[1]), policy, RULE, DRAWN)
        texts.append(
            [
                decoder.generate(
                    p.tokens, bench.options.new_tokens, DRAWN, Rng.seeded(0), target.ends
                ).tokens
                for p in bench.prompts[::10]
            ]
        )
        counts.append(f"{np.mean(blocks):.1f}")
    same = sum(one == other for one, other in zip(*texts, strict=True))
    return f"{counts[0]} as grown, {counts[1]} depth first; {same} of {len(texts[0])} texts agree"


def random_trees(nodes: int, count: int) -> list[list[int]]:
    """Draw parents of random trees: any of the nodes before, all equally likely."""
    generator = torch.Generator().manual_seed(nodes)
    drawn = (torch.rand(count, nodes, generator=generator) * torch.arange(nodes)).int()
    return [[-1, *row[1:]] for row in drawn.tolist()]


def mean_blocks(nodes: int, order: str) -> str:
    """Mean number of non-zero blocks of ten random trees."""
    counts = [
        nonzero_blocks(reordered(p, depth_first(p)) if order == "depth first" else p, BLOCK)
        for p in random_trees(nodes, 10)
    ]
    return f"{np.mean(counts):.1f}"


def report(options: argparse.Namespace) -> None:
    """Print the tables."""
    bench = Bench(options)
    for budget in options.budgets:
        for temperature in (0.0, 0.6):
            setting = SamplingSetting(temperature)
            made = methods(bench, budget, setting)
            decoded = bench.decode(f"dyspec-{budget}-t{temperature:g}", setting, made, DRAWN)
            for measure in (MS, LENGTH, SPEED):
                title = f"Tables 1 to 4: {measure}, at most {budget} drafted tokens, {setting}"
                cell = partial(decoded.figure, measure)
                table(title, "Method", made, bench.kinds, cell)
    table(
        f"Table 5: non-zero blocks of {BLOCK} x {BLOCK} of the mask of random trees",
        "Nodes",
        ["256", "512", "1024", "2048"],
        ["as grown", "depth first"],
        lambda nodes, order: mean_blocks(int(nodes), order),
    )


def main() -> None:
    """Read the command line."""
    parser = options_of(__doc__, 128)
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 768])
    report(parser.parse_args())


if __name__ == "__main__":
    main()
