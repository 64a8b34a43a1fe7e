"""A decoded text in pieces, token by token."""

from nde_talf.evaluation.sample_text import pieces


class Letters:
    """A tokenizer whose token n is the n-th letter, but for 26 and 27, two halves of one character."""

    def decode(self, ids):
        return "".join(
            chr(97 + i) if i < 26 else "\ufffd" if i == 26 else "é" for i in ids
        ).replace("\ufffdé", "é")


def test_every_token_adds_its_piece_and_half_a_character_adds_nothing():
    assert [*pieces(Letters(), [0, 1, 2], [4, 5, 26, 27, 7])] == ["e", "f", "", "é", "h"]
    assert [*pieces(Letters(), [4, 26], [27, 7])] == ["é", "h"]
