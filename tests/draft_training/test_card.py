"""The model card of an exported head: it stands beside the checksums, and one call publishes the
folder.
"""

import json

import pytest

from nde_talf.decoding.common.card import CARD
from nde_talf.decoding.common.checksums import CHECKSUMS, check_checksums
from nde_talf.decoding.common.errors import UserError
from nde_talf.draft_training.export import load_head
from nde_talf.draft_training.head_drafter import EagleDrafter
from tests.draft_training.heads import random_head, same, tiny_target


def test_an_export_has_a_card_that_may_be_edited(tmp_path):
    target = tiny_target()
    head = random_head(target)
    EagleDrafter(head).save_pretrained(tmp_path / "head")
    card = tmp_path / "head" / CARD
    assert CARD not in json.loads((tmp_path / "head" / CHECKSUMS).read_text())["files"]
    card.write_text("Ours.")
    assert check_checksums(tmp_path / "head") and same(load_head(tmp_path / "head", target), head)
    (tmp_path / "head" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config\.json"):
        load_head(tmp_path / "head", target)
