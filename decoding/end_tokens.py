"""The tokens that end a text: one definition for everything that decodes.

A target's text ends at every token that its generation_config lists, at its tokenizer's end of
text, and at the token with which the chat template ends an answer. Published models often name
only some of these in each place.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple


class EndTokens(NamedTuple):
    """Token ids that end a model's text, by their source.

    Attributes:
        config: of generation_config.eos_token_id.
        tokenizer: the end of text of the tokenizer.
        template: the special token that follows an answer in the chat template.
    """

    config: frozenset[int]
    tokenizer: frozenset[int] = frozenset()
    template: frozenset[int] = frozenset()

    @property
    def ids(self) -> frozenset[int]:
        """Return the ids of all sources."""
        return self.config | self.tokenizer | self.template


def end_tokens(eos: Any, vocabulary: int, tokenizer: Any = None, closing: str = "") -> EndTokens:
    """Collect the tokens that end a text; negative ids and ids beyond the vocabulary are dropped.

    Args:
        eos: `generation_config.eos_token_id`, an id, a list of ids, or None.
        vocabulary: rows of the logits.
        tokenizer: of the model; None: only `eos` counts.
        closing: what the chat template puts after an answer.
    """
    if tokenizer is None:
        return EndTokens(_ids(eos, vocabulary))
    token = closing_token(special_tokens(tokenizer), closing)
    return EndTokens(
        _ids(eos, vocabulary),
        _ids(tokenizer.eos_token_id, vocabulary),
        _ids(token and tokenizer.convert_tokens_to_ids(token), vocabulary),
    )


def special_tokens(tokenizer: Any) -> list[str]:
    """Return the special and the added tokens of a tokenizer, longest first.

    `all_special_tokens` lacks the added ones, and with them the end of turn of many chat models.
    """
    added = (str(token) for token in tokenizer.added_tokens_decoder.values())
    return sorted({*added, *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)


def closing_token(special: Sequence[str], closing: str) -> str | None:
    """Return the token of `special` that `closing` begins with, blanks aside; None without one.

    Of several, such as Phi-3's `<|end|>` and `<|endoftext|>`, the first one ends the answer.
    """
    return next((token for token in special if closing.lstrip().startswith(token)), None)


def up_to_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """Return `tokens` up to and with the first of `ends`."""
    at = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: at + 1]


def _ids(tokens: Any, vocabulary: int) -> frozenset[int]:
    listed = tokens if isinstance(tokens, Sequence) else [tokens]
    return frozenset(id for id in listed if isinstance(id, int) and 0 <= id < vocabulary)
