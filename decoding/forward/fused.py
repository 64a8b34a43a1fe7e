"""What native passes over transformers' modules share: fused weights that follow changes of the
modules' own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from threading import Lock

import torch
from torch import nn

from nde_talf.decoding.cache import KVCache
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.forward.layer import DecoderLayer, Norm, NotNative
from nde_talf.decoding.forward.rotary import RotaryTable


class FusedPass(ABC):
    """A pass over the modules in `module`, with weights that are fused.

    Weights may be changed in place at any time: fused ones are views, and the few that are copies
    (`Norm.copies`) are taken anew at the start of every sequence. Where parameters or modules were
    replaced or moved by then, all are fused again. So a sequence never begins with older weights.
    """

    added: bool
    """Whether norms multiply by 1 + w."""
    tables: dict[str, RotaryTable]
    """Of rotary positions, by kind of layer."""

    def __init__(self, module: nn.Module):
        self._module, self._lock = module, Lock()  # threads may start sequences at the same time
        self._fuse()

    @abstractmethod
    def _parts(self) -> Sequence[DecoderLayer | Norm]:
        """Fuse the weights and make `tables`. Returns what holds the fused weights."""

    def _fuse(self) -> None:
        inside = next(self._module.parameters()).is_inference()
        with torch.inference_mode(inside), torch.no_grad():
            parts = self._parts()
        copies = [pair for part in parts for pair in part.copies]
        self._copies, self._sources = [copy for copy, _ in copies], [source for _, source in copies]
        self.tensors = [tensor for part in parts for tensor in part.tensors]
        if (
            self.tensors[0].device.type == "cuda"
        ):  # what the parts took is in pieces too small for what is fused
            torch.cuda.empty_cache()
        self._modules = list(self._module.modules())
        self._where = self._addresses()

    def _addresses(self) -> list[int]:
        """Which modules there are, and where their parameters lie in memory."""
        found: list[int] = []
        for module in self._modules:
            found += map(id, module._modules.values())
            found += [own.data_ptr() for own in module._parameters.values() if own is not None]
        return found

    def begin(self, cache: KVCache | None) -> None:
        """Before a sequence's first pass, take over what was done to the weights since the last
        one.

        For graphs over a cache of fixed capacity, make the tables long enough, and say that weights
        stay where they are: CUDA graphs copy all else.
        """
        with self._lock, torch.inference_mode():  # which may write to any tensor
            if self._addresses() != self._where:
                try:
                    self._fuse()
                except NotNative as error:
                    raise UserError(
                        f"{type(self._module).__name__}: it was changed since it was loaded, and"
                        f" has no native forward pass any more: {error}. Make a CausalModel of it"
                        " again."
                    ) from error
            elif self._copies:
                fresh = (
                    torch._foreach_add([own.float() for own in self._sources], 1)
                    if self.added
                    else self._sources
                )
                torch._foreach_copy_(self._copies, fresh)
            if cache is not None and cache.target is not None:
                for table in self.tables.values():
                    table.reach(cache.target.capacity)
                for tensor in [*self.tensors, *(table.table for table in self.tables.values())]:
                    torch._dynamo.mark_static_address(tensor)
