"""Tiny models that run a pass once: laws are found by decoding one prompt hundreds of times, and
most passes come again.
"""

import torch

from nde_talf.decoding.models.static_shapes import FixedCache

LONGEST = 24  # tokens of context up to which passes are worth remembering


def memoized(forward):
    """`forward(tokens, positions, mask, cache, **inputs)`, which recalls the states of a pass, and
    what it wrote into the cache, where all that it reads is the same to the bit: its arguments, and
    the keys and values in the cache.
    """
    known = {}

    def run(tokens, positions, mask, cache, **inputs):
        if int(positions.max()) >= LONGEST:
            return forward(tokens, positions, mask, cache, **inputs)
        read, written = places(cache, mask, tokens.shape[1])
        held = (states for layer in at(cache, read).values() for states in layer)
        parts = (tokens, positions, mask, read, written, *inputs.values(), *held)
        key = tuple(x if x is None else (*x.shape, x.contiguous().numpy().tobytes()) for x in parts)
        if key not in known:
            states = forward(tokens, positions, mask, cache, **inputs)
            known[key] = states, at(cache, written), cache.positions is not None
        else:
            if known[key][2]:
                cache.place(positions)
            for number, layer in known[key][1].items():
                cache.update(*layer, number)
        return known[key][0].clone()

    return run


def at(cache, slots):
    """Copies of the keys and values at `slots`, by the number of the layer that holds its own."""
    return {
        number: (layer.keys[:, :, slots], layer.values[:, :, slots])
        for number, layer in enumerate(cache.layers)
        if len(slots) and layer.is_initialized
    }


def places(cache, mask, rows):
    """The slots of the cache that a pass over `rows` reads, and those that it writes."""
    if not isinstance(cache, FixedCache):
        return torch.arange(cache.length), torch.arange(cache.length, cache.length + rows)
    slots, nowhere = cache.target.slots, cache.capacity - 1
    if cache.target.alone:
        return slots[:0], slots
    read = (mask[0, 0, slots != nowhere] == 0).any(0)  # what padded rows read comes to nothing
    read[slots] = False
    return read.nonzero().flatten(), slots


def memoized_model(model):
    """The model itself, which from now on recalls its passes.

    Not with features of inner layers: they are taken by hooks.
    """
    model.hidden = memoized(model.hidden)
    return model
