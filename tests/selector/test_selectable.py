"""A selector drafts delayed trees, so it chooses only among rules that are lossless on them:
wherever the names come from.
"""

import pytest

from nde_talf import VERIFIERS
from tests.refusal import refusal
from tests.selector.examples import schema


@pytest.mark.parametrize("name", [*VERIFIERS, "magic"])
def test_a_rule_that_takes_delayed_trees_at_every_temperature_can_be_chosen_and_no_other(name):
    if name in ("greedy", "magic") or "delayed" not in VERIFIERS[name].trees:
        with refusal(f"cannot choose trees for {name}"):
            schema(6, 4, name)
    else:
        assert schema(6, 4, name).verifiers == (name,)
