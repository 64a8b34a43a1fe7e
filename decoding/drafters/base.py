"""Drafters, which propose tokens: the base classes.

A drafter has its own cache. `start` begins a sequence; then each step asks for the distributions
after drafted nodes (`expand`) and says what was committed (`advance`). What a drafter needs of the
target (EAGLE-style heads need features) is an argument of `start` and `advance`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.models.tree_session import Shapes, TreeSession
from nde_talf.decoding.sampling.logits_processing import Processed
from nde_talf.decoding.sampling.rng import SamplingSetting, warp
from nde_talf.decoding.sampling.sampling_setting import feature_setting
from nde_talf.decoding.tree import Accepted, DraftTree


class DraftPoint:
    """Draft hidden state `hidden` [H_q] and distribution `q` [V] at one position, computed lazily.

    Both are given as functions, which are called at the first use.
    """

    def __init__(self, hidden: Callable[[], Tensor], q: Callable[[], Tensor]):
        self._hidden, self._q = hidden, q

    @cached_property
    def hidden(self) -> Tensor:
        """Return the hidden state [H_q]."""
        return self._hidden()

    @cached_property
    def q(self) -> Tensor:
        """Return the next-token distribution [V]."""
        return self._q()


class Drafter:
    """Proposes next-token distributions for one sequence at a time.

    `start`, `expand` and `advance` have to be written; the others have a default.

    Attributes:
        max_context: of its model.
        feature_layers: layers of the target whose features it gets, concatenated
            (`Model.reader`); none: the features after the final norm.
        takes_features: False: it looks at no features, and `advance` gets any.
        model: that it runs, for checks of its `device` and of a policy that was trained for one;
            None: it runs none.
        processed: what changes its logits by the text; the decoder sets it.
        setting: what q is warped with.
        previous: its point at the token before the root.
        root: its point at the root.
    """

    vocab_size: int
    max_context: int = 1 << 62
    feature_layers: tuple[int, ...] = ()
    takes_features: bool = True
    model: Any = None
    processed: Processed | None = None
    setting: SamplingSetting
    previous: DraftPoint
    root: DraftPoint

    @property
    def native(self) -> bool:
        """Return True if it runs a model whose passes are native, so that graphs can hold them."""
        return False

    def fork(self) -> Any:
        """Return a drafter for another sequence, which `start` begins.

        It shares the weights, but no state. The default is a shallow copy, which suits a drafter
        whose `start` makes all that it changes later.
        """
        return copy(self)

    def start(
        self, prompt: list[int], token: int, features: Tensor, setting: SamplingSetting
    ) -> None:
        """Begin a sequence: `prompt`, then the root `token`.

        Args:
            prompt: token ids before the root.
            token: token id of the root.
            features: [len(prompt), H], the target's at the prompt.
            setting: what q is warped with; the target's may be another one
                (`nde_talf.decoding.sampling.sampling_setting.drafted_under`).
        """
        raise NotImplementedError

    def expand(self, tree: DraftTree, nodes: list[int]) -> None:
        """Fill `tree.q` at `nodes`, whose parents have been expanded (the root always is)."""
        raise NotImplementedError

    def rerank(self, nodes: list[int]) -> None:
        """Renumber after pruning: new node i was nodes[i]."""

    def advance(self, accepted: Accepted, features: Tensor) -> None:
        """Go on to the new root, with nothing drafted after it, by running `accepted.tokens`.

        Args:
            accepted: what the last step committed.
            features: row i is the target's [H] at the token before accepted.tokens[i].
        """
        raise NotImplementedError

    def seen(self) -> tuple[Tensor, Tensor]:
        """Return q [V] at the token before the root and at the root, for selector features."""
        return self.previous.q, self.root.q


class SessionDrafter(Drafter):
    """A drafter whose model runs in a `TreeSession`.

    `session` is there once a sequence has begun.

    Args:
        new_session: makes the session of a sequence.
        logits: from hidden states [n, H] to logits [n, V].
        max_context: of the model.
        static: the shapes of its passes.
    """

    session: TreeSession
    lag: int = 0
    """Number of tokens that its cache is behind the text."""
    _rows: dict[int, int]  # tree node -> row of the session
    _states: list[
        Tensor
    ]  # hidden states at the root [1, H], then at the rows of the session, a tensor a pass

    def __init__(
        self,
        new_session: Callable[[], TreeSession],
        logits: Callable[[Tensor], Tensor],
        max_context: int,
        static: Shapes | None,
    ):
        self._new_session, self._logits = new_session, logits
        self.max_context = max_context if static is None else min(max_context, static.context)

    def expand(self, tree: DraftTree, nodes: list[int]) -> None:
        """See `Drafter.expand`."""
        first, tokens = self.session.rows, [tree.tokens[node] for node in nodes]
        parents = [self._rows.get(tree.parents[node], -1) for node in nodes]  # -1: the root
        hidden = self.session.grow(tokens, parents, **self._inputs(parents))
        self._rows.update(zip(nodes, range(first, self.session.rows), strict=True))
        self._states.append(hidden)
        texts = [] if self.processed is None else self.processed.texts(tree, nodes)
        for node, row in zip(nodes, self.distribution(hidden, texts).unbind(), strict=True):
            tree.q[node] = row

    def rerank(self, nodes: list[int]) -> None:
        """See `Drafter.rerank`."""
        self._rows = {i: self._rows[node] for i, node in enumerate(nodes) if node in self._rows}

    def seen(self) -> tuple[Tensor, Tensor]:
        """See `Drafter.seen`: unwarped where q is drawn at temperature 0.

        Those rows are computed when asked for, from the hidden states.
        """
        look = feature_setting(self.setting)
        if look is self.setting:
            return self.previous.q, self.root.q
        hidden = torch.stack([self.previous.hidden, self.root.hidden])
        previous, root = warp(self._logits(hidden), look)
        return previous, root

    @property
    def native(self) -> bool:
        """See `Drafter.native`."""
        return self.model.native is not None

    def inputs(self, states: Tensor, drafted: bool = True) -> dict[str, Tensor]:
        """Return the model's inputs at tokens, besides these.

        states: [n, ...] at the tokens before them: its own hidden states after `drafted` ones, or
        else the target's features.
        """
        return {}

    def _inputs(self, parents: list[int]) -> dict[str, Tensor]:
        """Return `inputs` at nodes with these parents: rows of the session, -1 for the root."""
        return {}

    def _begin(self, setting: SamplingSetting) -> None:
        self.setting, self.session = setting, self._new_session()

    def _go_on(self, tokens: list[int], before: DraftPoint | None, **inputs: Tensor) -> None:
        """Run `tokens`, the last of which is the new root.

        before: the point before the first token. A sequence that begins with two or more tokens
        does not need it.
        """
        hidden = self.session.append(tokens, **inputs)
        self._rows, self._states, both_rows = {}, [hidden[-1:]], list[Tensor]()
        text = [] if self.processed is None else self.processed.text
        end = len(text)  # it may grow before q is asked for

        def q(row: int) -> Tensor:
            """Return q before the root (-2) or at it (-1): both rows, unless the root is first."""
            if row + (len(both_rows[-1]) if both_rows else 0) < 0:
                texts = [text[: end + at + 1] for at in range(row, 0)]
                both_rows.append(self.distribution(hidden[row:], texts))
            return both_rows[-1][row]

        self.root = DraftPoint(lambda: hidden[-1], lambda: q(-1))
        if hidden.shape[0] > 1:
            self.previous = DraftPoint(lambda: hidden[-2], lambda: q(-2))
        elif before is not None:
            self.previous = before

    def distribution(self, hidden: Tensor, texts: list[list[int]]) -> Tensor:
        """Q [n, V] of hidden states [n, H], after `texts` where these change logits."""
        logits = self._logits(hidden)
        if self.processed is not None:
            processed = self.processed(texts, logits)
            # A head may know none of the tokens that are allowed; what it drafts is then rejected.
            none = processed.isneginf().all(-1, keepdim=True)
            logits = torch.where(none, logits, processed)
        return warp(logits, self.setting)
