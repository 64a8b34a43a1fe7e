"""A selector drafts delayed trees, so it chooses only among rules that are lossless on them:
wherever the names come from.
"""

import pytest

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.selector.network import selectable
from tests.selector.examples import schema

REFUSED = (
    "without_replacement",
    "traversal_without_replacement",
    "naive",
    "tv",
    "bv",
    "greedy",
    "magic",
)


def test_what_takes_delayed_trees_at_every_temperature_can_be_chosen():
    fitting = [
        "nss",
        "naivetree",
        "spectr",
        "specinfer",
        "khisti",
        "khisti_lp",
        "traversal",
        "gbv",
        "gbv_exact",
    ]
    assert [selectable(name, "here").name for name in fitting] == fitting
    assert {*fitting, *REFUSED} == {*VERIFIERS, "magic"}


@pytest.mark.parametrize("name", REFUSED)
def test_other_rules_are_refused_by_name(name):
    with pytest.raises(UserError, match=f"cannot choose trees for {name}"):
        schema(6, 4, name)
