"""Packing: every document whole where it fits, in few rows, its loss kept with its tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nde_talf.data.dialogues.token_rows import PADDING, Document, pack_documents


def document(length, mark, counting=1):
    """`length` tokens, all `mark`; the last `counting` of them count."""
    return Document([mark] * length, [i >= length - counting for i in range(length)])


@pytest.mark.slow
@given(st.lists(st.integers(2, 12), min_size=1, max_size=30))
def test_documents_that_fit_are_whole_and_in_few_rows(lengths):
    rows = pack_documents([document(length, i + 1) for i, length in enumerate(lengths)], 12)
    assert not rows.tokens[rows.document == PADDING].any()
    placed = []
    for tokens, loss, numbers in zip(rows.tokens, rows.loss, rows.document, strict=True):
        held = numbers[numbers != PADDING]
        assert torch.equal(numbers[: len(held)], held.sort().values)  # padding is at the end
        for number in range(int(held.max()) + 1):
            here = numbers == number
            assert loss[here].tolist() == [False] * (int(here.sum()) - 1) + [True]
            placed.append((int(tokens[here].unique()), int(here.sum())))
    assert sorted(placed) == [(i + 1, length) for i, length in enumerate(lengths)]
    # best-fit decreasing: at most 11/9 of the least, and one
    assert len(rows) <= -(-11 * sum(lengths) // (9 * 12)) + 1
