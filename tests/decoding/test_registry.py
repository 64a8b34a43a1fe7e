"""The tables of names agree with the modules that they point to."""

import subprocess
import sys
from importlib import import_module

import pytest

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.registry import (
    FAMILIES,
    HEADS,
    LOSSES,
    POLICIES,
    VERIFIERS,
    Listed,
    Registry,
)

LINES = [
    (registry, name)
    for registry in (VERIFIERS, POLICIES, LOSSES, FAMILIES, HEADS)
    for name in registry.table
]


@pytest.mark.parametrize("registry,name", LINES, ids=lambda value: getattr(value, "key", value))
def test_a_line_of_a_table_says_where_the_thing_is_and_its_module_registers_it(registry, name):
    module, _, attribute = registry.table[name].at.partition(":")
    entry = registry.entry(name)
    assert hasattr(import_module(module), attribute)
    assert entry.title == registry.title(name) and entry.name == name


def test_an_unknown_name_is_told_with_all_names_and_the_nearest():
    with pytest.raises(UserError, match=r"verifier=travrsal: .*nss, .*Did you mean traversal"):
        VERIFIERS["travrsal"]


def test_a_thing_of_ones_own_needs_no_line():
    registry = Registry("policy", {"known": Listed("math:sqrt", "Root")})
    registry.add("mine", title="Mine", verifier="nss")(len)
    assert registry["mine"] is len and registry.title("mine") == "Mine"
    assert list(registry) == ["known", "mine"] and registry.entry("mine").about["verifier"] == "nss"


def test_names_are_listed_without_torch():
    code = (
        "import sys; from nde_talf.decoding.registry import POLICIES, VERIFIERS;"
        "assert 'beam' in POLICIES and len(VERIFIERS) == 15 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
