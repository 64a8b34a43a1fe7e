"""EAGLE's drafter: drafts from the target's features, and after drafted tokens from its own.

The entry of a token pairs it with the feature one token earlier. Expanding a tree feeds back the
parent's output. Committed tokens are run again with the target's features, so all rows of a tree
are dropped after each step.
"""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nde_talf.decoding.common.arguments import checked
from nde_talf.decoding.device import upload
from nde_talf.decoding.drafters.base import DraftPoint, SessionDrafter
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.static_shapes import StaticShapes
from nde_talf.decoding.models.tree_session import TreeSession
from nde_talf.decoding.sampling.rng import SamplingSetting, warp
from nde_talf.decoding.tree import Accepted
from nde_talf.draft_training.export.head_format import load_head
from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.model.head_forward import run_native


class EagleDrafter(SessionDrafter):
    """A `Drafter` around `head`.

    `DraftPoint.hidden` is the head's output feature [H]. static: shapes of all passes.
    """

    lag = 1

    def __init__(self, head: EagleHead, static: StaticShapes | None = None):
        self.head, self.target = head.eval(), head.target
        run_native(head)
        self.vocab_size, self.feature_layers = self.target.vocab_size, head.feature_layers
        make = TreeSession if static is None else static.session
        session = partial(make, head.forward, head.device, head.dtype, len(head.layers))
        super().__init__(session, head.logits, self.target.max_context, static)

    @classmethod
    @checked
    def from_pretrained(cls, folder: str | Path, target: CausalModel) -> "EagleDrafter":
        """The head in `folder`, or of a name on a hub, next to the target it was trained with.

        Raises UserError as `load_head` does.
        """
        return cls(load_head(folder, target))

    def start(
        self, prompt: list[int], token: int, features: Tensor, setting: SamplingSetting
    ) -> None:
        """See `Drafter.start`.

        After a prompt of one token the head has no entry: `previous` is then a zero feature with a
        uniform q.
        """
        self._begin(setting)
        size, vocabulary = self.head.config.hidden_size, self.vocab_size
        self._go_on(
            [*prompt[1:], token],
            DraftPoint(
                lambda: features.new_zeros(size),
                lambda: torch.full((vocabulary,), 1 / vocabulary, device=features.device),
            ),
            **self.inputs(features, drafted=False),
        )

    def advance(self, accepted: Accepted, features: Tensor) -> None:
        """See `Drafter.advance`: row i of `features` goes with the i-th token committed."""
        self.session.commit([])
        self._go_on(accepted.tokens, self.root, **self.inputs(features, drafted=False))

    def distribution(self, hidden: Tensor, texts: list[list[int]]) -> Tensor:
        """See `SessionDrafter.distribution`: warped among the tokens that the head can draft."""
        vocabulary = self.head.vocabulary
        if vocabulary is None or self.processed is not None:
            return super().distribution(hidden, texts)
        q = warp(self.head.drafted_logits(hidden), self.setting)
        return q.new_zeros(len(q), self.vocab_size).index_copy_(-1, vocabulary, q)

    @property
    def native(self) -> bool:
        """See `SessionDrafter.native`."""
        return self.head.native is not None

    def inputs(self, states: Tensor, drafted: bool = True) -> dict[str, Tensor]:
        """See `SessionDrafter.inputs`."""
        return {"features": (states if drafted else self.head.combine(states))[None]}

    def _inputs(self, parents: list[int]) -> dict[str, Tensor]:
        """Return the output feature of every node's parent."""
        states = torch.cat(self._states)  # the root's first
        at = upload(torch.tensor([1 + parent for parent in parents]), states.device)
        return self.inputs(states.index_select(0, at))
