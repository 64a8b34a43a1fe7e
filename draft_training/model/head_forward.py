"""Native pass of a draft head, for decoding."""

from contextlib import suppress
from functools import partial

from torch import Tensor

from nde_talf.decoding.models.cache import KVCache
from nde_talf.decoding.models.forward.attention import seen_in
from nde_talf.decoding.models.forward.fused_weights import FusedPart, NotNativeError
from nde_talf.decoding.models.forward.layer import DecoderLayer
from nde_talf.decoding.models.forward.native import FusedPass
from nde_talf.decoding.models.forward.onednn import linear
from nde_talf.decoding.models.forward.rotary import RotaryTable
from nde_talf.decoding.models.forward.transformers import FULL
from nde_talf.decoding.registry import FAMILIES
from nde_talf.draft_training.model.head import EagleHead


class HeadForward(FusedPass):
    """`EagleHead.forward` with fused weights and without gradients."""

    def __init__(self, head: EagleHead):
        self.head, self.added = head, FAMILIES[head.family.name].added
        self.way = head.target.native.way if head.target.native else "plain"
        super().__init__(head)

    def _parts(self) -> list[FusedPart]:
        head, config = self.head, self.head.config
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        self.groups = heads // shared
        product = partial(linear, way=self.way)
        self.layer = DecoderLayer(head.layers[0], heads, shared, self.added, FULL, product=product)
        kind = FULL if isinstance(head.rotary.rope_type, dict) else None
        self.tables = {FULL: RotaryTable(head.rotary, kind, head.fc.weight.detach()[:1])}
        return self.layer.parts

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache,
        features: Tensor,
    ) -> Tensor:
        """See `EagleHead.forward`."""
        (batch, count), table = tokens.shape, self.tables[FULL]
        slots = cache.columns(count)
        if slots == count:
            self.begin(cache)
        table.reach(slots)
        inputs, residual = self.head.entries(tokens, features)
        at, before = positions.expand(batch, -1), slots - count
        seen = seen_in(None, mask, at, None, before, residual.dtype, self.groups)
        attended = self.layer.attend(
            inputs.flatten(0, 1), batch, table.at(positions), seen, cache, 0
        )
        states = self.layer.finish(residual.flatten(0, 1), attended)
        return self.head.output(states.view(residual.shape))

    def __deepcopy__(self, memo: dict) -> None:
        """Return None: a copy of a head has weights of its own, and no native pass yet."""


def run_native(head: EagleHead) -> None:
    """Make decoding run `head` natively, where its target is run natively.

    Passes that need gradients stay with transformers' layer, as does a layer without a native pass.
    """
    if head.target.native is not None and head.native is None:
        with suppress(NotNativeError):
            head.native = HeadForward(head)
