"""A device that is none: tensors that tell when the host would have had to wait for them."""

from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

import torch

from nde_talf.decoding.forward.fused import FusedPass
from nde_talf.decoding.forward.layer import DecoderLayer, HeadNorms, Linear, Norm

LOOKS = (
    *("tolist", "item", "numpy", "cpu", "nonzero", "equal"),
    *("__bool__", "__int__", "__float__", "__index__", "__contains__"),
)


class OnDevice(torch.Tensor):
    """Stands for a tensor on a GPU: whatever is computed from one is one.

    `waits` counts looks at the numbers, and what makes torch look, or copy a tensor of the host:
    indexing by masks, lists and single numbers, and operations on both kinds.
    """

    waits: ClassVar[Counter] = Counter()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in LOOKS:
            cls.waits[name] += 1
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        flat = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else [arg])]
        cls.waits["host tensor"] += any(
            isinstance(x, torch.Tensor) and not isinstance(x, cls) and x.dim() for x in flat
        )
        if name in ("__getitem__", "__setitem__"):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            tensors = [index for index in indices if isinstance(index, torch.Tensor)]
            cls.waits["index"] += any(isinstance(index, list) for index in indices)
            cls.waits["index"] += any(
                index.dtype == torch.bool or not index.dim() for index in tensors
            )
        return super().__torch_function__(function, types, args, kwargs)


class Made(torch.overrides.TorchFunctionMode):
    """What is made on a device counts as lying there; where it is made of host data, the copy is
    waited for.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if (kwargs or {}).get("device") is None or type(made) is not torch.Tensor:
            return made
        OnDevice.waits["upload"] += function in (torch.tensor, torch.as_tensor)
        return made.as_subclass(OnDevice)


def moved(module: torch.nn.Module) -> torch.nn.Module:
    """The module, its weights as if on a device."""
    for name, weight in [*module.named_parameters(), *module.named_buffers()]:
        *path, leaf = name.split(".")
        owner = module.get_submodule(".".join(path))
        if leaf in owner._parameters:
            owner._parameters[leaf] = torch.nn.Parameter(
                weight.detach().as_subclass(OnDevice), requires_grad=False
            )
        else:
            owner._buffers[leaf] = weight.as_subclass(OnDevice)
    return module


def moved_pass(native: FusedPass) -> None:
    """What a native pass holds of its own, likewise."""
    for owner in [*native.tables.values(), *_owners(native)]:
        for name, value in vars(owner).items():
            if isinstance(value, torch.Tensor):
                setattr(owner, name, value.as_subclass(OnDevice))


def _owners(part: object) -> Iterator[object]:
    """The parts of a native pass."""
    yield part
    for value in vars(part).values():
        for inner in value if isinstance(value, list | tuple) else [value]:
            if isinstance(inner, DecoderLayer | Linear | Norm | HeadNorms):
                yield from _owners(inner)


def pretend(monkeypatch) -> None:
    """Let the code take the CPU for a device that works asynchronously; what is uploaded counts as
    lying there.
    """

    def upload(host, _):
        assert not isinstance(host, OnDevice)
        return host.as_subclass(OnDevice)

    for module in (
        "session",
        "cache",
        "static",
        "sampling",
        "tree",
        "device_tree",
        "captured",
        "features",
    ):
        monkeypatch.setattr(f"decoding.{module}.upload", upload)
    for module in ("policy", "baselines"):
        monkeypatch.setattr(f"selector.{module}.upload", upload)
    for module in ("nde_talf.decoding.sampling", "nde_talf.selector.policy"):
        monkeypatch.setattr(f"{module}.asynchronous", lambda _: True)
