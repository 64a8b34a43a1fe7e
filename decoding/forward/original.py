"""The forward pass as transformers runs it, for every family that takes an additive mask."""

from collections.abc import Sequence
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn

from nde_talf.decoding.cache import KVCache
from nde_talf.decoding.windows import Window, row_masks, wide_mask


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
                seen = row_masks(windows, mask, rows, columns)
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
