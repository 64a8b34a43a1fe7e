"""A GPU that is simulated: tensors on the host which say that they are on a GPU.

As on a GPU, an operation that mixes them with tensors of the host raises, and so does NumPy.
"""

from collections import Counter
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
SAYS = {
    torch.Tensor.device.__get__: GPU,
    torch.Tensor.is_cuda.__get__: True,
    torch.Tensor.is_cpu.__get__: False,
}
ANYWHERE = {"to", "cpu", "copy_", "__get__"}
"""Operations between devices."""
AS_IT_IS = {"requires_grad_", "__set__"}


READS = {"tolist", "item", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__"}
READS |= {"nonzero", "unique", "masked_select"}
FREE = ("empty", "detach", "alias", "_local_scalar", "lift_fresh", "_unsafe_view")


class Cost(TorchDispatchMode):
    """Counts kernels, waits of the host and uploads of what runs on the simulated GPU inside.

    A kernel is an operator that writes; views are free. `paused` leaves out a model's passes.
    """

    now = None

    def __init__(self):
        super().__init__()
        self.counts, self.on_gpu, self.off = Counter(), False, 0

    def __enter__(self):
        Cost.now = self
        return super().__enter__()

    def __exit__(self, *error):
        Cost.now = None
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        free = function.is_view or name.startswith(FREE) or (name == "_to_copy" and self.moves)
        if self.on_gpu and not free and not self.off:
            self.counts["kernels"] += 1
        return function(*args, **(kwargs or {}))

    def begin(self, name, ours, on_gpu):
        self.on_gpu = bool(ours) or on_gpu
        self.moves = bool(ours) != on_gpu
        if self.off:
            return
        self.counts["waits"] += bool(ours) and name in READS
        self.counts["uploads"] += on_gpu and not ours and name == "to"

    @contextmanager
    def paused(self):
        self.off += 1
        try:
            yield
        finally:
            self.off -= 1


class OnGpu(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


class Simulated(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


def run(function, args, kwargs):
    """Run an operation on the host; its tensors are on the GPU if it was asked to or its inputs are."""
    name = function.__name__
    flat, form = tree_flatten((args, kwargs))
    ours = [each for each in flat if isinstance(each, OnGpu)]
    if ours and function in SAYS:
        return SAYS[function]
    host = [each for each in flat if isinstance(each, torch.Tensor) and not isinstance(each, OnGpu)]
    host = [each for each in host if each.ndim]
    indexes = name in ("__getitem__", "__setitem__") and ours and ours[0] is args[0]
    indexes = indexes and not any(each.is_floating_point() for each in host)
    if ours and (name in ("numpy", "__array__") or (host and name not in ANYWHERE and not indexes)):
        raise RuntimeError(f"{name} of tensors on a GPU and on the host")
    asked = [each for each in flat if isinstance(each, torch.device)]
    on_gpu = GPU in asked if asked else bool(ours) and name != "cpu"
    if name == "copy_":
        on_gpu = isinstance(args[0], OnGpu)
    if Cost.now:
        Cost.now.begin(name, ours, on_gpu)
    with torch._C.DisableTorchFunction():
        if name in AS_IT_IS:
            return function(*args, **kwargs)
        plain = {id(each): each.as_subclass(torch.Tensor) for each in ours}
        inputs = [
            HOST if isinstance(each, torch.device) else plain.get(id(each), each) for each in flat
        ]
        given, named = tree_unflatten(inputs, form)
        result = function(*given, **named)
        if isinstance(result, torch.Size):
            return result
        same = {id(plain[id(each)]): each for each in ours}

        def placed(each):
            if not isinstance(each, torch.Tensor) or not on_gpu:
                return each
            return same[id(each)] if id(each) in same else each.as_subclass(OnGpu)

        return tree_map(placed, result)


def move(module: torch.nn.Module) -> torch.nn.Module:
    """Move a module's parameters and buffers to the simulated GPU."""
    moved = {}
    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    moved[id(tensor)] = moved.get(id(tensor), tensor.detach().as_subclass(OnGpu))
                    tensors[name] = moved[id(tensor)]
                    tensors[name]._is_param = tensors is each._parameters
    return module
