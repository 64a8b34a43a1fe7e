"""A run's pair and prompts, methods decoded side by side on them, and their tables."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from nde_talf.pipelines.commands.quiet import quiet  # isort: skip (before torch)

import torch

from benchmarks.timing import parser_of
from nde_talf.data.text.pair import Pair
from nde_talf.decoding.common.bootstrap import shown, times
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.policies.delayed import Autoregressive
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling.rng import SamplingSetting
from nde_talf.decoding.sampling.sampling_setting import AUTO
from nde_talf.decoding.step import PHASES
from nde_talf.draft_training.export.head_format import load_head
from nde_talf.draft_training.head_draft import HeadDraft
from nde_talf.evaluation.benchmark import Generate, Record, read_records, run_benchmark
from nde_talf.evaluation.loops import Speculative
from nde_talf.evaluation.protocol import BASELINE, CONTROL, NOT_TRUSTED, trusted
from nde_talf.evaluation.speed import speed_ratio
from nde_talf.evaluation.table import Row, markdown, row
from nde_talf.selector.profiling import drafter_of

EIGHT = ["t0.2", "t0.4", "t0.6", "t0.8", "t1.0", "t1.2", "p0.9", "p0.99"]
"""The sampling settings of the NDE paper."""


def options_of(about: str | None, new_tokens: int) -> argparse.ArgumentParser:
    """The options that all papers share. new_tokens: the default."""
    parser = parser_of(about)
    parser.add_argument(
        "--run", type=Path, default=Path("checkpoints/paper"), help="folder with a pair"
    )
    parser.add_argument("--prompts", type=int, default=10, help="of each set of the test split")
    parser.add_argument("--new-tokens", type=int, default=new_tokens)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="folder of the records; default <run>/papers")
    parser.add_argument("--head", type=Path, help="export of a head that drafts; default: the pair")
    return parser


LENGTH, MS = "tokens a target pass", "milliseconds a token"
SPEED = "tokens/s over plain decoding"
MEASURES: dict[str, Callable[[Row], str]] = {
    LENGTH: lambda own: shown(own.block_efficiency),
    MS: lambda own: f"{1e3 / own.tokens_per_second:.2f}",
    SPEED: lambda own: times(own.speedup),
    "nodes": lambda own: f"{own.nodes:.1f}",
    **{phase: lambda own, phase=phase: f"{own.shares[phase]:.0%}" for phase in PHASES},
}
"""Figures of a method, as text; those called by a phase are its fractions of the step time."""


@dataclass
class Decoded:
    """Records of methods that were decoded side by side, by method."""

    records: dict[str, list[Record]]

    def of(self, method: str, kind: str | None = None) -> list[Record]:
        """The records of a method, of one set of prompts or all."""
        return [r for r in self.records.get(method, ()) if kind in (None, r.kind)]

    def figure(self, measure: str, method: str, kind: str | None = None) -> str:
        """A figure of MEASURES; a dash where nothing was decoded."""
        records = self.of(method, kind)
        if not any(record.steps for record in records):
            return "–"
        return MEASURES[measure](row(method, records, self.of(BASELINE, kind)))


@dataclass
class Bench:
    """The run that a paper's tables are measured on; `options` as `options_of` reads them."""

    options: argparse.Namespace
    kinds: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        quiet()
        if self.options.device == "cpu":
            torch.set_num_threads(1)
        self.pair = Pair(self.options.run / "pair")
        self.folder = self.options.out or self.options.run / "papers"
        self.folder.mkdir(parents=True, exist_ok=True)
        by_kind: dict[str, list] = {}
        for prompt in self.pair.every_prompt():
            if prompt.split == "test":
                by_kind.setdefault(prompt.kind, []).append(prompt)
        self.kinds = list(by_kind)
        few = [own[: self.options.prompts] for own in by_kind.values()]
        self.prompts = [prompt for own in few for prompt in own]

    @cached_property
    def models(self) -> tuple[CausalModel, CausalModel | HeadDraft]:
        """Target and draft, or the head in its place."""
        placed = self.options.device, "float32"
        if not self.options.head:
            return self.pair.models(*placed)
        target = self.pair.target(*placed)
        return target, HeadDraft(load_head(self.options.head, target))

    @cached_property
    def tuning(self) -> list[list[int]]:
        """Prompts that no table uses, on which methods may measure what they have to know."""
        return [p.tokens for p in self.pair.every_prompt() if p.split == "trace"][:12]

    def ours(
        self,
        name: str,
        method: tuple,
        setting: SamplingSetting,
        draft_setting: SamplingSetting | str = AUTO,
    ) -> Generate:
        """A decoder of (policy, rule), or of (policy, rule, drafter)."""
        policy, rule, *own = method
        drafter = own[0] if own else None
        if not own and policy.trees != "none":
            drafter = drafter_of(self.models[1], None)
        decoder = SpeculativeDecoder(
            self.models[0], drafter, policy, VERIFIERS[rule], draft_setting
        )
        return Speculative(name, decoder, setting, self.options.new_tokens)

    def decode(
        self,
        name: str,
        setting: SamplingSetting,
        methods: dict[str, tuple],
        draft_setting: SamplingSetting | str = AUTO,
    ) -> Decoded:
        """Decode methods beside plain decoding and its A/A control.

        `name` names the records, from which an interrupted command continues.
        """
        every = {BASELINE: (Autoregressive(), "nss"), CONTROL: (Autoregressive(), "nss"), **methods}
        made = {n: self.ours(n, own, setting, draft_setting) for n, own in every.items()}
        return self.run(name, setting, made)

    def run(self, name: str, setting: SamplingSetting, methods: dict[str, Generate]) -> Decoded:
        """Decode methods that are made already."""
        file = self.folder / f"{name}-{self.options.new_tokens}.jsonl"
        prompts = [(prompt.id, prompt.kind, prompt.tokens) for prompt in self.prompts]
        run_benchmark(methods, prompts, setting, file, seed=0)
        here = {prompt.id for prompt in self.prompts}
        by_method: dict[str, list[Record]] = {}
        for record in read_records(file):
            if record.setting == str(setting) and record.prompt in here:
                by_method.setdefault(record.method, []).append(record)
        decoded = Decoded(by_method)
        control = speed_ratio(decoded.of(CONTROL), decoded.of(BASELINE))
        if trusted(control) is False:
            print(f"{NOT_TRUSTED}: {name}, plain decoding against itself is {times(control)}.\n")
        return decoded


def table(
    title: str,
    key: str,
    rows: Iterable[str],
    columns: Sequence[str],
    cell: Callable[[str, str], str],
) -> None:
    """Print a table in Markdown. key: what its rows are called; cell: from a row and a column."""
    lines = ([row, *(cell(row, column) for column in columns)] for row in rows)
    print(f"## {title}\n\n{markdown([key, *columns], lines)}\n")
