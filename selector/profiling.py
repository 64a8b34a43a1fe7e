"""Profiling: the latency table of a pair on this machine, measured in the decode loop.

Steps use the real drafter, target, caches and verification, warping included. Each of `PROBES` is
drafted in every round, in random order, at every context, twice in a row, since a step's time also
depends on the tree before it: the second one is timed, by phases. `nde_talf.selector.table_fit`
splits these times into the parts of a `LatencyTable`.

Plain decoding is timed apart: its steps are quicker than drafting steps without a drafted token.
Rounds come in batches. Batches are run until two give the same prices up to `AGREE`.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice, product
from typing import Any

import numpy as np
import torch

from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.processor import cpu_model
from nde_talf.decoding.device import asynchronous
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.drafters.lm import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.static_shapes import StaticShapes
from nde_talf.decoding.models.tree_session import Shapes
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.policies.delayed import Autoregressive, draft_delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling.rng import Rng, SamplingSetting
from nde_talf.decoding.tree import DraftTree
from nde_talf.selector.prices import AGREE, LatencyTable, sizes
from nde_talf.selector.table_fit import PROBES, Probed, fit_table, rising

MAX_BATCHES = 5
MAX_DEPTH = max(action.depth for action in PROBES)
PLAIN_STEPS = 12
ROOM = 96
"""Tokens of context needed beyond the longest one: a stream grows so far before it restarts."""

Clock = Callable[[], float]


@torch.inference_mode()
def measure_latency(
    target: CausalModel,
    draft: CausalModel,
    text: Sequence[int],
    contexts: Sequence[int],
    verifiers: Sequence[str],
    repeats: int = 9,
    settings: Sequence[SamplingSetting] = (SamplingSetting(1.0),),
    static: bool = False,
) -> LatencyTable:
    """Measure the latency table of a pair on this machine.

    Example: 16 probes, 3 contexts, repeats=9: two batches of 864 steps, and 15 s where a step takes
    7 ms.

    Args:
        target: the large model.
        draft: the small one.
        text: tokens that sequences start with, repeated as needed.
        contexts: committed tokens at which steps are timed; cut to the models' contexts.
        verifiers: rules to time.
        repeats: rounds in a batch.
        settings: sampling settings, which the rounds take in turn.
        static: passes have fixed shapes.
    """
    longest = min(target.max_context, draft.max_context)
    if longest <= ROOM:
        raise UserError(
            f"profiling needs a context of {ROOM + 1} tokens, and these models hold {longest}."
        )
    contexts = sorted({min(context, longest - ROOM) for context in contexts})
    bench = _Bench(target, draft, text, contexts, verifiers, settings, static)
    list(bench.round(0))  # warm-up
    table = _agreed(bench, repeats)
    plain = rising(np.array([np.median(bench.plain[context]) for context in contexts]))
    return replace(
        table,
        autoregressive=plain.tolist(),
        models={"target": sizes(target), "draft": sizes(draft)},
        machine=machine(target, draft)
        | {"clock": "CPU" if bench.clock is time.thread_time else "wall"},
    )


def machine(target: CausalModel, draft: CausalModel) -> dict[str, str]:
    """Describe the conditions of a pair's prices: processor, threads, torch, models, passes."""
    on_gpu = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if on_gpu else cpu_model(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "dtype": " beside ".join(dict.fromkeys((str(draft.dtype), str(target.dtype)))),
        "target": target.name,
        "draft": draft.name,
        "target forward": "native" if target.native else "transformers",
        "draft forward": "native" if draft.native else "transformers",
    }


def _agreed(bench: "_Bench", repeats: int) -> LatencyTable:
    """Fit the two batches of rounds that agree best, once two agree or MAX_BATCHES were run."""
    batches: list[list[Probed]] = []
    tables: list[LatencyTable] = []
    pairs: list[tuple[float, int, int]] = []  # disagreement of two batches

    def fit(steps: list[Probed]) -> LatencyTable:
        branches = bench.alone.target.form != "masks"
        return fit_table(steps, bench.contexts, bench.verifiers, bench.probe.levels, branches)

    while not pairs or (min(pairs)[0] > AGREE and len(tables) < MAX_BATCHES):
        count = len(tables)
        rounds = range(count * repeats, (count + 1) * repeats)
        batches.append([step for number in rounds for step in bench.round(number)])
        table = fit(batches[-1])
        pairs += [(disagreement_of(other, table), i, count) for i, other in enumerate(tables)]
        tables.append(table)
    disagreement, one, other = min(pairs)
    return replace(fit(batches[one] + batches[other]), disagreement=disagreement)


