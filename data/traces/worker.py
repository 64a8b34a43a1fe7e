"""One worker of stage traces: samples trajectories, draws super-trees and traces roots, one shard
at a time.

A worker is made from plain settings, so that it can live in this process or in a Ray actor on
another machine. It writes its shards itself, to a store that every worker reaches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul
from pathlib import Path

import torch
from torch import Tensor

from nde_talf.data.engines.base import Engine
from nde_talf.data.engines.settings import EngineConfig
from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.data.engines.vllm import VLLMEngine
from nde_talf.data.text.pair import Pair
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.settings import SETTINGS, TracesConfig
from nde_talf.data.traces.store import TraceStore
from nde_talf.data.traces.super_trees import Draft, tree_rollouts
from nde_talf.data.traces.trace import draft_setting, root_positions, trace_trajectories
from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.micro_batch import MicroBatch
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.device import free_memory
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.super_tree import super_tree_layout

STATES = ("h_p_previous", "h_q_previous", "h_q_root")
"""Columns that are stored in half precision."""


@dataclass(frozen=True)
class Unit:
    """The work of one shard.

    Attributes:
        prompts: all of one split.
        sampled: for each prompt, the sampling setting of its trajectory.
        settings: the settings that the roots get labels for.
        samples: super-trees at each root.
        seed: of everything that is sampled.
    """

    prompts: list[Prompt]
    sampled: list[str]
    settings: list[str]
    samples: int
    seed: int


def units(prompts: list[Prompt], config: TracesConfig) -> list[Unit]:
    """The work of all shards.

    Where the draft is warped like the target, every setting has its own trajectories and
    super-trees. Where it is raw, one set of them serves all settings.
    """
    found, size, names = [], config.shard_prompts, config.settings
    splits = {
        name: [prompt for prompt in prompts if prompt.split == name]
        for name in ("train", "validation")
    }
    for split, own in splits.items():
        samples = (split == "validation" and config.validation_samples) or config.samples
        for at in range(0, len(own), size):
            group = own[at : at + size]
            if config.draft_temperature == "raw":
                found.append(
                    (
                        group,
                        [names[(at + i) % len(names)] for i in range(len(group))],
                        names,
                        samples,
                    )
                )
            else:
                found += [(group, [name] * len(group), [name], samples) for name in names]
    return [Unit(*unit, seed=config.seed * 1_000_003 + i) for i, unit in enumerate(found)]


class Tracer:
    """Samples and traces on one machine.

    Either engine samples trajectories and super-trees; torch always scores.

    A device belongs to torch's models or to one model inside vLLM, never to both: each is freed
    before another one is loaded.

    Args:
        pair: folder of the pair.
        stores: where shards go, by kind: "traces", and with vLLM "trajectories" and "rollouts".
        config: what is traced.
        device: of the models in torch.
        engine: its name is "transformers" or "vllm".
        threads: CPU threads of torch; 0: torch's own choice.
        draft_device: of the draft in torch; None: `device`.
        forward: of the models in torch, see `CausalModel`.
        head: makes a target's draft head, which drafts in the place of the pair's draft; None: the
            draft does.
    """

    def __init__(
        self,
        pair: Path,
        stores: dict[str, Path | str],
        config: TracesConfig,
        device: str,
        engine: EngineConfig,
        threads: int = 0,
        draft_device: str | None = None,
        forward: str = "auto",
        head: Callable[[CausalModel], Draft] | None = None,
    ):
        self.pair, self.config, self.engine = Pair(pair), config, engine
        self.placed, self.head = (device, config.dtype, draft_device, forward), head
        self.stores = {kind: TraceStore(folder, kind) for kind, folder in stores.items()}
        self.micro_batch = MicroBatch(config.micro_batch, lambda text: console.print(f"! {text}"))
        self._open: tuple[str, Engine] | None = None
        if threads:
            torch.set_num_threads(threads)

    @cached_property
    def models(self) -> tuple[CausalModel, CausalModel | Draft]:
        """Target and draft, or head, in torch; an engine's memory is freed first."""
        self.close()
        if self.head is None:
            return self.pair.models(*self.placed)
        target = self.pair.target(*self.placed)
        return target, self.head(target)

    def write(self, kind: str, unit: Unit, shard: int, shards: int) -> int:
        """Make and write shard number `shard` of a kind: "trajectories", "rollouts" of them, or
        "traces" of what there is of both.

        Returns its rows.
        """
        drawn = [store for name, store in self.stores.items() if name != "traces"]
        earlier = drawn[:1] if kind == "rollouts" else drawn if kind == "traces" else []
        inputs = [store.lists(store.name(shard, shards))["tokens"] for store in earlier]
        make = {"trajectories": self.trajectories, "rollouts": self.rollouts, "traces": self.trace}[
            kind
        ]
        return self.stores[kind].write(self.stores[kind].name(shard, shards), make(unit, *inputs))

    def most_roots(self, work: list[Unit]) -> tuple[int, int]:
        """Count the most roots that units can have, and the bytes of their columns."""
        target, draft = self.models
        each = -(-self.config.new_tokens // self.config.stride)
        states = 2 * (target.hidden_size + 2 * draft.hidden_size)  # bytes in half precision
        labels = 4 * len(TREES) * len(self.config.verifiers)
        roots = [each * len(unit.prompts) * len(unit.settings) for unit in work]
        per_root = [states + unit.samples * labels for unit in work]
        return sum(roots), sum(map(mul, roots, per_root))

    def trajectories(self, unit: Unit) -> dict[str, list]:
        """prompt_id [P] and tokens [P] (lists): every prompt with the text that the target writes
        after it.
        """
        engine = (
            TransformersEngine(self.models[0])
            if self.engine.name == "transformers"
            else self._vllm("target")
        )
        tokens: dict[int, list[int]] = {}
        for name in dict.fromkeys(unit.sampled):
            at = [i for i, sampled in enumerate(unit.sampled) if sampled == name]
            prompts = [unit.prompts[i].tokens for i in at]
            tokens |= zip(
                at,
                engine.sample(prompts, SETTINGS[name], self.config.new_tokens, unit.seed),
                strict=True,
            )
        return {
            "prompt_id": [p.id for p in unit.prompts],
            "tokens": [tokens[i] for i in range(len(unit.prompts))],
        }

    def rollouts(self, unit: Unit, trajectories: list[list[int]]) -> dict[str, list]:
        """prompt_id [P] and tokens [P] (lists of roots * samples * (N - 1)): the super-trees at
        each trajectory's roots.
        """
        layout, setting = (
            super_tree_layout(),
            draft_setting(SETTINGS[unit.settings[0]], self.config),
        )
        roots = [
            [
                trajectory[: position + 1]
                for position in root_positions(prompt.tokens, trajectory, self.config.stride)
            ]
            for prompt, trajectory in zip(unit.prompts, trajectories, strict=True)
        ]
        every = [root for own in roots for root in own]
        drawn = tree_rollouts(
            self._vllm("draft"), every, unit.samples, layout, setting, 2 * unit.seed
        )
        parts = drawn.int().split([len(own) * unit.samples for own in roots])
        return {
            "prompt_id": [p.id for p in unit.prompts],
            "tokens": [part.flatten().tolist() for part in parts],
        }

    def trace(
        self,
        unit: Unit,
        trajectories: list[list[int]] | None = None,
        drawn: list[list[int]] | None = None,
    ) -> dict[str, list | Tensor]:
        """The columns of `trace_trajectories`, hidden states in half precision; what an engine has
        not sampled is sampled here.

        Raises UserError for states that half precision cannot hold.
        """
        if trajectories is None:
            trajectories = self.trajectories(unit)["tokens"]
        trees = drawn and [
            torch.tensor(x, dtype=torch.long).view(-1, len(super_tree_layout()) - 1) for x in drawn
        ]
        settings, config = (
            [SETTINGS[name] for name in unit.settings],
            replace(self.config, samples=unit.samples),
        )
        columns = trace_trajectories(
            *self.models,
            unit.prompts,
            trajectories,
            settings,
            config,
            self.micro_batch,
            unit.seed,
            trees,
        )
        states = {name: columns[name].half() for name in STATES if name in columns}
        for name, half in states.items():
            if not half.isfinite().all():
                raise UserError(
                    f"traces: {name} holds numbers beyond {torch.finfo(torch.half).max:.0f}, the"
                    " largest of half precision, in which hidden states are stored. This pair's"
                    " states cannot be traced: choose another pair."
                )
        return columns | states

    def close(self) -> None:
        """Free what models and engines hold; what is needed again is loaded again."""
        self.__dict__.pop("models", None)
        if self._open:
            self._open[1].close()
            self._open = None
        free_memory()

    def _vllm(self, role: str) -> Engine:
        if self._open is None or self._open[0] != role:
            self.close()
            of = self.pair.where("target") if role == "draft" else None
            self._open = role, VLLMEngine(self.pair.where(role), self.config.dtype, self.engine, of)
        return self._open[1]
