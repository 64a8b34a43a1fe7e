"""The loop against plain decoding and against transformers' own loops, in tokens/s.

Plain decoding has the same forward passes; of transformers' loops the best counts that a user could
run on the same pair. Beside them stands what is spent outside the models.

`python -m benchmarks.decode [--run checkpoints/default]`, after `python -m
pipelines.run`. All methods are interleaved prompt by prompt. What can be tuned is tuned first, at
each temperature, on training prompts by time in the loop, ours and theirs with about as many
trials: trees and rules for the LM draft and for the run's head, sizes of n-grams, schedules of
assisted generation, sizes of prompt lookup.
"""

import argparse
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TypeVar

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import torch

from benchmarks.timing import doubts, rate, report
from nde_talf.data.text.pair import Pair
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.bootstrap import shown
from nde_talf.decoding.drafter import Drafter, LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.mixed import Mixed, MixedDrafter
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.ngram import NgramDrafter
from nde_talf.decoding.ngram_settings import NgramConfig
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.policies.ngram import NgramTree
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.draft_training.export import load_head
from nde_talf.draft_training.head import EagleHead
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.evaluation.benchmark import Generate, Record, read_records, run_benchmark
from nde_talf.evaluation.loops import (
    DEFAULT,
    LOOKUPS,
    PLAIN,
    TITLES,
    Lookup,
    Schedule,
    Speculative,
    action_title,
    assisted_title,
    is_outside,
    lookup_title,
    record_of,
    transformers_assisted,
    transformers_lookup,
    transformers_loop,
)
from nde_talf.evaluation.methods import NGRAM, UNLABELLED_TREES
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.speed import CPU, speed_ratio
from nde_talf.evaluation.tuning import fastest
from nde_talf.selector.latency import StepCosts
from nde_talf.selector.network import Selector
from nde_talf.selector.policy import NeuralPolicy

COLUMNS = [
    "setting",
    "method",
    "tokens a pass",
    "nodes",
    "tokens/s",
    "over autoregressive",
    "in CPU time",
    "over transformers' best",
    "ms a step",
    "ms outside the models",
    "fraction outside",
]
RULES = "specinfer", "traversal"
NGRAMS = [
    NgramConfig(min_size=size, threshold=threshold, nodes=nodes, depth=nodes)
    for size, threshold, nodes in product((1, 2, 3), (0.05, 0.1, 0.2, 0.4), (8, 16))
]
MIXED = [
    NgramConfig(min_size=size, min_rate=rate, threshold=threshold, nodes=12, depth=12)
    for size, rate, threshold in product((1, 2, 3, 4), (0.0, 0.6, 0.8), (0.1, 0.3))
]
GRID = (
    DEFAULT,
    *map(Schedule._make, product((2, 3, 4, 6, 8, 12), ("constant", "heuristic"), (0.0, 0.4))),
)
"""Schedules of transformers' assisted generation that are tried."""
Tree = tuple[str, Action]  # a rule, and a tree for it
Tried = TypeVar("Tried", bound=Hashable)


