"""A decoded text in pieces, each with its origin: the prompt, an accepted draft, or the target."""

from collections.abc import Iterable, Iterator

from nde_talf.decoding.streams import Block

PROMPT, DRAFTED, CORRECTED = "prompt", "drafted", "corrected"
CONTEXT = 8  # tokens of the text before, with which a token's own text is found


def coloured(tokenizer, prompt: list[int], blocks: Iterable[Block]) -> list[list[str]]:
    """[text, origin] of a prompt and what was generated after it, neighbours of one kind joined."""
    pieces_of_text = [[tokenizer.decode(prompt), PROMPT]]
    tokens, kinds = [], []
    for block in blocks:
        tokens += block.tokens
        kinds += [DRAFTED if i < block.accepted else CORRECTED for i in range(len(block.tokens))]
    for text, kind in zip(pieces(tokenizer, prompt, tokens), kinds, strict=True):
        if kind == pieces_of_text[-1][1]:
            pieces_of_text[-1][0] += text
        elif text:
            pieces_of_text.append([text, kind])
    return pieces_of_text


def pieces(tokenizer, prompt: list[int], tokens: list[int]) -> Iterator[str]:
    """The text that each of `tokens` adds.

    One that ends inside a character adds nothing until that is complete.
    """
    ids = prompt[-CONTEXT:]
    shown = len(tokenizer.decode(ids))
    for token in tokens:
        ids = [*ids, token]
        text = tokenizer.decode(ids)
        added = "" if text.endswith("\ufffd") else text[shown:]
        shown += len(added)
        yield added
