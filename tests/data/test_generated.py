"""Text that the project makes: the same everywhere, right in what it says, and split like any other
corpus.
"""

from nde_talf.data.text.generated import GENERATED

ARITHMETIC = (
    "Problem 66: at the beginning Anna has 10 cherries and Felix has 17 cherries.\nThen Anna gives"
    " 1 cherr"
)
TABLES = (
    "Table 5: square roots.\n\n| 6 | 2. 4 4 9 4 8 9 7 4 2 7 8 3 |\n| 5 | 2. 2 3 6 0 6 7 9 7 7 4 9 9"
    " |\n| 15 |"
)


def test_the_text_does_not_change_from_one_version_of_python_to_the_next():
    assert GENERATED["arithmetic"]("arithmetic-0").startswith(ARITHMETIC)
    assert GENERATED["tables"]("tables-0").startswith(TABLES)
