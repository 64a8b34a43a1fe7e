"""The ends of the loop: a prompt goes in, blocks of tokens come out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.stats import First, Generation, Step, peak_bytes

TokenIds: TypeAlias = Sequence[int] | Tensor | np.ndarray
TREE_SLOTS = 64
"""Slots for a tree in flight, after the tokens asked for."""


@dataclass
class Block:
    """Tokens committed at once: the first `accepted` were drafted, the rest is the target's own."""

    tokens: list[int]
    accepted: int


@dataclass
class Stream:
    """Iterate for the blocks of a generation, which `generation` holds as far as it has come.

    Each stream has its own cache and its own fork of the drafter, so that several can be read in
    turn; see `nde_talf.decoding.loop.SpeculativeDecoder`.
    """

    blocks: Iterator[Block]
    generation: Generation

    def __iter__(self) -> Iterator[Block]:
        return self.blocks


def blocks_of(
    steps: Iterator[First | Step],
    max_new_tokens: int,
    stop_tokens: frozenset[int],
    device: torch.device,
) -> Stream:
    """Cut the steps of a decoder into blocks that end at a stop token or at `max_new_tokens`."""
    generation = Generation()
    return Stream(_cut(steps, max_new_tokens, stop_tokens, device, generation), generation)


def _cut(
    steps: Iterator[First | Step],
    max_new_tokens: int,
    stop_tokens: frozenset[int],
    device: torch.device,
    generation: Generation,
) -> Iterator[Block]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        for step in steps:
            if isinstance(step, Step):
                generation.steps.append(step)
                tokens, accepted = step.tokens, step.tau
            else:
                tokens, accepted, generation.prefill_seconds = [step.token], 0, step.seconds
                generation.peak_bytes = peak_bytes(device)
            generation.recorded += step.recorded
            tokens = tokens[: max_new_tokens - len(generation.tokens)]
            stops = [index for index, token in enumerate(tokens) if token in stop_tokens]
            tokens = tokens[: stops[0] + 1] if stops else tokens
            generation.tokens += tokens
            yield Block(tokens, min(accepted, len(tokens)))
            if stops or len(generation.tokens) == max_new_tokens:
                return
    finally:  # asking takes as long as a small pass of a model
        generation.peak_bytes = peak_bytes(device)


def token_ids(prompt: TokenIds) -> list[int]:
    """Return a prompt's token ids as a list.

    Args:
        prompt: integers in a list, a tuple, a tensor or an array, [n], or [1, n] as tokenizers
            return them.

    Raises:
        UserError: it is something else, such as a text or a batch of several prompts.
    """
    if isinstance(prompt, (Tensor, np.ndarray)):
        nested = prompt.ndim == 2 and len(prompt) == 1
        prompt = cast("Sequence[int]", (prompt[0] if nested else prompt).tolist())
    is_list = isinstance(prompt, (list, tuple, range))
    if not is_list or not all(
        isinstance(token, (int, np.integer)) and not isinstance(token, bool) for token in prompt
    ):
        kind = "list of something else" if is_list else type(prompt).__name__
        raise UserError(
            "prompt: it has to be integers, the token ids of one text (a list, tensor or array of"
            f" them), and is a {kind}. Encode a text with the target's tokenizer; decode several"
            " prompts one after the other."
        )
    return [int(token) for token in prompt]


def checked_prompt(prompt: TokenIds, vocabulary: int, context: int) -> list[int]:
    """Return a prompt's token ids. Raises UserError if models of these sizes cannot take them."""
    tokens = token_ids(prompt)
    if not tokens:
        raise UserError("prompt: it is empty; give at least one token.")
    if len(tokens) >= context:
        raise UserError(
            f"prompt: it has {len(tokens)} tokens, but the context of the models (or of their"
            f" static shapes) holds {context}: shorten the prompt or use a longer context."
        )
    outside = [token for token in tokens if not 0 <= token < vocabulary]
    if outside:
        raise UserError(
            f"prompt: token {outside[0]} lies outside the vocabulary of {vocabulary}: it was"
            " encoded with another tokenizer."
        )
    return tokens
