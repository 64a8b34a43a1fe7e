"""Text that a target writes itself, so that no data is needed.

A chat model that reads its template up to a user's turn writes that turn, a question as users ask
it (Magpie, arXiv 2406.08464), and answers it afterwards. A base model writes text from its first
token. What cannot be used is counted by reason.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from transformers import PreTrainedTokenizerBase

from nde_talf.data.dialogues.chat_mask import ChatEncoder
from nde_talf.data.text.prompts import ids_of
from nde_talf.decoding.end_tokens import closing_token, special_tokens

RUN, BANDS, ROWS = 8, 10, 5
"""Letters of a piece of text, and bands of minimal hashes of all pieces. Texts are much alike if a
band agrees: 98 % of those that share 80 % of their pieces, and 2 % of those that share 30 %.
"""
_FACTORS = np.random.default_rng(0).integers(1 << 63, size=RUN + BANDS * ROWS, dtype=np.uint64) | 1
UNFINISHED = "that did not end"


@dataclass(frozen=True)
class Opening:
    """What a self-made text continues, and what ends it.

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
        self._special, self._whole, self._seen = special_tokens(tokenizer), whole, set[bytes]()

    def fault(self, text: str, ended: bool) -> str | None:
        """Say why a text cannot be used; None: it can, and counts as seen from now on."""
        letters = "".join(re.findall(r"\w+", text.lower()))
        if len(letters) < RUN:
            return "that are empty or short"
        if self._whole and not ended:
            return UNFINISHED
        if any(token in text for token in self._special):
            return "with special tokens inside"
        if not all(letter.isprintable() or letter in "\n\t" for letter in text):
            return "with letters that cannot be printed"
        bands = _bands(letters)
        if not self._seen.isdisjoint(bands):
            return "much like another"
        self._seen |= bands
        return None


def _bands(letters: str) -> set[bytes]:
    """Hash the runs of `RUN` letters, and return the bands of their minimal hashes."""
    codes = np.frombuffer(letters.encode("utf-32-le"), np.uint32).astype(np.uint64)
    runs = np.unique(sliding_window_view(codes, RUN) @ _FACTORS[:RUN])
    hashes = runs[:, None] * _FACTORS[RUN:]
    least = (hashes ^ hashes >> np.uint64(29)).min(0).reshape(BANDS, ROWS)
    return {bytes([band]) + row.tobytes() for band, row in enumerate(least)}
