"""The forward pass as transformers runs it, for every family that takes an additive mask.

Layers may have windows, through which they do not see the full text. With a window of 3 a row at
position i sees the positions i - 2, i - 1 and i. With chunks of 3 it sees those j up to i with
j // 3 == i // 3. In a tree it sees of these the text and its ancestors: a tree deeper than the
window hides its own top. Positions count, not slots of the cache: siblings share one.
"""

from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nde_talf.decoding.cache import KVCache

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FULL = "full_attention"
_SIZES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
WINDOW_KEYS = tuple(_SIZES.values())
"""Where a configuration has the sizes."""


def optional(owner: Any, name: str, default: Any = None) -> Any:
    """Read a field that not every transformers configuration or module has."""
    return getattr(owner, name, default)


class Window(NamedTuple):
    """Window over `size` tokens: the last ones, or where `chunked` those of the row's chunk."""

    size: int
    chunked: bool = False

    def hides(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return True where the window hides `columns` from rows at these positions.

        Both broadcast.
        """
        if self.chunked:
            return rows // self.size != columns // self.size
        return rows - columns >= self.size

    def edges(self, tree: int, width: int) -> tuple[int, int]:
        """Find the slots that a tree of `width` rows sees, which begins at slot `tree`.

        Returns:
            The first slot that some row sees, and the first that all rows see.
        """
        return max(0, tree + 1 - self.size), max(0, min(tree, tree + width - self.size))

    def masked(
        self, mask: Tensor, rows: Tensor, columns: Tensor | None, parts: tuple[int, int, int]
    ) -> Tensor:
        """Extend the mask of a tree's rows by the window's edge, and hide what lies outside.

        Args:
            mask: additive, [B or 1, 1, n, width], over the tree's slots.
            rows: positions of the rows, [B, n].
            columns: positions of the slots, [B, slots].
            parts: the first slot that a row sees, the first that the mask leaves out, and the first
                of the tree.
        """
        (first, open, tree), width = parts, mask.shape[-1]
        if open > first:
            mask = F.pad(mask, (open - first, 0))
        if tree and self.edges(tree, width)[1] <= first and width <= self.size:
            return mask  # all rows see all that is left
        assert columns is not None
        return self.cut(mask, rows, torch.cat([columns[:, first:open], columns[:, tree:]], 1))

    def cut(self, mask: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Hide in `mask` [.., n, m] the columns outside the windows of rows at these positions."""
        hidden = self.hides(rows[:, None, :, None], columns[:, None, None])
        return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def layer_kinds(config: "PretrainedConfig") -> set[str]:
    """The kinds of attention of a model's layers, in transformers' words."""
    if kinds := optional(config, "layer_types"):
        return set(kinds)
    # Older families have one kind and no list. A key that the family does not know (in a file of
    # another one) does nothing.
    sliding = optional(config, "sliding_window") and hasattr(type(config), "sliding_window")
    return {
        "sliding_attention" if sliding and optional(config, "use_sliding_window", True) else FULL
    }


def windows(config: "PretrainedConfig") -> dict[str, Window | None]:
    """The window of each kind of layer, None where all is seen.

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
    """The pass of a transformers model's body. Called as `NativeForward` is."""

    def __init__(self, body: nn.Module):
        self.body = body

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache | None,
        windows: dict[str, Window | None],
        features: Sequence[int] = (),
    ) -> Tensor:
        """See `NativeForward.__call__`. Features are collected by hooks, which makes no graph."""
        if features:
            return self._hooked(tokens, positions, mask, cache, windows, features)
        if mask is not None and cache is not None:
            mask = wide_mask(mask, cache.columns(tokens.shape[1]))
        seen: Tensor | dict[str, Tensor] | None = mask
        if windows:
            rows = positions.expand(len(tokens), -1)
            columns = rows if cache is None else cache.place(rows)
            if mask is not None:
                masks = {
                    kind: mask if window is None else window.cut(mask, rows, columns)
                    for kind, window in windows.items()
                }
                seen = masks if len(masks) > 1 else next(iter(masks.values()))
        return self.body(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=seen,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state

    def _hooked(self, *inputs: Any) -> Tensor:
        *rest, features = inputs
        blocks = cast("nn.ModuleList", self.body.layers)
        streams: list[Tensor] = []
        here = get_ident()  # a hook is called for the passes of all threads

        def before(module: nn.Module, args: tuple, kwargs: dict[str, Tensor] = {}) -> None:  # noqa: B006 (it is not changed)
            # Without kwargs where torch calls it for another thread while this one takes it away.
            if get_ident() == here:
                streams.append(args[0] if args else kwargs["hidden_states"])

        def after(module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
            if get_ident() == here:
                streams.append(output if isinstance(output, Tensor) else output[0])

        hooks = [
            (
                blocks[layer - 1].register_forward_hook(after)
                if layer
                else blocks[0].register_forward_pre_hook(before, with_kwargs=True)
            )
            for layer in features
        ]
        try:
            hidden = self(*rest)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([hidden, *streams], -1)
