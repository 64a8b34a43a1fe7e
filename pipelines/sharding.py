"""The devices of a run's models: what is refused before any work, and the processes that hold
models together.

The command starts them itself. Under torchrun (one process a GPU) they are there already: process 0
runs the program, and the others follow it. Imports torch when it is called for more than one.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from nde_talf.data.engines.settings import EngineConfig
from nde_talf.decoding.common.errors import UserError
from nde_talf.pipelines.machine import check_device

KEY = "model.tensor_parallel"


class Model(Protocol):
    """The keys of `model` that are read here, in a run's settings and in those of generate."""

    device: str
    draft_device: str | None
    forward: str
    static_shapes: bool
    tensor_parallel: int
    tensor_parallel_draft: bool


def check_sharding(model: Model, engine: EngineConfig | None = None, devices: int = 1) -> None:
    """Raise UserError for settings that do not go with several processes, or with a draft on a
    device of its own. engine, devices: of a run (`draft.devices`).
    """
    count = model.tensor_parallel
    if model.draft_device not in (None, model.device):
        for other in ("static_shapes", "tensor_parallel_draft"):
            if getattr(model, other):
                raise UserError(
                    f"model.draft_device={model.draft_device} does not go together with"
                    f" model.{other}=true: leave one out."
                )
    if count == 1:
        if model.tensor_parallel_draft:
            raise UserError(
                f"model.tensor_parallel_draft=true shards the draft over the GPUs of {KEY}, which"
                " is 1: raise it."
            )
        return
    launched = (
        int(os.environ.get("LOCAL_WORLD_SIZE", count))
        if "TORCHELASTIC_RUN_ID" in os.environ
        else count
    )
    if launched != count:
        raise UserError(
            f"{KEY}={count}: torchrun started {launched} processes on this machine; give"
            f" --nproc-per-node={count}."
        )
    others = {
        f"model.device={model.device}": ":" in model.device,
        "model.static_shapes=true": model.static_shapes,
        "model.forward=native": model.forward == "native",
        "engine.name=vllm": engine is not None and engine.name == "vllm",
        f"engine.workers={engine and engine.workers}": engine is not None and engine.workers > 1,
        f"draft.devices={devices}": devices > 1,
    }
    for other, given in others.items():
        if given:
            advice = (
                "give model.device=cuda, for the first GPUs"
                if "device=" in other
                else "leave it out"
            )
            raise UserError(
                f"{KEY}={count} does not go together with {other} yet: {advice}, or set {KEY}=1."
            )


def check_devices(model: Model) -> None:
    """Raise UserError for a device that torch does not know or cannot use. Imports torch."""
    check_device(model.device)
    if model.draft_device:
        check_device(model.draft_device, "model.draft_device")


def check_parts(model: Any) -> None:
    """Raise UserError where accelerate is not installed, this machine has too few GPUs, or a model
    cannot be held in so many equal parts.

    Looks at the config.json of your own models, and at the settings of those that the run trains.
    """
    count = model.tensor_parallel
    if count == 1:
        return
    if importlib.util.find_spec("accelerate") is None:
        raise UserError(
            f"{KEY}={count} needs accelerate, which is not installed: pip install -e '.[tp]'."
        )
    import torch

    if model.device != "cpu" and count > torch.cuda.device_count():
        raise UserError(f"{KEY}={count}: there are {torch.cuda.device_count()} GPUs here.")
    from nde_talf.decoding.tensor_parts import check_folder

    for role in ("target", "draft") if model.tensor_parallel_draft else ("target",):
        if where := getattr(model, role):
            check_folder(where, count, f"model.{role}")
        elif (heads := getattr(model, f"{role}_lm").heads) % count:
            raise UserError(
                f"{KEY}={count} does not divide model.{role}_lm.heads={heads}: change one of them."
            )


@contextmanager
def sharded(model: Model) -> Iterator[None]:
    """Inside, the target is loaded in as many parts as the settings say; with 1 part, nothing is
    different.
    """
    if model.tensor_parallel == 1:
        yield
        return
    from nde_talf.decoding.tensor_parallel import Leader, leading

    roles = ("model.target", "model.draft") if model.tensor_parallel_draft else ("model.target",)
    with leading(Leader(model.tensor_parallel, model.device, roles)):
        yield


def follows(model: Model) -> bool:
    """Where torchrun started this as another process than 0: follow process 0 until it ends, and
    return True.
    """
    rank = (
        int(os.environ["RANK"])
        if "TORCHELASTIC_RUN_ID" in os.environ and model.tensor_parallel > 1
        else 0
    )
    if not rank:
        return False
    from nde_talf.decoding.follower import follow
    from nde_talf.pipelines.quiet import quiet

    quiet()
    follow(None, rank, model.tensor_parallel)
    return True


def parts(model: Model) -> dict[str, Any] | None:
    """What a stage that times passes remembers; None with one part."""
    return (
        {"parts": model.tensor_parallel, "draft": model.tensor_parallel_draft}
        if model.tensor_parallel > 1
        else None
    )
