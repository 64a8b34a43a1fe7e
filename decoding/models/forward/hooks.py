"""Residual streams of a transformers model's inner layers, beside its final hidden states."""

from collections.abc import Sequence
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn

from nde_talf.decoding.models.forward.transformers import TransformersForward


def with_features(run: TransformersForward, layers: Sequence[int], *inputs: Any) -> Tensor:
    """Run a pass; append the residual stream after each of `layers`.

    0 is before the first layer. It is collected by hooks, which makes no graph.
    """
    blocks = cast("nn.ModuleList", run.body.layers)
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
        for layer in layers
    ]
    try:
        hidden = run(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([hidden, *(each.to(hidden.device) for each in streams)], -1)
