"""Text that a target writes itself, so that no data is needed.

A chat model that reads its template up to a user's turn writes that turn, a question as users ask
it (Magpie, arXiv 2406.08464), and answers it afterwards. A base model writes text from its first
token. What cannot be used is counted by reason.
"""

import re
from dataclasses import dataclass
from zlib import crc32

from transformers import PreTrainedTokenizerBase

from nde_talf.data.dialogues.chat_mask import ChatEncoder
from nde_talf.data.text.prompts import ids_of
from nde_talf.decoding.models.end_tokens import closing_token, special_tokens

FEWEST, RUN, EVERY = 8, 40, 4
"""Letters of the shortest text, and letters in a row that make two texts much alike; of all such
runs one in `EVERY` is looked at.
"""
UNFINISHED = "that did not end"


@dataclass(frozen=True)
class Opening:
    """Beginning of a self-made text, and its end.

    Attributes:
        tokens: ids of what comes before the text.
        ends: ids that end it, beside those that end all of the model's texts.
        closing: text that ends it; "" without one.
    """

    tokens: list[int]
    ends: tuple[int, ...] = ()
    closing: str = ""


def user_turn(encoder: ChatEncoder) -> Opening:
    """Return the opening of a user's turn.

    The turn ends with the special token that the template puts after it, or with plain text, as
    `[/INST]` is in some tokenizers.
    """
    before, after = encoder.around_user()
    token = closing_token(special_tokens(encoder.tokenizer), after)
    ids = encoder.tokenizer.get_vocab()
    ends = (ids[token],) if token else ()
    # A blank is part of the word after it, which the model writes.
    return Opening(ids_of(before.rstrip(" "), encoder.tokenizer), ends, token or after.strip())


def first_token(tokenizer: PreTrainedTokenizerBase) -> Opening:
    """Return the opening of any text: what the tokenizer puts before one, or else its end token."""
    begin = tokenizer("")["input_ids"]
    bos = tokenizer.bos_token_id
    return Opening(list(begin) or [tokenizer.eos_token_id if bos is None else bos])


class Screen:
    """Finds what is wrong with self-made texts, and which are much like an earlier one.

    Args:
        tokenizer: its special tokens have no place inside a text.
        whole: a text that did not end cannot be used.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, whole: bool):
        self._special, self._whole, self._seen = special_tokens(tokenizer), whole, set[int]()

    def fault(self, text: str, ended: bool) -> str | None:
        """Say why a text cannot be used; None: it can, and counts as seen from now on."""
        letters = "".join(re.findall(r"\w+", text.lower()))
        if len(letters) < FEWEST:
            return "that are empty or short"
        if self._whole and not ended:
            return UNFINISHED
        if any(token in text for token in self._special):
            return "with special tokens inside"
        if "\ufffd" in text or not all(map(str.isprintable, re.split("[\n\t]", text))):
            return "with letters that cannot be printed"
        starts = range(len(letters) - RUN + 1)
        runs = {crc32(letters[at : at + RUN].encode()) for at in starts}
        runs = {run for run in runs if run % EVERY == 0} | {crc32(letters.encode())}
        if self._seen & runs:
            return "much like another"
        self._seen |= runs
        return None
