"""Roots whose best trees are known, and a latency table for them: what tests of the selector choose
between.
"""

import torch

from nde_talf import LatencyTable
from nde_talf.decoding.actions import TREES
from nde_talf.selector.roots import ROOT_SCALARS, PricedRoots, Roots
from nde_talf.selector.schema import SelectorSchema
from nde_talf.selector.selector_settings import SelectorConfig

TABLE = LatencyTable([1, 100], [1, 2], [1, 4], [[1.0, 1.0]] * 2, [[0.1, 0.1]] * 2)
ENTROPY = ROOT_SCALARS.index("entropy_q_root")
DEPTH = torch.tensor([tree.depth for tree in TREES])


def roots(count: int, seed: int, alike: bool = False, samples: int = 4) -> Roots:
    """Contexts of two sorts, which differ in the sign of one hidden unit and in kind: drafts are
    all accepted, or none is; or all `alike`, with half of every draft accepted.

    GBV accepts more tokens than SpecInfer where the second unit is positive, and fewer elsewhere.
    """
    generator = torch.Generator().manual_seed(seed)
    states = [torch.randn(count, size, generator=generator) for size in (6, 4, 4)]
    good, other = states[2][:, 0] > 0, torch.where(states[2][:, 1] > 0, 3.0, -0.8)
    efficiency = (
        (1.0 + DEPTH / 2).expand(count, -1)
        if alike
        else torch.where(good[:, None], 1.0 + DEPTH, 1.0)
    )
    noise = 0.3 * torch.randn(count, samples, len(TREES), generator=generator)
    scalars = torch.randn(count, len(ROOT_SCALARS), generator=generator)
    scalars[:, ENTROPY] = torch.where(good, 0.1, 2.0) + 0.1 * scalars[:, ENTROPY]
    labels = (efficiency[:, None] + noise).clamp(min=1.0)  # a step commits one token at least
    return Roots(
        *states,
        scalars=scalars,
        context=torch.full((count,), 50),
        setting=torch.zeros(count, dtype=torch.long),
        prompt=torch.arange(count) // 4,
        samples={"specinfer": labels, "gbv": (labels + other[:, None, None]).clamp(min=1.0)},
        settings=[(1.0, 1.0)],
        kind=["good" if g else "bad" for g in good],
    )


def priced(count: int, seed: int, **options) -> PricedRoots:
    return PricedRoots.of(roots(count, seed, **options), "specinfer", TABLE)


def schema(target: int, draft: int, verifier: str = "specinfer", learned: bool = True, **options):
    return SelectorSchema(target, draft, (verifier,), ((1.0, 1.0),), (learned,), **options)


CONFIG = SelectorConfig(epochs=40, lr=1e-3, width=128, hidden=[512, 32])
