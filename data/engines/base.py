"""Engines: who samples text and computes features. Token ids go in and come out."""

from typing import Protocol

from torch import Tensor

from decoding.sampling import SamplingSetting


class Engine(Protocol):
    """A model that samples. The same seed gives the same tokens."""

    def sample(self, prompts: list[list[int]], setting: SamplingSetting, new_tokens: int, seed: int) -> list[list[int]]:
        """Each prompt with up to `new_tokens` tokens behind it. An end-of-text token ends one, and is dropped."""

    def rollouts(self, prefixes: list[list[int]], setting: SamplingSetting, length: int, copies: int, seed: int) -> Tensor:
        """[P, copies, length]: i.i.d. continuations of each prefix. End-of-text is a token like any other."""

    def hidden(self, sequences: list[list[int]]) -> list[Tensor]:
        """[L, H] (float32, on the CPU) of each sequence: hidden states after the final norm, at every position."""

    def close(self) -> None:
        """Free the memory."""


def end_of_text(generation_config) -> set[int]:
    """The tokens that end a text, from a transformers GenerationConfig."""
    eos = generation_config.eos_token_id
    return set(eos if isinstance(eos, list) else [eos]) - {None}
