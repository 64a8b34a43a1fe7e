"""Cells from the decode loop: methods side by side on the same prompts, resumed block by block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from nde_talf.data.text.prompts import Prompt
from nde_talf.decoding.drafter import Drafter, LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.delayed import Autoregressive
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.decoding.setting import AUTO
from nde_talf.evaluation.benchmark import Generate, Record, read_records, run_benchmark
from nde_talf.evaluation.loops import Speculative
from nde_talf.evaluation.papers.bench import Bench, OutOfTime, Work
from nde_talf.evaluation.papers.resampled import Prompts, Samples, as_interval, ratio
from nde_talf.evaluation.protocol import BASELINE, CONTROL, NOT_TRUSTED, trusted

Methods = dict[str, tuple[TreePolicy, str]]
"""Name -> policy and rule."""
Value = str | Callable[[Record], float]
"""A field of a record, or a function of one."""


@dataclass(frozen=True)
class Loop:
    """Methods that are decoded side by side under one sampling setting, plain decoding and the A/A
    control among them.

    Attributes:
        name: of the records.
        setting: of the target.
        methods: makes them; called when the models are loaded. A method may bring a drafter of its
            own as a third part.
        draft: what the draft samples under.
        usual: new tokens after each prompt, unless the command says otherwise.
        kinds: the sets whose prompts are decoded; None: all.
        cut: prompts are cut to so many tokens at their beginning; 0: whole.
        part: of the new tokens.
    """

    name: str
    setting: SamplingSetting
    methods: Callable[[], dict[str, tuple]]
    draft: SamplingSetting | str = AUTO
    usual: int = 64
    kinds: Sequence[str] | None = None
    cut: int = 0
    part: float = 1.0

    def tokens(self, bench: Bench) -> int:
        return max(1, round(self.part * bench.tokens(self.usual)))

    def prompts(self, bench: Bench) -> list[tuple[str, str, list[int]]]:
        return [
            (prompt.id, prompt.kind, prompt.tokens[-self.cut :])
            for prompt in bench.prompts.every
            if self.kinds is None or prompt.kind in self.kinds
        ]

    def file(self, bench: Bench) -> Path:
        return bench.folder / f"{self.name}-{self.tokens(bench)}-{bench.dtype}.jsonl"

    def work(self, bench: Bench, count: int) -> Work:
        """The measurement; count: how many methods there are, for the estimate."""

        def seconds() -> float:
            done = (
                {r.prompt for r in read_records(self.file(bench))}
                if self.file(bench).exists()
                else set()
            )
            todo = sum(id not in done for id, *_ in self.prompts(bench))
            step = (bench.table.autoregressive or bench.table.target[0])[0]
            return todo * (count + 2) * self.tokens(bench) * step

        return Work(
            self.name, seconds, partial(self._run, bench), lambda: Decoded.of(bench, self).prompts
        )

    def _run(self, bench: Bench, deadline: float) -> None:
        (target, draft), tokens, started = bench.models, self.tokens(bench), time.monotonic()
        made = self.methods()
        deadline += (
            time.monotonic() - started
        )  # what methods measure beforehand is not taken from the prompts' time

        def method(name: str, policy: TreePolicy, rule: str, drafter: Drafter | None) -> Generate:
            decoder = SpeculativeDecoder(target, drafter, policy, VERIFIERS[rule], self.draft)
            generate = Speculative(name, decoder, self.setting, tokens)

            def until(prompt: list[int], seed: int, kind: str) -> Record:
                if time.monotonic() > deadline:
                    raise OutOfTime
                return generate(prompt, seed, kind)

            return until

        methods = {
            name: method(name, Autoregressive(), "nss", None) for name in (BASELINE, CONTROL)
        }
        for name, (policy, rule, *own) in made.items():
            methods[name] = method(name, policy, rule, own[0] if own else LMDrafter(draft))
        run_benchmark(methods, self.prompts(bench), self.setting, self.file(bench), seed=0)


class Decoded:
    """Records of methods that were decoded side by side on `prompts`."""

    def __init__(self, records: Iterable[Record], prompts: Iterable[Prompt], clock: str):
        by_id = {prompt.id: prompt for prompt in prompts}
        found = [record for record in records if record.prompt in by_id]
        done = {record.prompt for record in found}
        self.prompts, self.clock = (
            Prompts([prompt for id, prompt in by_id.items() if id in done]),
            clock,
        )
        self.by_method: dict[str, list[Record]] = {}
        for record in found:
            self.by_method.setdefault(record.method, []).append(record)

    @classmethod
    def of(cls, bench: Bench, loop: Loop) -> Decoded:
        """Those of a loop that there are so far."""
        return cls(read_records(loop.file(bench)), bench.prompts.every, bench.clock)

    def figure(
        self, method: str, above: Value, below: Value, kind: str | None = None
    ) -> Samples | None:
        """The sum of one value over the sum of another, over the prompts of one set or all."""
        sums = np.zeros((2, len(self.prompts.every)))
        for record in self.by_method.get(method, ()):
            for own, value in zip(sums, (above, below), strict=True):
                own[self.prompts.row[record.prompt]] += (
                    value(record) if callable(value) else getattr(record, value)
                )
        if not self.by_method or (kind is not None and kind not in self.prompts.sets):
            return None
        found = self.prompts.ratio(*sums, kind)
        return found if np.isfinite(found[0]) else None

    def speed(self, method: str, kind: str | None = None) -> Samples | None:
        """Tokens/s."""
        return self.figure(method, "tokens", self.clock, kind)

    def speedup(self, method: str, kind: str | None = None) -> Samples | None:
        """Over plain decoding."""
        return ratio(self.speed(method, kind), self.speed(BASELINE, kind))

    def length(self, method: str, kind: str | None = None) -> Samples | None:
        """Tokens a target pass: block efficiency, mean generation length."""
        return self.figure(method, "tokens", "steps", kind)

    def doubts(self) -> list[str]:
        """A sentence where the A/A control does not hold 1."""
        control = as_interval(self.speedup(CONTROL))
        if control is None or len(control) < 3 or trusted(control):
            return []
        return [
            f"{NOT_TRUSTED}: plain decoding against itself is {control[0]:.2f} [{control[1]:.2f},"
            f" {control[2]:.2f}]."
        ]


def _one(record: Record) -> float:
    return 1.0


def milliseconds_a_token(decoded: Decoded, method: str, kind: str | None = None) -> Samples | None:
    """Of decoding, without the prefill."""
    found = decoded.figure(method, decoded.clock, "tokens", kind)
    return None if found is None else 1e3 * found


def phase(name: str) -> Callable[[Record], float]:
    """Seconds of one phase of the steps."""
    return lambda record: record.phases[name]


def mean_of(decoded: Decoded, method: str, value: Value, kind: str | None = None) -> Samples | None:
    """The mean over prompts."""
    return decoded.figure(method, value, _one, kind)
