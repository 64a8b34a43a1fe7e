"""The tokens that end a text: one definition for everything that decodes.

A target's text ends at every token that its generation_config lists, at its tokenizer's end of
text, and at the token with which the chat template ends an answer. Published models often name
only some of these in each place.
"""

from collections.abc import Collection, Sequence
from typing import Any


def end_tokens(eos: Any, vocabulary: int, tokenizer: Any = None, closing: str = "") -> frozenset:
    """Collect the ids of the tokens that end a text; those outside the vocabulary are dropped.

    Args:
        eos: `generation_config.eos_token_id`: an id, a list of ids, or None.
        vocabulary: rows of the logits.
        tokenizer: of the model; None: only `eos` counts.
        closing: what the chat template puts after an answer.
    """
    ids = [*eos] if isinstance(eos, Sequence) else [eos]
    if tokenizer is not None:
        token = closing_token(special_tokens(tokenizer), closing)
        ids += [tokenizer.eos_token_id, token and tokenizer.convert_tokens_to_ids(token)]
    return frozenset(one for one in ids if isinstance(one, int) and 0 <= one < vocabulary)


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
