"""A batch of texts sampled together: prefilled one by one, without rows of ended texts.

Prompts are prefilled without padding, and what a prompt has in common with the one before, such as
a system turn or all of it, is not run again. In the batch they end at the same slot. A text that
ends leaves the batch, and the last row takes its place.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from nde_talf.decoding.cache import KVCache
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.sampling import Rng, SamplingSetting, locate, warp


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
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    width = cache.length
    mask = _padding(lengths, width, new_tokens, model) if int(lengths.min()) < width else None
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
    return [text[:-1] if text[-1] in ends else text for text in texts]


def _prefilled(
    model: CausalModel, prompts: Sequence[list[int]], more: int
) -> tuple[KVCache, Tensor]:
    """Run prompts; return their cache, with room for `more` tokens, and last states [B, H]."""
    width = max(map(len, prompts))
    cache, own = KVCache(model.layers, width + more), model.session()
    own.reset(width)
    states: list[Tensor] = []
    before: list[int] = []
    for row, prompt in enumerate(prompts):
        if prompt != before:
            shared = takewhile(lambda both: both[0] == both[1], zip(before, prompt, strict=False))
            own.length = min(len([*shared]), len(prompt) - 1)
            own.cache.commit(own.length)
            last, before = own.append(prompt[own.length :])[-1], prompt
        states.append(last)
        for index, layer in enumerate(own.cache.layers):
            if layer.states is None:  # it reads those of another layer
                continue
            its = layer.keys[:, :, : own.length], layer.values[:, :, : own.length]
            if row == 0:
                keys, values = (_blank(each, len(prompts), width) for each in its)
                cache.update(keys, values, index)
            to = cache.layers[index]
            to.keys[row, :, width - own.length : width] = its[0][0]
            to.values[row, :, width - own.length : width] = its[1][0]
    if model.windows:
        begins = [width - len(prompt) for prompt in prompts]
        slots = torch.arange(width)[None] - torch.tensor(begins)[:, None]
        cache.positions = slots.clamp_(0).to(model.device)
    return cache, torch.stack(states)


def _blank(states: Tensor, batch: int, width: int) -> Tensor:
    """Return zeros in the shape of `batch` rows of `states` [1, heads, n, D], for `width` slots."""
    return states.new_zeros(()).expand(batch, states.shape[1], width, states.shape[3])


def _padding(lengths: Tensor, width: int, more: int, model: CausalModel) -> Tensor:
    """Return the mask [B, 1, 1, width + more] that hides what stands before prompts in `width`."""
    slots = torch.arange(width + more, device=model.device)
    hidden = (slots < width - lengths[:, None])[:, None, None]
    blocked = torch.finfo(model.dtype).min
    return torch.zeros(hidden.shape, dtype=model.dtype, device=model.device).masked_fill_(
        hidden, blocked
    )


def _moved(going: list[int]) -> list[int]:
    """Return the rows that go on, the last ones in the places of those that end.

    Example: of 0 to 4 the rows 0, 3, 4 go on: 0, 3, 4 becomes [0, 4, 3].
    """
    kept, count = {*going}, len(going)
    movers = [at for at in going if at >= count]
    return [at if at in kept else movers.pop() for at in range(count)]
