"""The files of the shipped pair."""

import pytest
import torch

from nde_talf.data.text.pair import DOMAINS, ROLES, Pair, shipped_prompts, shipped_rows
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.text.shipped import shipped
from nde_talf.decoding.common.checksums import write_checksums
from nde_talf.decoding.common.errors import UserError


def test_a_missing_part_of_the_shipped_pair_is_named(tmp_path):
    """With what to do about it."""
    with pytest.raises(UserError, match=r"target: this part of the shipped pair is missing; take"):
        shipped("target", tmp_path)


def test_shipped_text_is_checked(tmp_path):
    """A damaged or missing file, and more prompts than there are, are told in a sentence."""
    prompts = [Prompt(str(i), "code", f"def f{i}(", [1, i]) for i in range(3)]
    rows = torch.arange(12).reshape(3, 4)
    Pair(tmp_path / "pair").write(*ROLES, prompts, 1, rows, rows)
    (tmp_path / DOMAINS).write_text('{"code": 1, "manual": 2}')
    write_checksums(tmp_path)
    assert [p.text for p in shipped_prompts(2, tmp_path)] == ["def f0(", "def f1("]
    train, domains = shipped_rows(tmp_path)
    assert torch.equal(train, rows) and torch.equal(domains["manual"], rows[1:])
    with pytest.raises(UserError, match="has 3 prompts"):
        shipped_prompts(4, tmp_path)
    (tmp_path / "pair" / "prompts.jsonl").write_text("")
    with pytest.raises(UserError, match=r"prompts\.jsonl is not as it was written"):
        shipped_prompts(2, tmp_path)
