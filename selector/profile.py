"""Profiling: measures a pair's latency table on this machine, pass by pass, as the decode loop runs them."""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from decoding.actions import Action
from decoding.device import asynchronous
from decoding.drafter import LMDrafter
from decoding.model import CausalModel
from decoding.policies.base import DecodingState
from decoding.policies.delayed import draft_delayed
from decoding.sampling import Rng, SamplingSetting, warp
from decoding.session import TreeSession
from decoding.static import StaticShapes
from decoding.tree import DraftTree
from decoding.verification import VERIFIERS
from selector.latency import NODES, WIDTHS, LatencyTable, sizes

# A tree of each size of NODES: what verification is timed on.
SHAPES = {1: (1, 0, 0), 2: (1, 0, 1), 4: (1, 0, 3), 8: (1, 0, 7), 12: (1, 3, 8), 20: (4, 3, 4), 33: (4, 0, 8), 41: (4, 8, 8)}
SETTING = SamplingSetting(1.0)


@torch.inference_mode()
def measure_latency(
    target: CausalModel,
    draft: CausalModel,
    text: Sequence[int],
    contexts: Sequence[int],
    verifiers: Sequence[str] = (),
    repeats: int = 15,
    static: StaticShapes | None = None,
) -> LatencyTable:
    """Medians over interleaved `repeats`, at `contexts` tokens of `text` (repeated as needed).

    Timed are a target pass over n nodes with its logits; a draft pass over w nodes with its distributions and a draw from
    each; and every verifier on a tree of n nodes, the caches' bookkeeping included. static: shapes of the passes.
    """
    contexts = sorted({min(c, target.max_context - 64, draft.max_context - 64) for c in contexts})
    grids: dict[str, list[list[float]]] = {"target": [], "draft": []}
    verify: dict[str, list[float]] = {}
    for context in contexts:
        bench = _Bench(target, draft, [text[i % len(text)] for i in range(context)], static)
        timed: dict[tuple, Callable[[], float]] = {("target", n): partial(bench.target_pass, n) for n in NODES}
        timed |= {("draft", w): partial(bench.draft_pass, w) for w in WIDTHS}
        if context == contexts[-1]:
            timed |= {(name, n): partial(bench.verification, name, n) for name in verifiers for n in NODES}
        medians = _medians(timed, repeats)
        for name, columns in (("target", NODES), ("draft", WIDTHS)):
            grids[name].append(_rising([medians[name, n] for n in columns], grids[name][-1] if grids[name] else None))
        if context == contexts[-1]:
            verify = {name: _rising([medians[name, n] for n in NODES]) for name in verifiers}
    machine = {
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else platform.processor() or "cpu",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "dtype": str(target.dtype),
        "target": target.name,
        "draft": draft.name,
    }
    models = {"target": sizes(target), "draft": sizes(draft)}
    return LatencyTable(contexts, list(NODES), list(WIDTHS), grids["target"], grids["draft"], verify, models, machine)


def _medians(timed: dict[tuple, Callable[[], float]], repeats: int) -> dict[tuple, float]:
    times: dict[tuple, list[float]] = {key: [] for key in timed}
    for repeat in range(repeats + 2):
        for key, run in timed.items():
            seconds = run()
            if repeat > 1:  # the first two rounds warm up
                times[key].append(seconds)
    return {key: statistics.median(values) for key, values in times.items()}


def _rising(times: list[float], floor: list[float] | None = None) -> list[float]:
    """The times, made to rise with tokens and with context: a shorter time for more work is noise."""
    floor = floor or [0.0] * len(times)
    return [max(*times[: i + 1], *floor[: i + 1]) for i in range(len(times))]


class _Bench:
    """Both models at the end of one text, as the loop holds them; every pass is rolled back."""

    def __init__(self, target: CausalModel, draft: CausalModel, text: list[int], static: StaticShapes | None):
        self.target, self.drafter = target, LMDrafter(draft, static)
        self.session = TreeSession(target.hidden, target.device, target.dtype, target.layers, static)
        features = self.session.append(text[:-1])
        self.drafter.start(text[:-1], text[-1], features, SETTING)
        self.state = DecodingState(text[-1], len(text), 64, SETTING, warp(target.logits(features[-1]), SETTING), features[-1])
        self.state.device = asynchronous(target.device)
        self.rng = Rng.seeded(0)
        self.tokens = text

    def target_pass(self, nodes: int) -> float:
        # As in the loop, where a draft pass came before: the draft's weights are in the caches, the target's are not.
        self.draft_pass(1)
        seconds = self._timed(lambda: self.target.logits(self.session.grow(self._some(nodes), [-1] * nodes)))
        self.session.rollback()
        return seconds

    def draft_pass(self, width: int) -> float:
        tree = DraftTree.rooted(self.state.root, self.drafter.root.q)
        level = [tree.add(0, token) for token in dict.fromkeys(self.tokens)][:width]
        while len(level) < width:  # a text of very few distinct tokens
            level.append(tree.add(0, len(tree)))

        def run() -> None:
            self.drafter.expand(tree, level)
            rows = [tree.q_at(node) for node in level]
            self.rng.categorical(torch.stack(rows)) if self.state.device else self.rng.categorical(rows)

        seconds = self._timed(run)
        self.drafter.rollback()
        return seconds

    def verification(self, verifier: str, nodes: int) -> float:
        rule = VERIFIERS[verifier]
        state = replace(self.state, device=self.state.device and rule.on_device is not None)
        tree = draft_delayed(Action(*SHAPES[nodes]), state, self.drafter, self.rng)
        logits = self.target.logits(self.session.grow(tree.tokens, tree.topology))

        def run() -> None:
            tree.score(logits, SETTING)
            tree.commit(*rule(tree, self.rng)).read()

        seconds = self._timed(run)
        self.session.rollback()
        self.drafter.rollback()
        return seconds

    def _some(self, count: int) -> list[int]:
        return [self.tokens[i % len(self.tokens)] for i in range(count)]

    def _timed(self, run: Callable[[], object]) -> float:
        self._wait()
        started = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
