"""Trees of models whose passes know one sequence only: with a state, say, or with ALiBi.

A tree is scored as a batch of its root-to-leaf paths, each on a copy of the model's memory. The
memory of the text before the tree is kept. What was accepted is run on it once more, in one pass
with what comes next; a branch that was accepted as a whole leaves its own memory instead.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import DynamicLayer

from nde_talf.decoding.device import upload
from nde_talf.decoding.models.forward.transformers import TransformersForward
from nde_talf.decoding.models.forward.windows import Window
from nde_talf.decoding.models.tree_session import Forward, TreeSession

_AGAIN = 16
"""Rows of accepted tokens that are run again in front of a tree, before a pass of their own."""


class Memory:
    """Memory of a batch of sequences: whatever the model's pass returns and takes again.

    None before the first pass.
    """

    def __init__(self, held: Any = None, sequences: int = 1):
        self.held, self.sequences = held, sequences

    def branched(self, sequences: list[int]) -> Memory:
        """Return a copy that holds these of the sequences, one more than once if asked for."""
        return Memory(_copied(self.held, torch.tensor(sequences)), len(sequences))


def _copied(held: Any, sequences: Tensor) -> Any:
    if isinstance(held, Tensor):
        return held.index_select(0, upload(sequences, held.device)) if held.ndim else held
    if isinstance(held, dict):
        return {name: _copied(value, sequences) for name, value in held.items()}
    if isinstance(held, (list, tuple)):
        return type(held)([_copied(value, sequences) for value in held])
    other = not type(held).__module__.startswith("transformers.")
    return held if other or isinstance(held, PretrainedConfig) else _copied_cache(held, sequences)


def _copied_cache(held: Any, sequences: Tensor) -> Any:
    """Copy a cache of transformers, or a layer of one."""
    copied, parts = copy.copy(held), dict(vars(held))
    if isinstance(held, DynamicLayer) and held.keys is not None and len(held.keys) == 1:
        # Such layers replace their keys and values and never write into them.
        for name in ("keys", "values"):
            setattr(copied, name, parts.pop(name).expand(len(sequences), -1, -1, -1))
    for name, value in parts.items():
        setattr(copied, name, _copied(value, sequences))
    return copied


class BranchForward(TransformersForward):
    """The pass of a transformers model's body with the memory that it makes itself."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Any,
        windows: dict[str, Window | None],
    ) -> Tensor:
        """See `TransformersForward.__call__`; rows see those before them, so there is no mask."""
        if mask is not None:
            raise NotImplementedError("a model that is scored branch by branch takes no mask")
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": cache is not None}
        if "position_ids" in self.takes:
            inputs["position_ids"] = positions
        if cache is not None:
            inputs[self.memory] = cache.held
        output = self.body(**inputs)
        if cache is not None:
            cache.held = output.get(self.memory)
            if cache.held is None:
                raise NotImplementedError("its pass returns no memory of the text")
        return output.last_hidden_state


