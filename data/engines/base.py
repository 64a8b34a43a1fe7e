"""Engines: what samples text. Token ids go in and come out."""

from typing import Protocol

from nde_talf.decoding.sampling import SamplingSetting


class Engine(Protocol):
    """A model that samples. The same seed gives the same tokens."""

    def sample(
        self, prompts: list[list[int]], setting: SamplingSetting, new_tokens: int, seed: int
    ) -> list[list[int]]:
        """Continue each prompt by up to `new_tokens` tokens.

        An end-of-text token ends a text and is dropped.
        """

    def close(self) -> None:
        """Free the memory."""


def end_of_text(generation_config) -> set[int]:
    """Return the tokens that end a text, from a transformers GenerationConfig."""
    eos = generation_config.eos_token_id
    return set(eos if isinstance(eos, list) else [eos]) - {None}
