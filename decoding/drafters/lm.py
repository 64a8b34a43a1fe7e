"""The drafter that is a small language model."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from nde_talf.decoding.common.arguments import checked
from nde_talf.decoding.drafters.base import DraftPoint, SessionDrafter
from nde_talf.decoding.models.base import Model
from nde_talf.decoding.models.tree_session import Shapes
from nde_talf.decoding.sampling.rng import SamplingSetting
from nde_talf.decoding.tree import Accepted


class LMDrafter(SessionDrafter):
    """A small causal LM with the target's vocabulary; static: its passes are of these shapes."""

    takes_features = False

    @checked
    def __init__(self, model: Model, static: Shapes | None = None):
        self.model, self.vocab_size = model, model.vocab_size
        session = partial(model.session, static=static)
        super().__init__(session, model.logits, model.max_context, static)

    def start(
        self, prompt: list[int], token: int, features: Tensor, setting: SamplingSetting
    ) -> None:
        """See `Drafter.start`."""
        self._begin(setting)
        self._go_on([*prompt, token], None)

    def advance(self, accepted: Accepted, features: Tensor) -> None:
        """See `Drafter.advance`.

        Accepted nodes that were expanded are in the cache already. A node of the last level was
        never run; it goes in together with the new root.
        """
        rows = [self._rows[node] for node in accepted.path if node in self._rows]
        states, before = self._states, self.root
        self.session.commit(rows)
        if rows:
            q = accepted.tree.q_at(accepted.path[len(rows) - 1])
            before = DraftPoint(lambda: torch.cat(states)[rows[-1] + 1], lambda: q)
        self._go_on(accepted.tokens[len(rows) :], before)
