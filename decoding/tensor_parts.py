"""A model in equal parts, one a process: what is checked before, how the processes find each other,
and how each one loads its part.

Process 0 (`nde_talf.decoding.tensor_parallel`) and the others (`nde_talf.decoding.follower`) do
these alike.
"""

import importlib.util
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.loading import load_module

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

KEY = "model.tensor_parallel"
MEET_SECONDS = 600.0
"""Longest wait for the processes that torchrun started to find each other."""


def check_sharding(config: "PreTrainedConfig", count: int, name: str) -> None:
    """Raise UserError, without loading anything, unless a model of this `config` can be held in
    `count` equal parts.
    """
    own = config.get_text_config()
    if importlib.util.find_spec("accelerate") is None:
        raise UserError(f"{KEY}={count} needs accelerate: pip install -e '.[tp]'.")
    if not getattr(own, "base_model_tp_plan", None):
        raise UserError(
            f"{KEY}={count}: {name} is of type {own.model_type}, for which transformers has no plan"
            f" of tensor parallelism. Choose another model, or {KEY}=1."
        )
    if getattr(config, "quantization_config", None):
        raise UserError(
            f"{KEY}={count}: the weights of {name} are quantised, which does not go together yet."
            f" Set {KEY}=1."
        )
    sizes = {
        "attention heads": own.num_attention_heads,
        "key/value heads": getattr(own, "num_key_value_heads", None) or own.num_attention_heads,
        "numbers inside an MLP": getattr(own, "intermediate_size", None) or count,
    }
    for what, size in sizes.items():
        if size % count:
            good = [n for n in range(1, count) if not any(each % n for each in sizes.values())]
            raise UserError(
                f"{KEY}={count} does not divide the {size} {what} of {name};"
                f" {' or '.join(map(str, good))} does."
            )


def check_folder(folder: str | Path, count: int, name: str) -> None:
    """`check_sharding` of the model in `folder`, or of that hub name."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    with suppress(OSError, ValueError, StrictDataclassError):  # load_module says what is wrong
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        check_sharding(config, count, f"{name}={folder}")


def load_sharded(
    folder: str | Path, device: str, rank: int, count: int, dtype: str, name: str
) -> "PreTrainedModel":
    """The part of process `rank` of the model in `folder`. lm_head and the embeddings are
    `complete`d afterwards.
    """
    from transformers.distributed import DistributedConfig

    # A style that shards nothing; by default lm_head is sharded by rows, which the vocabulary's
    # size might not allow.
    plan = DistributedConfig(tp_size=count, tp_plan={"lm_head": "replicated_with_grad_allreduce"})
    where = device if device == "cpu" else f"{device}:{local_rank(rank)}"
    return load_module(folder, where, dtype, name, distributed_config=plan)


def complete(module: "PreTrainedModel") -> None:
    """Give every process all of lm_head and of the embeddings. All processes call this together."""
    parts: list[Any] = [module.get_input_embeddings(), module.get_output_embeddings()]
    for part in parts:
        part.__dict__.pop("forward", None)  # the one that knows of parts
        if hasattr(part.weight, "full_tensor"):
            part.weight = nn.Parameter(part.weight.detach().full_tensor(), requires_grad=False)
    if module.config.get_text_config().tie_word_embeddings:
        parts[1].weight = parts[0].weight


def launched_rank() -> int | None:
    """This process's number where torchrun started it; None elsewhere."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def local_rank(rank: int) -> int:
    return int(os.environ.get("LOCAL_RANK", rank))


def rendezvous(file: str, rank: int, count: int) -> dist.Store:
    """Where the processes find each other: torchrun's store, else a `file`."""
    if launched_rank() is None:
        return dist.FileStore(file, count)
    return next(dist.rendezvous("env://", timeout=timedelta(seconds=MEET_SECONDS)))[0]


def join_group(store: dist.Store, rank: int, count: int, device: str, seconds: float) -> None:
    """Enter the process group, as all processes do together."""
    where = None
    if device != "cpu":
        where = torch.device(device, local_rank(rank))
        torch.cuda.set_device(where)
    dist.init_process_group(
        backend="gloo" if device == "cpu" else "nccl",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=seconds),
        device_id=where,
    )
