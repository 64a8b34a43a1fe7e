"""What the pages on decoding show is true: the policy runs and is lossless, the table of verifiers
is the code's.
"""

import re
from pathlib import Path

import pytest

from nde_talf import VERIFIERS, LMDrafter, SpeculativeDecoder
from tests.decoding.laws import distance
from tests.decoding.tiny_loop import DRAFT, TARGET, law_of, target_law

DOCS = Path(__file__).parents[2] / "docs"
PYTHON = re.compile(r"```python\n(.*?)```", re.S)
EXAMPLE = next(
    code
    for code in PYTHON.findall((DOCS / "write_a_policy.md").read_text())
    if "class WhileSure" in code
)


def own_policy(**options):
    names = {}
    exec(EXAMPLE, names)
    return names["WhileSure"](**options)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["naive", "bv", "without_replacement"])
def test_the_examples_policy_samples_the_target(verifier):
    decoder = SpeculativeDecoder(
        TARGET, LMDrafter(DRAFT), own_policy(min_probability=0.4, depth=2), VERIFIERS[verifier]
    )
    assert distance(law_of(decoder, 2), target_law(2)) < 1e-5


def test_the_table_of_verifiers_is_the_codes():
    kinds = ["none", "path", "delayed", "iid", "without_replacement", "top_k"]
    text = (DOCS / "decoding.md").read_text()
    rows = re.findall(rf"^\| ({'|'.join(kinds)}) \|.*\| ([\w, ]+) \|$", text, re.M)
    assert [kind for kind, _ in rows] == kinds
    for kind, named in rows:
        assert named.split(", ") == [
            name for name, rule in VERIFIERS.items() if kind in rule.trees and name != "greedy"
        ]
