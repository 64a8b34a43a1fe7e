"""Settings for an engine that has no selector: the best path.

Choices are made on training roots, and their figures are of held-out ones. Nothing is decoded:
labels give a path's tokens per step, and a latency table its price for one sequence. If no path is
faster than plain decoding, nothing is drafted. Throughput is 1 / the mean of the seconds per token
(`nde_talf.selector.objective.best_static` says why).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nde_talf.data.engines.vllm_speculation import Method
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting
from nde_talf.evaluation.static_trees import PATHS, traced_index
from nde_talf.selector.objective import mean_tokens
from nde_talf.selector.prices import LatencyTable
from nde_talf.selector.roots import PricedRoots, Roots, throughput_gain

NONE = Action(1, 0, 0)
"""No drafting."""
CHAIN_LABELS = "naivetree", "specinfer"
"""Rules that equal Naive on paths, an engine's own verification."""


@dataclass(frozen=True)
class Choice:
    """A path and its figures on held-out roots.

    Attributes:
        tree: the path; NONE for plain decoding.
        block_efficiency: tokens per step.
        tokens_per_second: [value, low, high].
        speedup: over plain decoding, [value, low, high].
    """

    tree: Action
    block_efficiency: float
    tokens_per_second: list[float]
    speedup: list[float]


def one_traffic(roots: Roots, names: Sequence[str]) -> Roots:
    """Merge the roots of some traced sampling settings, for a mixture of requests."""
    traced = [traced_index(roots.settings, SETTINGS[name]) for name in names]
    merged = roots.where(torch.tensor([index in traced for index in roots.setting.tolist()]))
    return replace(merged, setting=torch.zeros_like(merged.setting), settings=merged.settings[:1])


def chain_labels(roots: Roots) -> str:
    """Return the rule whose labels stand for paths. Raises UserError if untraced."""
    for name in CHAIN_LABELS:
        if name in roots.samples:
            return name
    raise UserError(
        f"the traces hold no labels of {' or '.join(CHAIN_LABELS)}, which say how engines verify"
        " paths. Add one to traces.verifiers and run stage=traces force=true."
    )


def seconds_per_token(roots: PricedRoots, tree: Action) -> Tensor:
    """Return seconds per token [R] of one sequence, with a tree or without drafting."""
    if tree == NONE:
        return roots.costs.table.plain(roots.roots.context).float()
    return roots.pace(torch.full((len(roots),), TREES.index(tree)))


def held_out(roots: PricedRoots, tree: Action) -> Choice:
    """Measure a tree on held-out roots; intervals resample prompts."""
    pace, plain = (seconds_per_token(roots, choice).double() for choice in (tree, NONE))
    one, prompt = torch.ones_like(pace), roots.roots.prompt
    return Choice(
        tree,
        mean_tokens(roots.efficiency[:, TREES.index(tree)]),
        throughput_gain(pace, one, prompt),
        throughput_gain(pace, plain, prompt),
    )


def recommend(training: Roots, others: Roots, table: LatencyTable) -> Choice:
    """Choose the best path, or NONE, on training roots and measure it on others."""
    labels = chain_labels(training)
    priced, unseen = (PricedRoots.of(roots, labels, table) for roots in (training, others))
    path = TREES[int(priced.static(PATHS)[0])]
    best = min(path, NONE, key=lambda tree: float(seconds_per_token(priced, tree).mean()))
    return held_out(unseen, best)


def vllm_config(method: Method, length: int, settings: Sequence[SamplingSetting]) -> Method | None:
    """Return vLLM's speculative_config for paths of `length` tokens; None: do not speculate.

    Labels are for tokens drawn from the draft. So the draft must sample if the target does: vLLM's
    default picks the most probable token.
    """
    if not length:
        return None
    config = {**method, "num_speculative_tokens": length}
    if any(setting.temperature for setting in settings):
        config["draft_sample_method"] = "probabilistic"
    return config
