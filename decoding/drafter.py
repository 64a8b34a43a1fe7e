"""Who proposes tokens: the `Drafter` protocol and the drafter that is a small language model.

A drafter keeps its own cache. `advance` tells it what was committed; it answers with the tree's root distribution;
`expand` asks for the distributions behind drafted nodes. What it needs of the target (EAGLE-style heads need features)
comes with `advance`.
"""

from copy import copy
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from decoding.model import CausalModel
from decoding.sampling import SamplingSetting, warp
from decoding.static import StaticShapes, session
from decoding.tree import DraftTree
from decoding.unread import UnreadTree


class DraftPoint(NamedTuple):
    """What the draft knows at one position: its hidden state [H_q] and its next-token distribution q [V]."""

    hidden: Tensor
    q: Tensor


class Drafter(Protocol):
    """Proposes next-token distributions for one sequence at a time. One that has `feature_layers` gets features of these
    layers of the target, concatenated (`CausalModel.reader`), in place of those after the final norm.

    A decoder asks for a `fork` for every sequence. A drafter without that method serves one sequence, the one that was begun
    last: reading on in an earlier one is refused (`decoding.turns`).
    """

    vocab_size: int
    max_context: int
    setting: SamplingSetting
    previous: DraftPoint  # at the token before the root
    root: DraftPoint  # at the root

    def fork(self) -> "Drafter":
        """This drafter for a sequence of its own, which `start` begins: it shares the weights, and no state of a sequence."""
        ...

    def start(self, prompt: list[int], token: int, features: Tensor, setting: SamplingSetting) -> None:
        """A new sequence: `prompt`, then the root `token`; `features` [len(prompt), H] are the target's at the prompt.
        `setting` is what q is warped with."""
        ...

    def advance(self, tree: DraftTree, path: list[int], token: int, features: Tensor) -> None:
        """Commit the accepted nodes `path` and the new root `token`; `features` [1 + len(path), H] are the target's at
        the old root and at the accepted nodes."""
        ...

    def expand(self, tree: DraftTree | UnreadTree, nodes: list[int]) -> None:
        """Fill `tree.q` at `nodes`, whose parents have been expanded (the root always is). An `UnreadTree`'s tokens are
        tensors."""
        ...

    def expand_unread(self, tokens: Tensor, above: Tensor, sees: Tensor) -> Tensor:
        """q [n, V] behind a level of drafted `tokens` [n] whose parents the host does not know: `above` [n], nodes of the level
        given last, or 0, the root. sees [n, m]: which of the m nodes of all levels given so far, these last, are on the way
        from below the root to each one, itself included. `advance_unread` has to follow."""
        ...

    def relabel(self, nodes: list[int]) -> None:
        """The tree is now `tree.of(nodes)`: its node i was nodes[i]."""
        ...

    def advance_unread(self, tokens: Tensor, root: Tensor, features: Tensor) -> None:
        """`advance` before the host knows how far: commit `tokens` [n] up to the new root, at index `root` [1]. Row i of
        `features` [n, H] is the target's at the token before token i. `settle` has to follow."""
        ...

    def settle(self, tokens: int) -> None:
        """`advance_unread` committed so many tokens, the new root included."""
        ...


def around(root: Tensor, states: Tensor, index: Tensor) -> Tensor:
    """[2, H]: of `states` [n, H] those before and at `index` [1]; the one before the first is that of the last `root` [H]."""
    return torch.cat([root[None], states]).index_select(0, torch.cat([index, index + 1]))


class LMDrafter:
    """A small causal LM with the target's vocabulary; static: its passes are of these shapes. `session` is there once a
    sequence has begun."""

    def __init__(self, model: CausalModel, static: StaticShapes | None = None):
        self.model = model
        self.vocab_size, self.max_context = model.vocab_size, model.max_context
        if static is not None:
            self.max_context = min(self.max_context, static.context)
        self._new_session = partial(session, model.hidden, model.device, model.dtype, model.layers, static)

    def fork(self) -> "LMDrafter":
        return copy(self)

    def start(self, prompt: list[int], token: int, features: Tensor, setting: SamplingSetting) -> None:
        self.setting, self.session = setting, self._new_session()
        self.session.reset()
        self._commit([*prompt, token])

    def advance(self, tree: DraftTree, path: list[int], token: int, features: Tensor) -> None:
        run = [node for node in path if node in self._rows]
        self.session.keep([self._rows[node] for node in run])
        # A node of the last level was never run; it goes in together with the new root.
        fresh = [tree.tokens[node] for node in path[len(run) :]]
        before = run[-1] if run else 0
        self._commit([*fresh, token], before=DraftPoint(self._hidden[before], tree.q[before]))

    def forget(self) -> None:
        """Drop all drafted nodes: the root is where it was."""
        self.session.keep([])
        self._rows, self._hidden = {}, {0: self.root.hidden}

    def expand(self, tree: DraftTree | UnreadTree, nodes: list[int]) -> None:
        parents = [self._rows.get(tree.parents[node], -1) for node in nodes]
        first = self.session.rows
        hidden = self.session.grow([tree.tokens[node] for node in nodes], parents)
        rows = zip(nodes, hidden.unbind(), self._distribution(hidden).unbind(), strict=True)
        for row, (node, own, q) in enumerate(rows, first):
            self._rows[node], self._hidden[node], tree.q[node] = row, own, q

    def expand_unread(self, tokens: Tensor, above: Tensor, sees: Tensor) -> Tensor:
        return self._distribution(self.session.grow(list(tokens.unbind()), sees))

    def relabel(self, nodes: list[int]) -> None:
        self._rows = {i: self._rows[node] for i, node in enumerate(nodes) if node in self._rows}
        self._hidden = {i: self._hidden[node] for i, node in enumerate(nodes) if node in self._hidden}

    def advance_unread(self, tokens: Tensor, root: Tensor, features: Tensor) -> None:
        self.session.keep([])  # the whole way is run again, as a chain: which rows lie on it is not known here
        hidden = self.session.grow(list(tokens.unbind()), list(range(-1, len(tokens) - 1)))
        ends = around(self.root.hidden, hidden, root)
        self.previous, self.root = map(DraftPoint, ends.unbind(), self._distribution(ends).unbind())
        self._rows, self._hidden = {}, {0: self.root.hidden}

    def settle(self, tokens: int) -> None:
        self.session.keep(list(range(tokens)))

    def _commit(self, tokens: list[int], before: DraftPoint | None = None) -> None:
        hidden = self.session.append(tokens)
        q = self._distribution(hidden[-2:])
        self.root = DraftPoint(hidden[-1], q[-1])
        self.previous = DraftPoint(hidden[-2], q[-2]) if len(tokens) > 1 else before
        self._rows: dict[int, int] = {}  # tree node -> row of the session
        self._hidden: dict[int, Tensor] = {0: hidden[-1]}

    def _distribution(self, hidden: Tensor) -> Tensor:
        return warp(self.model.logits(hidden), self.setting)
