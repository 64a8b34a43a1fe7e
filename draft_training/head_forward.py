"""The pass of a draft head as decoding runs it, with the decoder layer of the native forward."""

from collections.abc import Callable

from torch import Tensor

from decoding.cache import KVCache
from decoding.forward.attention import seen_in
from decoding.forward.fused import FusedPass
from decoding.forward.layer import DecoderLayer
from decoding.forward.native import FAMILIES, RotaryTable, slots_of
from decoding.windows import FULL
from draft_training.head import EagleHead


class HeadForward(FusedPass):
    """`EagleHead.forward` of a head that is not trained any more: equal numbers, fused weights. Two of one head are equal, as
    its methods are: static shapes keep what they know of a pass."""

    def __init__(self, head: EagleHead):
        self.head, self.added = head, FAMILIES[head.family.name].added
        super().__init__(head)

    def _parts(self) -> list[DecoderLayer]:
        head, config = self.head, self.head.config
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        self.layer, self.groups = DecoderLayer(head.layers[0], heads, shared, self.added, FULL), heads // shared
        kind = FULL if isinstance(head.rotary.rope_type, dict) else None
        self.table = RotaryTable(head.rotary, kind, self.layer.qkv.weight[:1])
        return [self.layer]

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None, features: Tensor
    ) -> Tensor:
        """See `EagleHead.forward`."""
        batch, count = tokens.shape
        slots, reach = slots_of(cache, count)
        if slots == count:
            self.refresh()
        self.table.reach(reach)
        inputs, residual = self.head.entries(tokens, features)
        seen = seen_in(None, mask, positions.expand(batch, -1), None, slots - count, residual.dtype, self.groups)
        attended = self.layer.attend(inputs.flatten(0, 1), batch, self.table.at(positions), seen, cache, 0)
        return self.layer.finish(residual.flatten(0, 1), attended).view(residual.shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadForward) and other.head is self.head

    def __hash__(self) -> int:
        return id(self.head)


def pass_of(head: EagleHead) -> Callable[..., Tensor]:
    """The pass that decoding runs: native where the target's is."""
    return HeadForward(head) if head.target.native is not None else head.forward
