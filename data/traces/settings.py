"""Settings of `traces.*`: roots, trees and rules to trace. Imports no torch."""

from dataclasses import field
from typing import Annotated

from pydantic import Field

from nde_talf.decoding.actions import L1_MAX, L2_MAX, TREES
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.settings import Count, Distinct, Seed, Tokens, one_of, settings
from nde_talf.decoding.names import DTYPES, LABELLED
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting

GREEDY = "t0"
SETTINGS: dict[str, SamplingSetting] = {
    **{f"t{t}": SamplingSetting(float(t)) for t in ("0.2", "0.4", "0.6", "0.8", "1.0", "1.2")},
    **{f"p{p}": SamplingSetting(1.0, float(p)) for p in ("0.9", "0.99")},
    "t0.6p0.95k20": SamplingSetting(0.6, 0.95, 20),
    GREEDY: SamplingSetting(0.0),
}
"""Sampling settings by name: the eight of the NDE paper (section 4.1), what Qwen 3 advises, and
greedy. Each has its own temperature and top-p, by which a selector tells them apart.
"""
Settings = Annotated[list[Annotated[str, one_of(SETTINGS)]], Distinct]
Rules = Annotated[list[Annotated[str, one_of(LABELLED)]], Distinct]
DRAFTERS = ("lm", "head", "nobody")
LABELS = ("trees", "text")
OF_TEXT = ("specinfer", "traversal")
"""Verification rules that have labels from text."""


@settings("traces")
class TracesConfig:
    """The roots to trace, and the labels to compute at each."""

    settings: Settings = field(default_factory=lambda: ["t0.6", "t1.0"])
    """Names of sampling settings: t0 (greedy), t0.2 t0.4 t0.6 t0.8 t1.0 t1.2 (temperature), p0.9
    p0.99 (top-p), t0.6p0.95k20.
    """
    train_prompts: Count = 28
    """Number of prompts whose roots the selector learns from."""
    validation_prompts: Count = 14
    """Number of prompts whose roots the selector is evaluated on."""
    new_tokens: Tokens = 64
    """Tokens that the target generates after each prompt, at most: a trajectory."""
    stride: Tokens = 16
    """Distance in tokens between neighbouring roots of a trajectory."""
    samples: Annotated[int, Field(ge=2, le=100_000)] = 2
    """Super-trees drawn at each root; a label is their mean."""
    validation_samples: Annotated[int, Field(ge=0, le=100_000)] = 4
    """Super-trees drawn at each root of a validation prompt; 0: as traces.samples."""
    verifiers: Rules = field(default_factory=lambda: ["specinfer", "naivetree", "traversal"])
    """Verification rules to compute labels for."""
    labels: Annotated[str, one_of(LABELS)] = "trees"
    """Source of the training prompts' labels: trees (super-trees, by any rule), or text (the
    target's text alone, at every fourth token; nearly free, for specinfer and, nearly, traversal).
    """
    drafter: Annotated[str, one_of(DRAFTERS)] | None = None
    """Who drafts the super-trees, and so for whom the selector chooses trees: lm (the draft model),
    head (the run's head) or nobody (no traces, no prices and no selector). null: the draft model;
    where there is none, the head.
    """
    micro_batch: Annotated[int, Field(ge=1, le=100_000)] = 8
    """Super-trees in one pass of a model; halved when memory runs out."""
    shard_prompts: Count = 8
    """Prompts in one Parquet shard, the unit of work that an interrupted run loses at most."""
    dtype: Annotated[str, one_of(DTYPES)] = "float32"
    """Type of both models while tracing: float32, bfloat16, float16 or float64."""
    seed: Seed = 0
    """Seed of the trajectories and of the super-trees."""

    def __post_init__(self) -> None:
        others = [name for name in self.verifiers if name not in OF_TEXT]
        if self.labels == "text" and others:
            raise UserError(
                f"traces.labels=text: it labels traces.verifiers={[*OF_TEXT]}. Give these, or"
                " traces.labels=trees."
            )
        if self.labels == "text" and self.new_tokens <= (depth := L1_MAX + L2_MAX):
            raise UserError(
                f"traces.new_tokens={self.new_tokens} with traces.labels=text: a label needs"
                f" {depth} tokens of the text after its root. Give more than {depth}."
            )
        if self.validation_samples == 1:
            raise UserError(
                "traces.validation_samples=1: a standard error needs two samples; give 2 or more,"
                " or 0."
            )

    def distance(self, split: str) -> int:
        """Tokens from a root of a split to the next: few for labels from text, which are cheap."""
        return 4 if self.labels == "text" and split == "train" else self.stride

    def roots(self, split: str) -> int:
        """Count the roots of a split, at most."""
        prompts = self.train_prompts if split == "train" else self.validation_prompts
        return len(self.settings) * prompts * -(-self.new_tokens // self.distance(split))

    def space(self, target_hidden: int, draft_hidden: int) -> int:
        """Count the bytes of all roots, at most: hidden states in half precision, and labels."""
        states = 2 * (target_hidden + 2 * draft_hidden)
        labels = 4 * len(TREES) * len(self.verifiers)
        validation = self.roots("validation") * (self.validation_samples or self.samples)
        trees = self.roots("train") * self.samples + validation
        return (self.roots("train") + self.roots("validation")) * states + trees * labels
