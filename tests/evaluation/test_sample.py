"""A decoded text in pieces that say where they came from."""

from nde_talf import Block
from nde_talf.evaluation.sample_text import coloured


class Letters:
    """A tokenizer whose token n is the n-th letter, but for 26 and 27, two halves of one character."""

    def decode(self, ids):
        return "".join(
            chr(97 + i) if i < 26 else "\ufffd" if i == 26 else "é" for i in ids
        ).replace("\ufffdé", "é")


def test_every_piece_of_a_text_says_where_it_came_from():
    blocks = [(Block([4, 5, 6], 2), "(1, 0, 2)"), (Block([26], 0), ""), (Block([27, 7], 2), "")]
    assert coloured(Letters(), [0, 1, 2], blocks) == [
        ["abc", "prompt"],
        ["(1, 0, 2)", "tree"],
        ["ef", "drafted"],
        ["g", "corrected"],
        ["éh", "drafted"],
    ]
