"""A decoded text in pieces, each with its origin: the prompt, an accepted draft, or the target."""

from collections.abc import Iterable, Iterator

from nde_talf.decoding.generation import Block

PROMPT, DRAFTED, CORRECTED, TREE = "prompt", "drafted", "corrected", "tree"
CONTEXT = 8  # earlier tokens to decode along with a token


def coloured(tokenizer, prompt: list[int], blocks: Iterable[tuple[Block, str]]) -> list[list[str]]:
    """Return [text, origin] of a prompt and of the generation after it, equal neighbours joined.

    blocks: each with the title of its tree, which precedes it, or "".
    """
    coloured_text = [[tokenizer.decode(prompt), PROMPT]]
    ids = prompt
    for block, tree in blocks:
        if tree:
            coloured_text.append([tree, TREE])
        for i, text in enumerate(pieces(tokenizer, ids, block.tokens)):
            kind = DRAFTED if i < block.accepted else CORRECTED
            if kind == coloured_text[-1][1]:
                coloured_text[-1][0] += text
            elif text:
                coloured_text.append([text, kind])
        ids = [*ids, *block.tokens]
    return coloured_text


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
