"""Profiling: what a step costs with a pair on this machine, measured in the decode loop.

Steps are run as the loop runs them: real drafter, target, caches and verification, warping
included. Each of `PROBES` is drafted in every round, in random order, at every context, twice in a
row, since a step's time also depends on the tree before
it: the loop times the phases of the second one. `nde_talf.selector.step_parts` splits these times
into the parts of a `LatencyTable`. Plain decoding, whose steps are quicker than those that draft no
token, is timed apart.

Rounds come in batches. Two batches have to give the same prices up to `AGREE`; until two do, more
are run.
"""

import platform
import random
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice, product
from typing import cast

import numpy as np
import torch

from nde_talf.decoding.actions import Action
from nde_talf.decoding.cache import KVCache
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.device import asynchronous
from nde_talf.decoding.device_tree import DeviceTree
from nde_talf.decoding.drafter import Drafter, drafter_of
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.base import DecodingState
from nde_talf.decoding.policies.delayed import Autoregressive, draft_delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.decoding.static import StaticShapes
from nde_talf.decoding.stats import Step
from nde_talf.decoding.tree import DraftTree
from nde_talf.selector.fingerprint import sizes
from nde_talf.selector.latency import AGREE, NODES, SEQUENCES, WIDTHS, LatencyTable, forward_of
from nde_talf.selector.policy import OfTheStep
from nde_talf.selector.step_parts import PROBES, Probed, fit_table, rising

MAX_BATCHES = 5
MAX_DEPTH = max(action.depth for action in PROBES)
PLAIN_STEPS = 12
ROOM = 96
"""Tokens of context after the longest one that profiling needs: as far as a stream may go before it
starts again.
"""
BATCH_ROUNDS, BATCH_TOKENS = (
    4,
    1 << 15,
)  # passes over many sequences are timed up to so many tokens of context together

Clock = Callable[[], float]


@torch.inference_mode()
def measure_latency(
    target: CausalModel,
    draft: CausalModel,
    text: Sequence[int],
    contexts: Sequence[int],
    verifiers: Sequence[str] = (),
    repeats: int = 9,
    static: StaticShapes | None = None,
    settings: Sequence[SamplingSetting] = (SamplingSetting(1.0),),
    draft_setting: SamplingSetting | None = None,
    max_batches: int = MAX_BATCHES,
) -> LatencyTable:
    """The latency table of a pair on this machine.

    Example: 16 probes, 3 contexts, repeats=9: two batches of 864 steps, and 15 s where a step takes
    7 ms.

    Args:
        target: the large model.
        draft: the small one.
        text: tokens that sequences start with, repeated as needed.
        contexts: committed tokens at which steps are timed; cut to what both models can take.
        verifiers: rules to time; with none the table prices no verification.
        repeats: rounds in a batch.
        static: shapes of all passes.
        settings: sampling settings, which the rounds take in turn.
        draft_setting: what drafts are warped with; None: like the target.
        max_batches: how many batches are run at most until two agree; then those that agree best
            are taken.
    """
    ceiling = (
        min(target.max_context, draft.max_context, *([static.context] if static else [])) - ROOM
    )
    if ceiling < 1:
        raise UserError(
            f"profiling needs a context of {ROOM + 1} tokens, and these models hold"
            f" {ceiling + ROOM}."
        )
    contexts = sorted({min(c, ceiling) for c in contexts})
    bench = _Bench(target, draft, text, contexts, verifiers, static, settings, draft_setting)
    list(bench.round(0, contexts))  # warm-up
    batches: list[list[Probed]] = []
    tables: list[LatencyTable] = []
    disagreement, one, other = float("inf"), 0, 0
    while len(tables) < 2 or (disagreement > AGREE and len(tables) < max_batches):
        first = len(batches) * repeats
        batches.append(
            [
                step
                for number in range(first, first + repeats)
                for step in bench.round(number, contexts)
            ]
        )
        tables.append(fit_table(batches[-1], contexts, verifiers, bench.probe.levels))
        if len(tables) > 1:
            disagreement, one, other = min(
                (tables[i].disagreement_with(tables[j]), i, j)
                for i, j in combinations(range(len(tables)), 2)
            )
    table = fit_table(batches[one] + batches[other], contexts, verifiers, bench.probe.levels)
    autoregressive = rising(
        np.array([np.median(bench.plain[context]) for context in contexts])
    ).tolist()
    machine = {
        "device": (
            torch.cuda.get_device_name(target.device)
            if target.device.type == "cuda"
            else platform.processor() or "cpu"
        ),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "dtype": str(target.dtype),
        "target": target.name,
        "draft": draft.name,
        "target forward": forward_of(target),
        "draft forward": forward_of(draft),
        "clock": "CPU" if bench.clock is time.thread_time else "wall",
    }
    return replace(
        table,
        autoregressive=autoregressive,
        models={"target": sizes(target), "draft": sizes(draft)},
        machine=machine,
        disagreement=disagreement,
        sequences=list(SEQUENCES),
        target_batch=_batched(target, text, table, NODES, table.target, bench.clock),
        draft_batch=_batched(draft, text, table, WIDTHS, table.draft, bench.clock),
    )