class BranchSession(TreeSession):
    """Session of such a model.

    Args:
        forward: the model's pass, which takes and changes a `Memory`.
        chunks: False: a pass after the first runs one token of each branch.
    """

    def __init__(self, forward: Forward, device: torch.device, dtype: torch.dtype, chunks: bool):
        self.chunks = chunks
        super().__init__(forward, device, dtype)

    def reset(self, expected: int = 0) -> None:
        """See `TreeSession.reset`."""
        self.length = 0  # committed tokens
        self._text = Memory()  # of the committed tokens but those still to run
        self._to_run: list[int] = []
        self._drop_tree()

    def _drop_tree(self) -> None:
        self.rows = 0
        self._tokens: list[int] = []
        self._paths: list[list[int]] = []  # rows from the top down to each row
        self._grown_on: tuple[Memory, dict[int, int]] = Memory(), {}
        """Memory of the branches that were run last, and the sequence in it of each one's end."""

    def append(self, tokens: list[int], **inputs: Tensor) -> Tensor:
        """See `TreeSession.append`."""
        if self.rows:
            raise RuntimeError("append: the cache still holds a tree; commit() first")
        tokens = [*self._to_run, *tokens]
        hidden = self._passes(self._text, [tokens], self.length - len(self._to_run))[0]
        new = len(tokens) - len(self._to_run)
        self.length, self._to_run = self.length + new, []
        return hidden[-new:]

    def at(self, text: list[int], length: int) -> BranchSession:
        """Return a session of the first `length` tokens of `text`.

        This one runs what it has not yet run of them; it has run others of `text`, or nothing.
        """
        if length < self.length:
            self.reset()
        if missing := text[self.length : length]:
            self.append(missing)
        forked = copy.copy(self)
        forked._text = self._text.branched([0])
        forked._drop_tree()
        return forked

    def grow(self, tokens: list[int], parents: Sequence[int], **inputs: Tensor) -> Tensor:
        """See `TreeSession.grow`."""
        first = self.rows
        self._tokens += tokens
        for row, parent in enumerate(parents, first):
            self._paths.append([*(self._paths[parent] if parent >= 0 else []), row])
        self.rows = len(self._paths)
        leaves = sorted(set(range(first, self.rows)) - set(parents))
        memory, paths, ran = self._start([self._paths[leaf] for leaf in leaves], first)
        longest = max(map(len, paths))
        again = [] if ran else self._to_run
        batch = [
            [*again, *(self._tokens[row] for row in path), *[0] * (longest - len(path))]
            for path in paths
        ]
        hidden = self._passes(memory, batch, self.length + ran - len(again))[:, len(again) :]
        ends = {path[-1]: at for at, path in enumerate(paths) if len(path) == longest}
        self._grown_on = memory, ends
        places = {row: (at, i) for at, path in enumerate(paths) for i, row in enumerate(path)}
        at = upload(torch.tensor([places[row] for row in range(first, self.rows)]), self.device)
        return hidden[at[:, 0], at[:, 1]]

    def _start(self, paths: list[list[int]], first: int) -> tuple[Memory, list[list[int]], int]:
        """Return memory for these paths to start on, their rows to run, and how many it has run."""
        memory, ends = self._grown_on
        before = {sum(row < first for row in path) for path in paths}
        ran = min(before)
        starts = [path[ran - 1] for path in paths] if ran else [-1]
        if len(before) == 1 and all(start in ends for start in starts):
            sequences = [ends[start] for start in starts]
            if sequences != list(range(memory.sequences)):
                memory = memory.branched(sequences)
            return memory, [path[ran:] for path in paths], ran
        if self._to_run and (not self.chunks or len(self._to_run) * len(paths) > _AGAIN):
            self._passes(self._text, [self._to_run], self.length - len(self._to_run))
            self._to_run = []
        return self._text.branched([0] * len(paths)), paths, 0

    def commit(self, rows: list[int]) -> None:
        """See `TreeSession.commit`."""
        memory, ends = self._grown_on
        if rows and rows[-1] in ends:
            self._text = memory if memory.sequences == 1 else memory.branched([ends[rows[-1]]])
            self._to_run = []
        else:
            self._to_run = [*self._to_run, *(self._tokens[row] for row in rows)]
        self.length += len(rows)
        self._drop_tree()

    def _passes(self, memory: Memory, batch: list[list[int]], start: int) -> Tensor:
        """Run the `batch` of B sequences after `start` tokens; hidden states [B, n, H]."""
        width = len(batch[0])
        positions = upload(torch.arange(start, start + width)[None], self.device)
        tokens = upload(torch.tensor(batch), self.device)
        step = width if self.chunks or not start else 1
        return torch.cat(
            [
                self.forward(
                    tokens[:, at : at + step],
                    positions[:, at : at + step].expand(len(batch), -1),
                    None,
                    memory,
                )
                for at in range(0, width, step)
            ],
            1,
        )
