"""What native passes over transformers' modules share: fused weights that follow changes of the modules' own."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from threading import Lock

import torch
from torch import nn

from decoding.forward.layer import DecoderLayer, Norm


class FusedPass(ABC):
    """A pass over the modules in `module`, with weights that are fused.

    Weights may be changed in place at any time: fused ones are views, and the few that are copies (`Norm.copies`) are taken
    anew at the start of every sequence. Where parameters or modules were replaced or moved by then, all are fused again. So a
    sequence never begins with older weights.
    """

    added: bool
    """Whether norms multiply by 1 + w."""

    def __init__(self, module: nn.Module):
        self._module, self._lock = module, Lock()  # threads may start sequences at the same time
        self._fuse()

    @abstractmethod
    def _parts(self) -> Sequence[DecoderLayer | Norm]:
        """Fuse the weights. Returns what holds copies of some."""

    def _fuse(self) -> None:
        copies = [pair for part in self._parts() for pair in part.copies]
        self._copies, self._sources = [copy for copy, _ in copies], [source for _, source in copies]
        self._modules = list(self._module.modules())
        self._where = self._addresses()

    def _addresses(self) -> list[int]:
        """Which modules there are, and where their parameters lie in memory."""
        found: list[int] = []
        for module in self._modules:
            found += map(id, module._modules.values())
            found += [own.data_ptr() for own in module._parameters.values() if own is not None]
        return found

    def refresh(self) -> None:
        """Take over what was done to the weights since the last sequence."""
        with self._lock:
            if self._addresses() != self._where:
                self._fuse()
            elif self._copies:
                fresh = torch._foreach_add([own.float() for own in self._sources], 1) if self.added else self._sources
                torch._foreach_copy_(self._copies, fresh)
