"""The steps of the recipe, by its command."""

import pytest

from nde_talf.decoding.common.errors import UserError
from nde_talf.pipelines.runs.lock import locked
from recipes.small.steps import SmallConfig, run


@pytest.mark.parametrize(
    ("step", "first"),
    [("anneal", "step=train"), ("draft", "step=anneal"), ("head", "step=anneal")],
)
def test_steps_say_what_comes_before_them(step, first, tmp_path, monkeypatch):
    """Without a state there is nothing to decay, and without a target nothing to distil."""
    monkeypatch.setattr("recipes.small.steps.prepared", None)  # it is told before
    config = SmallConfig(step=step, state=str(tmp_path))
    with pytest.raises(UserError, match=f"run {first} first"):
        run(config)
    with locked(tmp_path), pytest.raises(UserError, match="is in use"):
        run(config)
