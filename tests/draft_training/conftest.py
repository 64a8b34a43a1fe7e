"""The target and the rows that most tests of heads train with; a file with others defines its own.

Fixtures import what they need: the process that hands out tests to others imports no torch.
"""

import pytest


@pytest.fixture(scope="module")
def target():
    from tests.draft_training.heads import tiny_target

    return tiny_target()


@pytest.fixture(scope="module")
def rows(target):
    from tests.draft_training.heads import predictable_rows

    return predictable_rows(target, 12)
