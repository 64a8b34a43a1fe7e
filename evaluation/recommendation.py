"""Settings for an engine that has no selector: the best path by batch size, the best fixed tree.

Choices are made on training roots, and their figures are of held-out ones. Nothing is decoded:
labels give a tree's tokens per step, and a latency table its price. If no tree is faster than plain
decoding, nothing is drafted. Throughput is 1 / the mean of
the seconds per token (`nde_talf.selector.objective.best_static` says why).
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nde_talf.data.engines.vllm_speculation import Method
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting
from nde_talf.evaluation.static_trees import DRAFTING, PATHS, traced_index
from nde_talf.selector.objective import mean_tokens
from nde_talf.selector.prices import LatencyTable
from nde_talf.selector.roots import PricedRoots, Roots, throughput_gain

NONE = Action(1, 0, 0)
"""No drafting."""
CHAIN_LABELS = {"standard": ("naivetree", "specinfer"), "block": ("traversal", "gbv")}
"""By vLLM's name of a rule on paths, the rules that equal it there: Naive or block verification."""


@dataclass(frozen=True)
class Choice:
    """A tree and its figures on held-out roots.

    Attributes:
        tree: NONE for plain decoding.
        block_efficiency: tokens per step.
        tokens_per_second: of all sequences of the batch together, [value, low, high].
        plain: tokens per second of plain decoding.
        speedup: over plain decoding, [value, low, high].
    """

    tree: Action
    block_efficiency: float
    tokens_per_second: list[float]
    plain: float
    speedup: list[float]


def one_traffic(roots: Roots, names: Sequence[str]) -> Roots:
    """Merge the roots of some traced sampling settings, for a mixture of requests."""
    traced = [traced_index(roots.settings, SETTINGS[name]) for name in names]
    merged = roots.where(torch.tensor([index in traced for index in roots.setting.tolist()]))
    return replace(merged, setting=torch.zeros_like(merged.setting), settings=merged.settings[:1])


def chain_labels(roots: Roots, rule: str) -> str:
    """Return the rule whose labels stand for a rule on paths. Raises UserError if untraced."""
    for name in CHAIN_LABELS[rule]:
        if name in roots.samples:
            return name
    raise UserError(
        f"rejection={rule}: the traces hold no labels of {' or '.join(CHAIN_LABELS[rule])}, which"
        " say how it does on paths. Add one to traces.verifiers and run stage=traces force=true."
    )


def seconds_per_token(roots: PricedRoots, tree: Action) -> Tensor:
    """Return seconds per token [R] of one sequence, with a tree or without drafting."""
    if tree == NONE:
        return roots.costs.table.plain(roots.roots.context).float()
    return roots.pace(torch.full((len(roots),), TREES.index(tree)))


def fastest_tree(training: PricedRoots, allowed: Tensor) -> Action:
    """Find the best tree among `allowed` [233]; NONE if plain decoding is faster."""
    best = TREES[int(training.static(allowed)[0])]
    return min(best, NONE, key=lambda tree: float(seconds_per_token(training, tree).mean()))


def held_out(roots: PricedRoots, tree: Action, sequences: int = 1) -> Choice:
    """Measure a tree on held-out roots; intervals resample prompts."""
    pace, plain = (seconds_per_token(roots, choice).double() for choice in (tree, NONE))
    one, prompt = torch.ones_like(pace), roots.roots.prompt
    return Choice(
        tree,
        mean_tokens(roots.efficiency[:, TREES.index(tree)]),
        throughput_gain(pace / sequences, one, prompt),
        float(sequences / plain.mean()),
        throughput_gain(pace, plain, prompt),
    )


@dataclass(frozen=True)
class Recommendation:
    """The best drafts by labels and prices.

    Attributes:
        lengths: of the best path for a batch of 1, 2, ... sequences, up to the table's largest; 0:
            draft nothing.
        paths: the figures of these paths, for the first and last batch of every length.
        trees: the best tree of every labelled rule, for one sequence.
    """

    lengths: list[int]
    paths: dict[int, Choice]
    trees: dict[str, Choice]


def recommend(training: Roots, others: Roots, table: LatencyTable, rule: str) -> Recommendation:
    """Choose on training roots, and report on other ones. rule: of CHAIN_LABELS."""
    lengths = lengths_by_batch(training, table, rule)
    labels, paths, trees = chain_labels(training, rule), {}, {}
    for count in sorted({end for first, last, _ in ranges(lengths) for end in (first, last)}):
        roots = PricedRoots.of(others, labels, table.batched(count))
        paths[count] = held_out(roots, Action(1, 0, lengths[count - 1]), count)
    for name in training.samples:
        tree = fastest_tree(PricedRoots.of(training, name, table), DRAFTING)
        trees[name] = held_out(PricedRoots.of(others, name, table), tree)
    return Recommendation(lengths, paths, trees)


def lengths_by_batch(training: Roots, table: LatencyTable, rule: str) -> list[int]:
    """Find the lengths of a `Recommendation`."""
    counts = range(1, max(table.sequences, default=1) + 1)
    labels = chain_labels(training, rule)
    priced = (PricedRoots.of(training, labels, table.batched(count)) for count in counts)
    return [fastest_tree(roots, PATHS).depth for roots in priced]


def ranges(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Merge equal neighbours into ranges of batch sizes.

    Example: [5, 5, 3] -> [(1, 2, 5), (3, 3, 3)].
    """
    merged: list[tuple[int, int, int]] = []
    for size, length in enumerate(lengths, 1):
        start = merged.pop()[0] if merged and merged[-1][2] == length else size
        merged.append((start, size, length))
    return merged


def vllm_config(
    method: Method, lengths: Sequence[int], rule: str, settings: Sequence[SamplingSetting]
) -> Method | None:
    """Return vLLM's speculative_config with a schedule by batch size; None: do not speculate.

    Labels are for tokens drawn from the draft. So the draft must sample if the target does: vLLM's
    default picks the most probable token. Beyond the last range vLLM keeps its length.
    """
    if not any(lengths):
        return None
    config = {**method, "num_speculative_tokens": max(lengths)}
    if len(set(lengths)) > 1:
        config["num_speculative_tokens_per_batch_size"] = [list(item) for item in ranges(lengths)]
    if any(setting.temperature for setting in settings):
        config["draft_sample_method"] = "probabilistic"
        if rule == "block":
            config["rejection_sample_method"] = "block"
    return config


def sglang_options(
    method: Method, lengths: Sequence[int], rule: str, settings: Sequence[SamplingSetting]
) -> list[str]:
    """Return SGLang's options for the longest path of all batch sizes; none: do not speculate."""
    longest = max(lengths)
    if not longest:
        return []
    head = method["method"] != "draft_model"
    options = [
        f"--speculative-algorithm {method['method'].upper() if head else 'STANDALONE'}",
        f"--speculative-draft-model-path {shlex.quote(str(method['model']))}",
        "--speculative-eagle-topk 1",
        f"--speculative-num-steps {longest}",
        f"--speculative-num-draft-tokens {longest + 1}",
    ]
    if head and any(setting.temperature for setting in settings):
        kind = "block-verification" if rule == "block" else "rejection-sampling"
        options.append(f"--speculative-use-{kind}")
    return options
