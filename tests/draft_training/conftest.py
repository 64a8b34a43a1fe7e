"""The target and the rows that most tests of heads train with; a file with others defines its own."""

import pytest

from tests.draft_training.heads import predictable_rows, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def rows(target):
    return predictable_rows(target, 12)