class ForwardClock:
    """Seconds inside the models it watches, and how many passes the draft made.

    Watch a model before anything is built of it.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.seconds, self.draft_passes = 0.0, 0

    def watch(self, model: CausalModel | EagleHead, draft: bool = False) -> None:
        if isinstance(model, CausalModel):
            reader, hidden = model.reader, self._timed(model.hidden, draft)
            model.hidden, model.logits = hidden, self._timed(model.logits, False)
            model.reader = lambda layers: self._timed(reader(layers), draft) if layers else hidden
        else:
            model.forward = self._timed(model.forward, draft)

    def _timed(self, function: Callable, counted: bool) -> Callable:
        def timed(*args, **kwargs):
            self.draft_passes += counted
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - started
            return result

        return timed


def watched(
    name: str,
    decoder: SpeculativeDecoder,
    setting: SamplingSetting,
    new_tokens: int,
    clock: ForwardClock,
) -> Generate:
    """Make a method of our loop whose records say what happened inside the models."""

    def generate(prompt: list[int], seed: int, kind: str):
        stream = decoder.blocks(prompt, new_tokens, setting, Rng.seeded(seed))
        next(iter(stream))  # the prefill
        clock.reset()
        started = time.process_time()
        for _ in stream:
            pass
        record = record_of(name, setting, stream.generation)
        record.cpu_seconds = time.process_time() - started
        record.forward_seconds, record.draft_passes = clock.seconds, clock.draft_passes
        return record

    return generate


@dataclass
class Ours:
    """Our decoders, with the models as they are then: before a clock is around them, or after.

    Attributes:
        head: the run's draft head, where it has one.
        exports: the folder of the run's selectors.
    """

    target: CausalModel
    draft: CausalModel
    head: object
    exports: Path
    setting: SamplingSetting

    def drafter(self, name: str) -> Drafter:
        return LMDrafter(self.draft) if name == "LM" else EagleDrafter(self.head)

    def plain(self) -> SpeculativeDecoder:
        return SpeculativeDecoder(self.target, None, Autoregressive(), VERIFIERS["specinfer"])

    def static(self, drafter: str, tree: Tree) -> SpeculativeDecoder:
        rule, action = tree
        return SpeculativeDecoder(
            self.target, self.drafter(drafter), Delayed(action), VERIFIERS[rule]
        )

    def ngram(self, config: NgramConfig) -> SpeculativeDecoder:
        drafter = NgramDrafter(self.target.vocab_size, config)
        return SpeculativeDecoder(self.target, drafter, NgramTree(config), VERIFIERS["nss"])

    def mixed(self, drafter: str, tree: Tree, config: NgramConfig) -> SpeculativeDecoder:
        both = MixedDrafter(NgramDrafter(self.target.vocab_size, config), self.drafter(drafter))
        policy = Mixed(Delayed(tree[1]), VERIFIERS[tree[0]], NgramTree(config))
        return SpeculativeDecoder(self.target, both, policy, policy.verifier)

    def selector(self, name: str) -> tuple[str, SpeculativeDecoder]:
        """A selector of the run, under a name that says where it takes one static tree."""
        selector = Selector.from_pretrained(self.exports / name)
        policy, rules = NeuralPolicy(selector), selector.schema.verifiers
        costs = StepCosts(selector.table, rules, 0, selector.schema.pricing)
        static = selector.static_action(self.setting.temperature, self.setting.top_p, costs)
        title = f"NDE, {TITLES[name]}" + (
            "" if static is None else f": static {action_title(static, rules)}"
        )
        decoder = SpeculativeDecoder(self.target, self.drafter("LM"), policy, policy.verifier)
        return title, decoder


def chosen(
    ours: Ours, trees: Sequence[Action], new_tokens: int, prompts: list[list[int]]
) -> dict[str, Callable]:
    """Choose our methods by time on `prompts`: by name, functions of `Ours` that make decoders."""

    def best(tried: Sequence[Tried], make: Callable[[Tried], SpeculativeDecoder]) -> Tried:
        return fastest(
            tried,
            lambda one, tokens: Speculative("", make(one), ours.setting, tokens),
            new_tokens,
            prompts,
        )

    greedy = (
        ours.setting.temperature == 0
    )  # where all i.i.d. branches are one, and all rules are the same
    tried = [tree for tree in trees if tree.k == 1 or not greedy] or list(trees)
    options = list(product(RULES[1:] if greedy else RULES, tried))
    found: dict[str, Callable] = {}
    for name in ("LM", "head") if ours.head else ("LM",):
        tree = best(options, lambda tree, name=name: ours.static(name, tree))
        title = f"{TITLES[tree[0]]} {tuple(tree[1])}"
        found[f"{name}, {title}"] = lambda own, name=name, tree=tree: own.static(name, tree)
        at = best(
            range(len(MIXED)), lambda at, name=name, tree=tree: ours.mixed(name, tree, MIXED[at])
        )
        said = f"{NGRAM} {_sizes(MIXED[at])}, else {name}, {title}"
        found[said] = lambda own, name=name, tree=tree, at=at: own.mixed(name, tree, MIXED[at])
    at = best(range(len(NGRAMS)), lambda at: ours.ngram(NGRAMS[at]))
    return found | {f"{NGRAM} {_sizes(NGRAMS[at])}": lambda own: own.ngram(NGRAMS[at])}


def _sizes(config: NgramConfig) -> str:
    rate = f", rate {config.min_rate:g}" if config.min_rate else ""
    return (
        f"({config.min_size} to {config.max_size} tokens, {config.nodes} nodes, threshold"
        f" {config.threshold:g}{rate})"
    )


def theirs(
    target: CausalModel,
    draft: CausalModel,
    setting: SamplingSetting,
    new_tokens: int,
    prompts: list[list[int]],
    schedules: Sequence,
) -> dict[str, Generate]:
    """Make transformers' loops: plain, assisted by default and at its best, best prompt lookup."""

    def assisted(schedule: Schedule | None, tokens: int) -> Generate:
        title = assisted_title(schedule)
        return transformers_assisted(title, target, setting, tokens, draft, schedule)

    def lookup(sizes: Lookup, tokens: int) -> Generate:
        return transformers_lookup(lookup_title(sizes), target, setting, tokens, sizes)

    schedule = fastest(schedules, assisted, new_tokens, prompts)
    sizes = fastest(LOOKUPS, lookup, new_tokens, prompts)
    return {
        PLAIN: transformers_loop(PLAIN, target, setting, new_tokens),
        assisted_title(DEFAULT): assisted(DEFAULT, new_tokens),
        assisted_title(schedule): assisted(schedule, new_tokens),
        lookup_title(sizes): lookup(sizes, new_tokens),
    }


