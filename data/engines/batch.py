"""Sample a batch of texts, prefilled one by one, without rows of ended texts.

Prompts are prefilled without padding. A prefix shared with the previous prompt, such as a system
turn, is not run again. In the batch all prompts end at the same slot. When a text ends, its row is
removed, and the last row takes its place.
"""

import math
from collections.abc import Callable, Sequence
from itertools import takewhile

import psutil
import torch
from torch import Tensor

from nde_talf.decoding.models.cache import KVCache
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.sampling.rng import Rng, SamplingSetting, locate, warp


def sample_batch(
    model: CausalModel,
    prompts: Sequence[list[int]],
    setting: SamplingSetting,
    new_tokens: int,
    rngs: Sequence[Rng],
    ends: frozenset[int],
    tell: Callable[[int, int], None],
) -> list[list[int]]:
    """Sample up to `new_tokens` tokens after each prompt, without the token that ends a text.

    Each row draws from a generator of its own, so that its text depends on the other rows through
    no more than the rounding of a pass.

    Args:
        model: scores trees by masks.
        prompts: neighbours share what they begin with, as far as possible.
        setting: how tokens are drawn.
        new_tokens: at least 1.
        rngs: one for each prompt.
        ends: tokens that end a text.
        tell: gets the numbers of texts that ended and of tokens that were drawn, step by step.
    """
    cache, hidden = _prefilled(model, prompts, new_tokens)
    texts: list[list[int]] = [[] for _ in prompts]
    rows = [*range(len(prompts))]  # of the batch, as numbers of prompts
    width, lengths = cache.length, torch.tensor([*map(len, prompts)], device=model.device)
    mask = _hiding(model, lengths, width, new_tokens)
    for step in range(1, new_tokens + 1):
        weights = warp(model.logits(hidden), setting)
        drawn = locate(weights, range(len(rows)), [rngs[row].uniform() for row in rows])
        for row, token in zip(rows, drawn, strict=True):
            texts[row].append(token)
        going = [at for at, token in enumerate(drawn) if token not in ends and step < new_tokens]
        tell(len(rows) - len(going), len(rows))
        if not going:
            break
        if len(going) < len(rows):
            order = _moved(going)
            cache.keep_rows(order)
            rows, drawn = [rows[at] for at in order], [drawn[at] for at in order]
            lengths, mask = lengths[order], None if mask is None else mask[order]
        tokens = torch.tensor(drawn, device=model.device)[:, None]
        seen = None if mask is None else mask[..., : width + step]
        hidden = model.hidden(tokens, lengths[:, None] + (step - 1), seen, cache)[:, -1]
    return [text[:-1] if text and text[-1] in ends else text for text in texts]


def _hiding(model: CausalModel, lengths: Tensor, width: int, more: int) -> Tensor | None:
    """Hide the slots before shorter prompts; None where all prompts are equally long."""
    if len(lengths.unique()) == 1:
        return None
    before = torch.arange(width + more, device=model.device) < width - lengths[:, None]
    mask = torch.zeros(before.shape, dtype=model.dtype, device=model.device)
    return mask.masked_fill_(before, torch.finfo(model.dtype).min)[:, None, None]


def _prefilled(
    model: CausalModel, prompts: Sequence[list[int]], more: int
) -> tuple[KVCache, Tensor]:
    """Run prompts; return their cache, with room for `more` tokens, and last states [B, H]."""
    width = max(map(len, prompts))
    free = psutil.virtual_memory().available if model.device.type == "cpu" else math.inf
    cache, own = KVCache(model.layers, width + more), model.session()
    own.reset(width)
    ends: list[Tensor] = []
    before: list[int] = []
    for row, prompt in enumerate(prompts):
        if prompt != before:
            shared = takewhile(lambda both: both[0] == both[1], zip(before, prompt, strict=False))
            own.length = min(len([*shared]), len(prompt) - 1)
            own.cache.commit(own.length)
            last, before = own.append(prompt[own.length :])[-1], prompt
        ends.append(last)
        for index, layer in enumerate(own.cache.layers):
            if layer.states is None:  # it reads another layer's
                continue
            both = layer.keys[:, :, : own.length], layer.values[:, :, : own.length]
            if row == 0:
                held = model.layers * len(prompts) * (width + more)
                keys, values = _batch_of(both, len(prompts), width, held, free)
                cache.update(keys, values, index)
            to = cache.layers[index]
            for into, states in zip((to.keys, to.values), both, strict=True):
                into[row, :, width - own.length : width] = states[0]
    if model.windows:
        slots = [[*range(len(prompt) - width, len(prompt))] for prompt in prompts]
        cache.positions = torch.tensor(slots, device=model.device).clamp_(0)
    return cache, torch.stack(ends)


def _batch_of(
    both: tuple[Tensor, Tensor], count: int, width: int, slots: int, free: float
) -> list[Tensor]:
    """Make keys and values [count, heads, width, D] like `both`, of which `slots` will be held.

    Raises MemoryError where these need more than `free` bytes: Linux would end the process.
    """
    if slots * sum(each[0, :, 0].nbytes for each in both) > free:
        raise MemoryError("the keys and values of a batch")
    return [each.new_zeros(count, each.shape[1], width, each.shape[-1]) for each in both]


def _moved(going: list[int]) -> list[int]:
    """Return the rows that continue, the last ones in the places of rows that end.

    Example: of 0 to 4 the rows 0, 3, 4 continue: 0, 3, 4 becomes [0, 4, 3].
    """
    kept, count = {*going}, len(going)
    movers = [at for at in going if at >= count]
    return [at if at in kept else movers.pop() for at in range(count)]
