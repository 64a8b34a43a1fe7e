"""The model card of an exported head: it stands beside the checksums, and one call publishes the
folder.
"""

import json

import pytest

from nde_talf.decoding.common.card import CARD
from nde_talf.decoding.common.checksums import CHECKSUMS, check_checksums
from nde_talf.decoding.common.errors import UserError
from nde_talf.draft_training.card import write_head_card
from nde_talf.draft_training.export import load_head, save_head
from nde_talf.draft_training.head_drafter import EagleDrafter
from tests.draft_training.heads import family_target, random_eagle3, random_head, same, tiny_target


def test_an_export_has_a_card_that_may_be_edited(tmp_path):
    target = tiny_target()
    head = random_head(target)
    EagleDrafter(head).save_pretrained(tmp_path / "head")
    card = tmp_path / "head" / CARD
    text = card.read_text()
    assert text.startswith("---\nlibrary_name: ") and "# Draft head (eagle) for a llama" in text
    assert '"method": "eagle"' in text and "EagleDrafter.from_pretrained(" in text
    assert CARD not in json.loads((tmp_path / "head" / CHECKSUMS).read_text())["files"]
    card.write_text("Ours.")
    assert check_checksums(tmp_path / "head") and same(load_head(tmp_path / "head", target), head)
    (tmp_path / "head" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config\.json"):
        load_head(tmp_path / "head", target)


def test_the_card_says_what_it_was_trained_on_and_its_figures(tmp_path):
    target = tiny_target(layers=4)
    head = random_eagle3(target, vocabulary=[1, 2, 3])
    save_head(head, tmp_path / "head")
    target.module.config._name_or_path = "someone/their-model"
    report = {"roots": 8, "agreement": [0.5, 0.25], "agreement_by_rank": [[1.0]]}
    write_head_card(tmp_path / "head", head, {"rows": "96 of 48 tokens"}, report)
    text = (tmp_path / "head" / CARD).read_text()
    for part in (
        'base_model: "someone/their-model"',
        "| rows | 96 of 48 tokens |",
        "| most likely token is the target's, by depth | 0.500, 0.250 |",
        "| features | after layers 1, 2, 3 |",
        "| draft vocabulary | 3 |",
        '"method": "eagle3"',
    ):
        assert part in text
    assert "agreement_by_rank" not in text


def test_a_head_that_vllm_cannot_hold_says_so_in_place_of_the_command(tmp_path):
    save_head(random_head(family_target("qwen3")), tmp_path)
    assert (
        "vllm serve" not in (tmp_path / CARD).read_text()
        and "draft.layer=llama" in (tmp_path / CARD).read_text()
    )
