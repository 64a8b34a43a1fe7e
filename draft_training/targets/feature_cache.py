"""The target's features along training rows, computed once and kept in files.

A head sees its rows several times, and the target is frozen. From the second time on a step along
the text needs no pass of the target.
"""

from collections.abc import Callable
from math import prod
from pathlib import Path
from shutil import disk_usage

import torch
from rich.filesize import decimal
from torch import Tensor

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.common.progress import console

Features = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]


class FeatureCache:
    """Computes the features of a row once, and reads them from files afterwards.

    A resumed training computes them again: files of a killed one may be incomplete.

    Args:
        compute: tokens [B, L] and their documents -> the target's hidden states [B, L, H] and a
            head's features [B, L, W] (`target_trees.target_features`).
        rows: of the training. Other rows are computed each time.
        folder: of the files, which `close` deletes. Nothing is kept where they would take more
            than half of the free disk.
    """

    FILES = "hidden.bin", "features.bin"

    def __init__(self, compute: Features, rows: TokenRows, folder: Path):
        self._compute, self._folder, self._count = compute, folder, len(rows)
        self._row = {self._key(tokens): at for at, tokens in enumerate(rows.tokens)}
        self._files: list[Tensor] | None = None
        self._kept = set[int]()
        self.close()

    @staticmethod
    def _key(tokens: Tensor) -> bytes:
        return tokens.cpu().contiguous().numpy().tobytes()

    def __call__(self, tokens: Tensor, document: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return hidden states [B, L, H] and features [B, L, W] of rows `tokens` [B, L]."""
        rows = [self._row.get(self._key(each), -1) for each in tokens]
        if min(rows) < 0:
            return self._compute(tokens, document)
        if not self._files or not self._kept.issuperset(rows):
            states = self._compute(tokens, document)
            if self._files is None:
                self._files = self._map(states)
            if not self._files:
                return states
            new = [at for at, row in enumerate(rows) if row not in self._kept]
            for file, state in zip(self._files, states, strict=True):
                file[[rows[at] for at in new]] = state[new]
            self._kept.update(rows)
        hidden, features = (file[rows].to(tokens.device) for file in self._files)
        return hidden, features

    def _map(self, states: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Map a file for each kind of states; none without room."""
        count = self._count
        size = count * sum(each[0].nbytes for each in states)
        if 2 * size > disk_usage(self._folder).free:
            return []
        console.print(
            f"the target's features are kept in {self._folder} until the training ends:"
            f" {decimal(size)}"
        )
        files = []
        for name, each in zip(self.FILES, states, strict=True):
            shape, place = (count, *each.shape[1:]), str(self._folder / name)
            file = torch.from_file(place, shared=True, size=prod(shape), dtype=each.dtype)
            files.append(file.view(shape))
        return files

    def close(self) -> None:
        """Delete the files."""
        self._files = None
        for name in self.FILES:
            (self._folder / name).unlink(missing_ok=True)
