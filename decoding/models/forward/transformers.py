"""The forward pass as transformers runs it, for every family that takes an additive mask."""

from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

from nde_talf.decoding.models.cache import KVCache
from nde_talf.decoding.models.forward.windows import Window, masks

if TYPE_CHECKING:
    from transformers import PretrainedConfig


FULL = "full_attention"
_SIZES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
WINDOW_KEYS = tuple(_SIZES.values())
"""Keys of a configuration that hold the sizes."""
MEMORY = ("cache", "past_key_values", "cache_params", "state", "mems")
"""Names of a pass's argument and result that hold its memory; "cache" since transformers 5.24."""


def optional(owner: Any, name: str, default: Any = None) -> Any:
    """Read a field that not every transformers configuration or module has."""
    return getattr(owner, name, default)


def layer_kinds(config: "PretrainedConfig") -> set[str]:
    """Return the kinds of attention of a model's layers, in transformers' words."""
    if kinds := optional(config, "layer_types"):
        return set(kinds)
    # Older families have one kind and no list. A key that the family does not know (in a file of
    # another one) does nothing.
    sliding = optional(config, "sliding_window") and hasattr(type(config), "sliding_window")
    return {
        "sliding_attention" if sliding and optional(config, "use_sliding_window", True) else FULL
    }


def windows(config: "PretrainedConfig") -> dict[str, Window | None]:
    """Return the window of each kind of layer, None where all is seen.

    Empty where that is so of all layers.
    """
    sizes = {kind: optional(config, _SIZES.get(kind, "")) for kind in sorted(layer_kinds(config))}
    if not any(sizes.values()):
        return {}
    return {
        kind: Window(size, kind == "chunked_attention") if size else None
        for kind, size in sizes.items()
    }


def wide_mask(mask: Tensor, columns: int) -> Tensor:
    """Widen a mask [..., n, m] about the last m of `columns` slots to all of them.

    Every row sees the slots before.
    """
    return F.pad(mask, (columns - mask.shape[-1], 0)) if mask.shape[-1] < columns else mask


class TransformersForward:
    """The pass of a transformers model's body; features are collected by `with_features`.

    takes: names of its arguments. memory: the name of the cache's.
    """

    def __init__(self, body: nn.Module):
        self.body = body
        self.takes = set(signature(type(body).forward).parameters)
        self.memory = next((name for name in MEMORY if name in self.takes), "past_key_values")

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache | None,
        windows: dict[str, Window | None],
    ) -> Tensor:
        """See `NativeForward.__call__`."""
        if mask is not None and cache is not None:
            mask = wide_mask(mask, cache.columns(tokens.shape[1]))
        seen: Tensor | dict[str, Tensor] | None = mask
        if windows:
            rows = positions.expand(len(tokens), -1)
            columns = rows if cache is None else cache.place(rows)
            seen = masks(windows, mask, rows, columns)
        return self.body(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=seen,
            use_cache=cache is not None,
            **{self.memory: cache},
        ).last_hidden_state
