"""The drafter that is an EAGLE head: drafts from the target's features, and behind drafted tokens from its own.

The entry of a token pairs it with the feature one token earlier. So committing takes the target's features, and every
tree row, whose key came from a fed-back feature, is dropped and run again with them; expanding feeds back the
parent's output.
"""

from copy import copy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from decoding.drafter import DraftPoint, around
from decoding.model import CausalModel
from decoding.sampling import SamplingSetting, warp
from decoding.static import StaticShapes, session
from decoding.tree import DraftTree
from decoding.unread import UnreadTree
from draft_training.export import load_head
from draft_training.head import EagleHead


class EagleDrafter:
    """A `Drafter` around `head`. `DraftPoint.hidden` is the head's output feature, [H] of the target. static: its passes are of
    these shapes. `session` is there once a sequence has begun."""

    def __init__(self, head: EagleHead, static: StaticShapes | None = None):
        self.head, self.target = head.eval().requires_grad_(False), head.target
        self.vocab_size, self.max_context = self.target.vocab_size, self.target.max_context
        self.feature_layers = head.feature_layers
        if static is not None:
            self.max_context = min(self.max_context, static.context)
        self._new_session = partial(session, head.forward, head.device, head.dtype, len(head.layers), static)

    @classmethod
    def from_pretrained(cls, folder: str | Path, target: CausalModel, static: StaticShapes | None = None) -> "EagleDrafter":
        """The head in `folder`, next to the target it was trained with. Raises UserError as `load_head` does."""
        return cls(load_head(folder, target), static)

    def fork(self) -> "EagleDrafter":
        """See `Drafter.fork`."""
        return copy(self)

    def start(self, prompt: list[int], token: int, features: Tensor, setting: SamplingSetting) -> None:
        """See `Drafter.start`. A prompt of one token leaves the head nothing to say at it: there `previous` is no
        feature and a uniform q."""
        self.setting, self.session = setting, self._new_session()
        self.session.reset()
        blank = features.new_zeros(self.head.config.hidden_size)
        uniform = torch.full((self.vocab_size,), 1 / self.vocab_size, device=features.device)
        self._commit([*prompt[1:], token], features, before=DraftPoint(blank, uniform))

    def advance(self, tree: DraftTree, path: list[int], token: int, features: Tensor) -> None:
        """See `Drafter.advance`: row i of `features` goes with the i-th token committed."""
        self.session.keep([])
        self._commit([*(tree.tokens[node] for node in path), token], features, before=self.root)

    def expand(self, tree: DraftTree | UnreadTree, nodes: list[int]) -> None:
        """See `Drafter.expand`."""
        parents = [tree.parents[node] for node in nodes]
        features = torch.stack([self._outputs[parent] for parent in parents])
        first = self.session.rows
        outputs = self.session.grow(
            [tree.tokens[node] for node in nodes],
            [self._rows.get(parent, -1) for parent in parents],
            features=features[None],
        )
        q = self._distribution(outputs)
        for i, node in enumerate(nodes):
            self._rows[node], self._outputs[node], tree.q[node] = first + i, outputs[i], q[i]

    def expand_unread(self, tokens: Tensor, above: Tensor, sees: Tensor) -> Tensor:
        """See `Drafter.expand_unread`."""
        features = self._level.index_select(0, above)[None]
        self._level = self.session.grow(list(tokens.unbind()), sees, features=features)
        return self._distribution(self._level)

    def relabel(self, nodes: list[int]) -> None:
        """See `Drafter.relabel`."""
        self._rows = {i: self._rows[node] for i, node in enumerate(nodes) if node in self._rows}
        self._outputs = {i: self._outputs[node] for i, node in enumerate(nodes) if node in self._outputs}

    def advance_unread(self, tokens: Tensor, root: Tensor, features: Tensor) -> None:
        """See `Drafter.advance_unread`."""
        self.session.keep([])
        chain = list(range(-1, len(tokens) - 1))
        outputs = self.session.grow(list(tokens.unbind()), chain, features=self.head.combine(features)[None])
        ends = around(self.root.hidden, outputs, root)
        self.previous, self.root = map(DraftPoint, ends.unbind(), self._distribution(ends).unbind())
        self._stand()

    def settle(self, tokens: int) -> None:
        """See `Drafter.settle`."""
        self.session.keep(list(range(tokens)))

    def _commit(self, tokens: list[int], features: Tensor, before: DraftPoint) -> None:
        outputs = self.session.append(tokens, features=self.head.combine(features)[None])
        q = self._distribution(outputs[-2:])
        self.root = DraftPoint(outputs[-1], q[-1])
        self.previous = DraftPoint(outputs[-2], q[-2]) if len(tokens) > 1 else before
        self._stand()

    def _stand(self) -> None:
        """At the root, with nothing drafted."""
        self._rows: dict[int, int] = {}  # tree node -> row of the session
        self._outputs: dict[int, Tensor] = {0: self.root.hidden}  # tree node -> output feature
        self._level = self.root.hidden[None]  # output features at what was expanded unread last, first at the root

    def _distribution(self, outputs: Tensor) -> Tensor:
        return warp(self.head.logits(outputs), self.setting)
