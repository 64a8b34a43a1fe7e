"""The recipe's command, and the name of the shipped pair."""

import pytest

from nde_talf.data.text.shipped import is_shipped, shipped
from nde_talf.decoding.common.errors import UserError
from nde_talf.pipelines.config import Config
from nde_talf.pipelines.small import SmallConfig, run


def test_no_run_is_called_small():
    """The folder is the shipped pair's."""
    for key in ("run", "base"):
        with pytest.raises(UserError, match=f"{key}=small: that folder is the shipped pair's"):
            Config(**{key: "small"})


def test_a_missing_part_of_the_shipped_pair_is_named(tmp_path):
    """With what to do about it."""
    with pytest.raises(UserError, match=r"target: this part of the shipped pair is missing; take"):
        shipped("target", tmp_path)
    assert not is_shipped(str(tmp_path)) and not is_shipped(None)


@pytest.mark.parametrize(("step", "first"), [("anneal", "step=train"), ("draft", "step=anneal")])
def test_steps_say_what_comes_before_them(step, first, tmp_path, monkeypatch):
    """Without a state there is nothing to decay, and without a target nothing to distil."""
    monkeypatch.setattr("nde_talf.data.text.recipe.prepared", lambda *_: None)
    with pytest.raises(UserError, match=f"run {first} first"):
        run(SmallConfig(step=step, state=str(tmp_path)))