def methods(
    ours: Ours,
    trees: Sequence[Action],
    new_tokens: int,
    prompts: list[list[int]],
    schedules: Sequence,
) -> dict[str, Generate]:
    """All methods of one temperature."""
    setting = ours.setting
    made = theirs(ours.target, ours.draft, setting, new_tokens, prompts, schedules)
    found = chosen(ours, trees, new_tokens, prompts)
    clock = ForwardClock()
    for model, is_draft in ((ours.target, False), (ours.draft, True), (ours.head, True)):
        if model is not None:
            clock.watch(model, is_draft)
    decoders = {BASELINE: ours.plain(), CONTROL: ours.plain()} | {
        name: make(ours) for name, make in found.items()
    }
    if ours.exports.is_dir():
        decoders |= dict(ours.selector(folder.name) for folder in sorted(ours.exports.iterdir()))
    return {
        name: watched(name, decoder, setting, new_tokens, clock)
        for name, decoder in decoders.items()
    } | made


def best_of_theirs(by_method: dict[str, list[Record]]) -> str:
    """The loop of transformers with the largest median, over prompts, of tokens/s."""
    medians = {
        name: median(r.tokens / r.seconds for r in own)
        for name, own in by_method.items()
        if is_outside(name)
    }
    return max(medians, key=lambda name: medians[name])


def rows(records: list[Record]) -> tuple[list[list], list[str]]:
    """One row a setting and method, and what transformers' best is at each.

    Ratios: of total tokens/s, paired by prompt; what is outside the models: medians over prompts.
    """
    table, notes = [], []
    for setting in dict.fromkeys(record.setting for record in records):
        by_method: dict[str, list[Record]] = {}
        for record in records:
            if record.setting == setting:
                by_method.setdefault(record.method, []).append(record)
        best = best_of_theirs(by_method)
        notes.append(f"{setting}: transformers' best, by the median over prompts, is {best}.")
        for method, own in sorted(
            by_method.items(),
            key=lambda item: (item[0] != BASELINE, item[0] != CONTROL, is_outside(item[0])),
        ):
            steps, seconds = sum(r.steps for r in own), sum(r.seconds for r in own)
            known = any(
                r.forward_seconds for r in own
            )  # not of transformers' own, nor inside a graph
            outside = [(r.seconds - r.forward_seconds) / r.seconds for r in own]
            each = [(r.seconds - r.forward_seconds) / r.steps for r in own]
            table.append(
                [
                    setting,
                    method,
                    shown(rate(own, "tokens", "steps")),
                    f"{sum(r.nodes for r in own) / steps:.1f}",
                    f"{sum(r.tokens for r in own) / seconds:.0f}",
                    shown(speed_ratio(own, by_method[BASELINE])),
                    shown(speed_ratio(own, by_method[BASELINE], CPU)),
                    shown(speed_ratio(own, by_method[best])),
                    f"{1e3 * seconds / steps:.1f}",
                    f"{1e3 * median(each):.2f}" if known else "–",
                    f"{100 * median(outside):.1f} %" if known else "–",
                ]
            )
    return table, notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument(
        "--tuning", type=int, default=5, help="training prompts on which settings are chosen"
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.0])
    trees = [",".join(map(str, tree)) for tree in UNLABELLED_TREES]
    parser.add_argument("--trees", nargs="+", default=trees, help="K,L1,L2 of those tried")
    parser.add_argument(
        "--schedules",
        type=int,
        default=len(GRID),
        help="how many of transformers' schedules are tried",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--name", default="decode", help="of the files in benchmarks/results")
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    pair = Pair(options.run / "pair")
    prompts = [(p.id, p.kind, p.tokens) for p in pair.prompts("test", options.prompts, "--prompts")]
    tuning = [p.tokens for p in pair.every_prompt() if p.split == "trace"][: options.tuning]
    head = options.run / "draft" / "export"
    with TemporaryDirectory() as folder:
        records = Path(folder) / "records.jsonl"
        for temperature in options.temperatures:
            # afresh: the clock wraps them
            target, draft = pair.models(options.device, options.dtype)
            found, setting = (
                load_head(head, target) if head.is_dir() else None,
                SamplingSetting(temperature),
            )
            ours = Ours(target, draft, found, options.run / "selector" / "export", setting)
            actions = [Action(*map(int, tree.split(","))) for tree in options.trees]
            made = methods(ours, actions, options.new_tokens, tuning, GRID[: options.schedules])
            run_benchmark(made, prompts, setting, records, seed=0)
        read = list(read_records(records))
    table, notes = rows(read)
    report(options.name, COLUMNS, table, [*notes, *doubts(read)])


if __name__ == "__main__":
    main()