class _Probe:
    """A policy that drafts the tree and names the verifier that it is told to.

    levels: by K, for each tree so far the number of nodes at depth 1, 2, ... of its branches.
    """

    trees, shapes = "delayed", PROBES

    def __init__(self, rules: Sequence[str]) -> None:
        self.rules = [VERIFIERS[name] for name in rules]
        self.action, self.rule, self.context = PROBES[0], self.rules[0], 0
        self.levels: dict[int, list[list[int]]] = defaultdict(list)

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree | DeviceTree:
        self.context = state.context
        tree = draft_delayed(self.action, state, drafter, rng)
        tree.rule = self.rule
        if isinstance(tree, DraftTree) and self.action.l2:
            depth: list[int] = []
            for parent in tree.topology:
                depth.append(depth[parent] + 1 if parent >= 0 else 0)
            self.levels[self.action.k].append(
                [depth.count(self.action.l1 + d) for d in range(1, self.action.l2 + 1)]
            )
        return tree


class _Bench:
    """The pair's decoders, one that waits for the device after every phase and, on a device, one
    that does not.

    On a CPU with one thread the clock is the thread's CPU time, to which other processes on the
    same core do not add.
    """

    def __init__(
        self,
        target: CausalModel,
        draft: CausalModel,
        text: Sequence[int],
        contexts: list[int],
        verifiers: Sequence[str],
        static: StaticShapes | None,
        settings: Sequence[SamplingSetting],
        draft_setting: SamplingSetting | None,
    ):
        on_device = asynchronous(target.device)
        self.clock = (
            time.perf_counter if on_device or torch.get_num_threads() > 1 else time.thread_time
        )
        self.text, self.contexts, self.settings = text, contexts, settings
        self.random, self.verifiers = random.Random(0), verifiers or ("specinfer",)
        self.probe = _Probe(self.verifiers)
        drafter, rule = drafter_of(draft, static), OfTheStep(VERIFIERS[self.verifiers[0]])
        self.decoders = {
            timed: SpeculativeDecoder(
                target,
                drafter,
                self.probe,
                rule,
                draft_setting,
                static,
                timed,
                on_device,
                clock=self.clock,
            )
            for timed in ((True, False) if on_device else (True,))
        }
        self.alone = SpeculativeDecoder(
            target, None, Autoregressive(), VERIFIERS["nss"], static=static, clock=self.clock
        )
        self.plain: dict[int, list[float]] = defaultdict(list)

    def round(self, number: int, contexts: Sequence[int]) -> Iterator[Probed]:
        """Every probe once at each context, under verifiers that change from step to step, and a
        few plain steps.
        """
        streams = list(product(contexts, (*self.decoders, None)))
        for context, timed in self.random.sample(streams, len(streams)):
            if timed is None:
                self._plain_stream(context, number)
                continue
            turn = number // len(self.settings)
            probes = [
                (probe, self.verifiers[(turn + i) % len(self.verifiers)])
                for i, probe in enumerate(PROBES)
            ]
            yield from self._stream(context, timed, self.random.sample(probes, len(probes)), number)

    def _plain_stream(self, context: int, number: int) -> None:
        start = max(1, context - PLAIN_STEPS // 2)
        steps = self.alone.stream(
            self._prompt(start), self._setting(number), Rng.seeded(number), start + ROOM
        )
        # The prefill and four steps, whose caches are still cold, are left out.
        own = [
            sum(cast("Step", step).seconds.values()) for step in islice(steps, 5, 5 + PLAIN_STEPS)
        ]
        self.plain[context] += own if number else []
        cast("Generator", steps).close()

    def _prompt(self, length: int) -> list[int]:
        return [self.text[i % len(self.text)] for i in range(length)]

    def _setting(self, number: int) -> SamplingSetting:
        return self.settings[number % len(self.settings)]

    def _stream(
        self, context: int, timed: bool, todo: list[tuple[Action, str]], number: int
    ) -> Iterator[Probed]:
        start = max(
            1, context - ROOM // 3
        )  # streams move on until they are `ROOM` longer, so their mean is about `context`
        probe = self.probe
        while todo:
            steps = self.decoders[timed].stream(
                self._prompt(start), self._setting(number), Rng.seeded(number), start + ROOM
            )
            next(steps)
            at = start
            while todo and at + 3 * MAX_DEPTH < start + ROOM:
                probe.action, verifier = todo.pop()
                probe.rule = VERIFIERS[verifier]
                next(steps)
                step = cast("Step", next(steps))
                draft, passed = step.seconds["draft"], step.seconds["target"]
                seconds = draft, passed, sum(step.seconds.values()) - draft - passed
                yield Probed(
                    self.contexts.index(context), probe.action, verifier, timed, step.nodes, seconds
                )
                at = probe.context
            cast("Generator", steps).close()


def _batched(
    model: CausalModel,
    text: Sequence[int],
    table: LatencyTable,
    rows: Sequence[int],
    single: list[list[float]],
    clock: Clock,
) -> list[list[list[float]]]:
    """[sequences][contexts][rows], seconds of a pass over `rows` of each of B sequences, from
    `single` [contexts][rows].

    The passes are those of an engine that calls `verify_batch`: B trees padded to the same number
    of rows, one mask for each. They are timed at the longest context that fits; what they take over
    a pass of one sequence there counts at all contexts.
    """
    context = max(
        [c for c in table.contexts if c * max(SEQUENCES) <= BATCH_TOKENS] or table.contexts[:1]
    )
    prompt = torch.tensor([[text[i % len(text)] for i in range(context)]], device=model.device)
    positions = torch.arange(context, device=model.device)
    caches = [KVCache(model.layers, context + max(rows)) for _ in SEQUENCES]
    for cache, count in zip(caches, SEQUENCES, strict=True):
        model.hidden(prompt.expand(count, -1), positions.expand(count, -1), None, cache)
    seconds = np.zeros((BATCH_ROUNDS, len(SEQUENCES), len(rows)))
    for number, (b, count), (r, size) in product(
        range(BATCH_ROUNDS), enumerate(SEQUENCES), enumerate(rows)
    ):
        tokens = prompt[:, :1].expand(count, size)
        mask = torch.zeros(count, 1, size, context + size, dtype=model.dtype, device=model.device)
        _wait(model)
        started = clock()
        model.logits(model.hidden(tokens, torch.full_like(tokens, context), mask, caches[b]))
        _wait(model)
        seconds[number, b, r] = clock() - started
        caches[b].commit(context)
    medians = np.median(seconds[1:], 0)  # the first round warms up
    factors = np.maximum(1, rising(medians / medians[0]))
    factors[0] = 1
    return (factors[:, None] * np.array(single)).tolist()


def _wait(model: CausalModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
