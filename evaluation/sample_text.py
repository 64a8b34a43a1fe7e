"""A decoded text in pieces, token by token."""

from collections.abc import Iterator

CONTEXT = 8  # earlier tokens to decode along with a token


def pieces(tokenizer, prompt: list[int], tokens: list[int]) -> Iterator[str]:
    """Yield the text that each of `tokens` adds.

    A token that ends inside a character adds nothing until the character is complete.
    """
    ids = prompt[-CONTEXT:]
    shown = len(tokenizer.decode(ids).rstrip("\ufffd"))  # a character may be half there
    for token in tokens:
        ids = [*ids, token]
        text = tokenizer.decode(ids)
        added = "" if text.endswith("\ufffd") else text[shown:]
        shown += len(added)
        yield added
