"""Rows of tokens know their documents, and come back from disk as they were."""

import pytest
import torch

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.common.errors import UserError


@pytest.fixture
def rows():
    tokens = torch.arange(12).view(2, 6)
    document = torch.tensor([[0, 0, 1, 1, 1, -1], [0, 1, 2, 2, 2, 2]])
    return TokenRows(tokens, tokens % 2 == 0, document)


def test_rows_come_back_from_disk(rows, tmp_path):
    rows.save(tmp_path / "rows.safetensors")
    loaded = TokenRows.load(tmp_path / "rows.safetensors")
    for name in ("tokens", "loss", "document"):
        assert torch.equal(getattr(loaded, name), getattr(rows, name))
        assert getattr(loaded, name).dtype == getattr(rows, name).dtype
    assert rows.packed and len(rows[:1]) == 1


def test_what_is_no_file_of_rows_is_refused(tmp_path):
    (tmp_path / "rows.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"rows\.safetensors.*cannot be read"):
        TokenRows.load(tmp_path / "rows.safetensors")
