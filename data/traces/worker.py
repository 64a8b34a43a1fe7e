"""One worker of stage traces: samples trajectories and traces roots, one shard at a time.

A worker is made from plain settings, so that it can live in this process or in a Ray actor on
another machine. It writes its shards itself, to a store that every worker reaches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from nde_talf.data.engines.settings import EngineConfig
from nde_talf.data.engines.transformers import Engine, TransformersEngine
from nde_talf.data.engines.vllm import VLLMEngine
from nde_talf.data.text.pair import Pair
from nde_talf.data.text.prompts import Prompt, one_id_a_group
from nde_talf.data.traces.settings import SETTINGS, TracesConfig
from nde_talf.data.traces.store import Shard, TraceStore
from nde_talf.data.traces.super_trees import Draft
from nde_talf.data.traces.trace import STATES, trace_trajectories
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.micro_batch import MicroBatch
from nde_talf.decoding.device import free_memory
from nde_talf.decoding.models.causal_model import CausalModel


@dataclass(frozen=True)
class Unit:
    """The work of one shard.

    Attributes:
        prompts: all of one split.
        setting: name of the sampling setting.
        samples: super-trees at each root.
        seed: of everything that is sampled.
    """

    prompts: list[Prompt]
    setting: str
    samples: int
    seed: int


def units(prompts: list[Prompt], config: TracesConfig) -> list[Unit]:
    """List the work of all shards. Every setting has its own trajectories and super-trees."""
    work: list[Unit] = []
    for split in ("train", "validation"):
        samples = (split == "validation" and config.validation_samples) or config.samples
        those = one_id_a_group([prompt for prompt in prompts if prompt.split == split])
        for at in range(0, len(those), config.shard_prompts):
            group = those[at : at + config.shard_prompts]
            for setting in config.settings:
                seed = config.seed * 1_000_003 + len(work)
                work.append(Unit(group, setting, samples, seed))
    return work


class Tracer:
    """Samples trajectories by either engine, and traces them in torch, on one machine.

    A device belongs to torch's models or to vLLM, never to both: each is freed before the other is
    loaded.

    Args:
        pair: folder of the pair.
        stores: where shards go, by kind: "traces", and with vLLM "trajectories".
        config: what is traced.
        placed: how the models are loaded, see `Pair.models`.
        engine: its name is "transformers" or "vllm".
        longest: tokens of the longest sequence.
        threads: CPU threads of torch; 0: torch's own choice.
        head: makes a target's draft head, which drafts in the place of the pair's draft; None: the
            draft does.
    """

    def __init__(
        self,
        pair: Path,
        stores: dict[str, Path],
        config: TracesConfig,
        placed: tuple[str, str, str | None, str, str],
        engine: EngineConfig,
        longest: int,
        threads: int = 0,
        head: Callable[[CausalModel], Draft] | None = None,
    ):
        self.pair, self.config, self.engine = Pair(pair), config, engine
        self.placed, self.head, self.longest = placed, head, longest
        self.stores = {kind: TraceStore(folder, kind) for kind, folder in stores.items()}
        self.micro_batch = MicroBatch(config.micro_batch)
        self._vllm: VLLMEngine | None = None
        if threads:
            torch.set_num_threads(threads)

    @cached_property
    def models(self) -> tuple[CausalModel, CausalModel | Draft]:
        """Load target and draft, or head, in torch; an engine's memory is freed first."""
        self.close()
        if self.head is None:
            return self.pair.models(*self.placed)
        target = self.pair.target(*self.placed)
        return target, self.head(target)

    def write(self, kind: str, unit: Unit, shard: int, shards: int) -> tuple[str, Shard]:
        """Make and write shard number `shard` of a kind, "trajectories" or "traces".

        Traces are of the trajectories that are stored, if they are. Returns the shard's name and
        its entry.
        """
        store, name = self.stores[kind], self.stores[kind].name(shard, shards)
        if kind == "trajectories":
            return name, store.write_shard(name, self.trajectories(unit))
        texts = None
        if sampled := self.stores.get("trajectories"):
            # It may have been entered since this worker began.
            fresh = TraceStore(sampled.folder, sampled.kind)
            texts = fresh.lists(fresh.name(shard, shards))["tokens"]
        return name, store.write_shard(name, self.trace(unit, texts))

    def trajectories(self, unit: Unit) -> dict[str, list]:
        """Sample the target's text after every prompt: columns prompt_id and tokens [P]."""
        asked, setting = [prompt.tokens for prompt in unit.prompts], SETTINGS[unit.setting]
        tokens = self._engine().sample(asked, setting, self.config.new_tokens, unit.seed)
        return {"prompt_id": [prompt.id for prompt in unit.prompts], "tokens": tokens}

    def trace(
        self, unit: Unit, trajectories: list[list[int]] | None = None
    ) -> dict[str, list | Tensor]:
        """Make the columns of `trace_trajectories`, hidden states in half precision.

        Without trajectories they are sampled here. Raises UserError for states that half precision
        cannot hold.
        """
        if trajectories is None:
            trajectories = self.trajectories(unit)["tokens"]
        columns = trace_trajectories(
            *self.models,
            unit.prompts,
            trajectories,
            SETTINGS[unit.setting],
            replace(self.config, samples=unit.samples),
            self.micro_batch,
            unit.seed,
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
        """Free what models and engine hold; what is needed again is loaded again."""
        self.__dict__.pop("models", None)
        if self._vllm:
            self._vllm.close()
            self._vllm = None
        free_memory()

    def _engine(self) -> Engine:
        if self.engine.name == "transformers":
            return TransformersEngine(self.models[0], self.engine.batch)
        if self._vllm is None:
            self.close()
            where, dtype = self.pair.where("target"), self.config.dtype
            self._vllm = VLLMEngine(where, dtype, self.engine, self.longest)
        return self._vllm
