"""The tables of names agree with the modules that they point to."""

import pytest

from nde_talf import VERIFIERS
from nde_talf.decoding.registry import FAMILIES, POLICIES, Registry
from nde_talf.draft_training.registry import HEADS, LOSSES


@pytest.mark.parametrize(
    "registry", [VERIFIERS, POLICIES, LOSSES, FAMILIES, HEADS], ids=lambda registry: registry.key
)
def test_every_name_of_a_table_is_registered_by_its_module(registry):
    assert set(registry.table) <= set(registry) and all(map(registry.entry, registry))


def test_a_thing_of_ones_own_needs_no_line():
    registry = Registry("policy", "os", {"known": "path"})
    registry.add("mine", verifier="nss")(len)
    assert registry["mine"] is len and registry.entry("mine").about["verifier"] == "nss"
    assert list(registry) == ["known", "mine"]