def disagreement_of(one: LatencyTable, other: LatencyTable) -> float:
    """Return the largest relative difference of two tables' tree prices, means over contexts."""
    contexts = torch.tensor(one.contexts)
    first, second = (
        torch.stack([table.steps(contexts, rule).mean(0) for rule in one.verify])
        for table in (one, other)
    )
    return float(((first - second).abs() / torch.minimum(first, second)).max())


class _Probe(TreePolicy):
    """A policy that drafts the tree `action`.

    levels: by K, for each tree so far the numbers of nodes at depth 1, 2, ... of its branches.
    """

    trees = "delayed"

    def __init__(self) -> None:
        self.action, self.context = PROBES[0], 0
        self.levels: dict[int, list[list[int]]] = defaultdict(list)

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        self.context, (k, l1, l2) = state.context, self.action
        tree = draft_delayed(self.action, state, drafter, rng)
        if l2:
            self.levels[k].append([tree.depth.count(l1 + below) for below in range(1, l2 + 1)])
        return tree


class _Bench:
    """The pair's decoders, which wait for the device after every phase.

    On a CPU with one thread the clock is the thread's CPU time, which other processes on the same
    core do not increase.
    """

    def __init__(
        self,
        target: CausalModel,
        draft: CausalModel,
        text: Sequence[int],
        contexts: list[int],
        verifiers: Sequence[str],
        settings: Sequence[SamplingSetting],
        static: bool,
    ):
        shapes = StaticShapes(max(contexts) + ROOM) if static else None
        self.clock: Clock = time.perf_counter
        if not asynchronous(target.device) and torch.get_num_threads() == 1:
            self.clock = time.thread_time
        self.text, self.contexts, self.settings = text, contexts, settings
        self.random, self.verifiers = random.Random(0), verifiers
        self.probe, drafter = _Probe(), drafter_of(draft, shapes)
        timing: dict[str, Any] = {"static": shapes, "timed": True, "clock": self.clock}
        self.drafting = SpeculativeDecoder(target, drafter, self.probe, "nss", **timing)
        self.alone = SpeculativeDecoder(target, None, Autoregressive(), "nss", **timing)
        self.plain: dict[int, list[float]] = defaultdict(list)

    def round(self, number: int) -> Iterator[Probed]:
        """Run every probe once at each context, and a few plain steps.

        Verifiers are dealt out anew, so that each meets every probe under every setting.
        """
        streams = list(product(self.contexts, (False, True)))
        for context, plain in self.random.sample(streams, len(streams)):
            if plain:
                self._plain_stream(context, number)
                continue
            probes = self.random.sample(PROBES, len(PROBES))
            yield from self._stream(context, [*zip(probes, cycle(self.verifiers))], number)

    def _steps(self, decoder: SpeculativeDecoder, start: int, number: int) -> Any:
        prompt = [*islice(cycle(self.text), start)]
        setting = self.settings[number % len(self.settings)]
        return decoder.stream(prompt, setting, Rng.seeded(number), start + ROOM)

    def _plain_stream(self, context: int, number: int) -> None:
        steps = self._steps(self.alone, max(1, context - PLAIN_STEPS // 2), number)
        # Without the prefill and four steps with cold caches.
        seconds = [sum(step.seconds.values()) for step in islice(steps, 5, 5 + PLAIN_STEPS)]
        self.plain[context] += seconds if number else []
        steps.close()

    def _stream(
        self, context: int, todo: list[tuple[Action, str]], number: int
    ) -> Iterator[Probed]:
        # Streams grow by `ROOM` at most, so their mean is about `context`.
        start, probe = max(1, context - ROOM // 3), self.probe
        while todo:
            steps = self._steps(self.drafting, start, number)
            next(steps)
            at = start
            while todo and at + 3 * MAX_DEPTH < start + ROOM:
                probe.action, verifier = todo.pop()
                self.drafting.verify = VERIFIERS[verifier]
                next(steps)
                step = next(steps)
                draft, passed = step.seconds["draft"], step.seconds["target"]
                seconds = draft, passed, sum(step.seconds.values()) - draft - passed
                at_context = self.contexts.index(context)
                yield Probed(at_context, probe.action, verifier, step.nodes, seconds)
                at = probe.context
            steps.close()


def drafter_of(draft: Any, static: Shapes | None) -> Any:
    """Make the drafter of a draft model; a draft head makes its own, by its method `drafter`."""
    return LMDrafter(draft, static) if isinstance(draft, CausalModel) else draft.drafter(static)
