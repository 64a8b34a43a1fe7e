"""A draft head as the draft of stages latency and traces, in the place of a small language model.

The head's row of a token pairs it with the feature one token earlier: along the text the target's,
below a root the head's own at the parent. So it runs super-trees level by level, and a trajectory
of L tokens has L - 1 rows. Its hidden state at a token is the output of the token's row; the first
token has none.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from nde_talf.data.traces.super_trees import Prefix, SuperTreeRows
from nde_talf.decoding.models.cache import KVCache
from nde_talf.decoding.models.static_shapes import StaticShapes
from nde_talf.decoding.super_tree import SuperTreeLayout
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.targets.target_trees import target_features


class HeadDraft:
    """A head with the interface of a draft model in the stages. Attributes: see `CausalModel`."""

    form = "masks"

    def __init__(self, head: EagleHead):
        self.head = self.module = head
        self.name, self.config, self.native = "draft head", head.config, head.target.native
        self.device, self.dtype = head.device, head.dtype
        self.hidden_size, self.layers = head.config.hidden_size, len(head.layers)
        self.vocab_size, self.max_context = head.target.vocab_size, head.target.max_context

    def drafter(self, static: StaticShapes | None) -> EagleDrafter:
        """The head in the decode loop."""
        drafter = EagleDrafter(self.head, static)
        drafter.model = self
        return drafter

    def prefix(self, target: Prefix) -> "HeadPrefix":
        """See `nde_talf.data.traces.super_trees.Draft`."""
        return HeadPrefix(self, target)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of output features [..., H]."""
        return self.head.logits(hidden)

    def hidden(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        """Run rows [B, n] of zero features: the time does not depend on features."""
        blank = torch.zeros(self.hidden_size, dtype=self.dtype, device=self.device)
        features = blank.expand(*tokens.shape, -1)
        return self.head(tokens, positions, mask, cache, features)


class HeadPrefix(Prefix):
    """A trajectory in a head. features: the target's, combined, [L, H]."""

    def __init__(self, model: HeadDraft, target: Prefix):
        head, tokens = model.head, target.tokens.to(model.device)
        features = target.hidden
        if layers := head.feature_layers:
            features = target_features(head.target, target.tokens[None], None, layers=layers)[1][0]
        self.model = model  # type: ignore[assignment]
        self.cache, self.slots, self.tokens = KVCache(), len(tokens) - 1, tokens
        self.features = head.combine(features.to(model.device))
        positions = torch.arange(self.slots, device=model.device)[None]
        outputs = head(tokens[None, 1:], positions, None, self.cache, self.features[None, :-1])[0]
        self.hidden = F.pad(outputs, (0, 0, 1, 0))

    def rows(self, roots: Tensor, layout: SuperTreeLayout) -> "HeadRows":
        """See `Prefix.rows`. A first token is no root."""
        return HeadRows(self, roots, layout)


class HeadRows(SuperTreeRows):
    """See `SuperTreeRows`."""

    def __init__(self, prefix: HeadPrefix, roots: Tensor, layout: SuperTreeLayout):
        super().__init__(prefix, roots, layout)
        self._head, self._at_roots = prefix.model.head, prefix.features[roots - 1]

    def run(self, tokens: Tensor, above: Tensor | None = None) -> Tensor:
        """See `SuperTreeRows.run`.

        Without `above`: the root's row, with the target's feature.
        """
        features = self._at_roots[:, None] if above is None else above
        return self._head(*self._place(tokens), self.cache, features)
