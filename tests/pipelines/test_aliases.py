"""Names of an earlier version still work, with a notice: on the command line, and in what finished
stages remember.
"""

import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from nde_talf.decoding.common.errors import RenamedWarning
from nde_talf.pipelines.aliases import (
    OLD_KEYS,
    OLD_PRESETS,
    add_defaults,
    current,
    current_settings,
    new_key,
)
from nde_talf.pipelines.config import OLD_VALUES, Config, EvaluationConfig, register
from nde_talf.pipelines.help import CONFIGS, NAME, keys, presets
from nde_talf.pipelines.manifest import identity, plain, read_manifest
from nde_talf.pipelines.stage import Stage, changed, run_stage
from nde_talf.selector.settings import SelectorConfig
from tests.pipelines.micro import nde


@pytest.mark.parametrize("old,new", OLD_KEYS.items())
def test_every_old_key_is_read_as_todays(old, new):
    known = {key.name for key in keys(Config)}
    assert new.replace("*", NAME) in known
    assert old.replace("*", NAME) not in known or new.startswith(f"{old}.")
    with pytest.warns(RenamedWarning, match="now"):
        assert current(f"++{old.replace('*', 'mine')}=1") == f"++{new.replace('*', 'mine')}=1"
    assert current(f"{new.replace('*', 'mine')}=1") == f"{new.replace('*', 'mine')}=1"


@pytest.mark.parametrize(
    "group,old,new",
    [(group, *names) for group, own in OLD_PRESETS.items() for names in own.items()],
)
def test_every_old_preset_is_read_as_todays(group, old, new):
    assert new in presets(group) and old not in presets(group)
    with pytest.warns(RenamedWarning, match=f"{group}={old} is called {group}={new} now"):
        assert current(f"{group}={old}") == f"{group}={new}"
    with pytest.warns(RenamedWarning):
        assert current(f"{group}=[text,{old}]") == f"{group}=[text,{new}]"
    assert current(f"{group}=[my_{old},{old}_2]") == f"{group}=[my_{old},{old}_2]"


def test_old_keys_inside_a_dictionary_are_read_too():
    with pytest.warns(RenamedWarning):
        assert (
            current("data={column: longest, test_share: 0.2}")
            == "data={column: longest, test_fraction: 0.2}"
        )
    with pytest.warns(RenamedWarning):
        assert (
            current("data.mix.code={draft_share: 0.0, split: a}")
            == "data.mix.code={draft_fraction: 0.0, split: a}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for same in (
            "data.source=test_share",
            "draft={test_share: 1}",
            "run=paper000",
            "mine",
            "data.test_shares=1",
        ):
            assert current(same) == same
    assert (
        new_key("data.sets.q.longest") == "data.sets.q.max_tokens"
        and new_key("data.sets.q.cut") is None
    )


def test_options_of_a_policy_are_new_keys():
    register()
    arguments = ["evaluation.policies.salf.nodes=32", "evaluation.policies.optimal={batch: 4}"]
    with initialize_config_dir(str(CONFIGS), version_base=None):
        composed = OmegaConf.to_object(compose("config", list(map(current, arguments))))
    assert composed.evaluation.policies["salf"] == {"nodes": 32} and composed.evaluation.policies[
        "optimal"
    ] == {"batch": 4}
    assert composed.evaluation.policies["beam"] == {}
    with initialize_config_dir(str(CONFIGS), version_base=None):
        composed = OmegaConf.to_object(
            compose("config", [current("evaluation.policies={beam: {k: 2}}")])
        )
    assert (
        composed.evaluation.policies["beam"] == {"k": 2} and "salf" in composed.evaluation.policies
    )
    with initialize_config_dir(str(CONFIGS), version_base=None):
        composed = OmegaConf.to_object(compose("config", [current("~evaluation.policies.salf")]))
    assert "salf" not in composed.evaluation.policies and "beam" in composed.evaluation.policies


def test_old_arguments_compose_to_the_same_configuration():
    register()
    arguments = [
        "data=[text,paper000]",
        "data.source=x",
        "data.test_share=0.25",
        "data.sets.math500.longest=9",
    ]
    with initialize_config_dir(str(CONFIGS), version_base=None), pytest.warns(RenamedWarning):
        composed = OmegaConf.to_object(compose("config", list(map(current, arguments))))
    assert composed.data.test_fraction == 0.25 and composed.data.sets["math500"].max_tokens == 9


def test_old_values_are_read_as_todays():
    assert OLD_VALUES == {"evaluation.methods": {"rivals": "baselines"}}
    with pytest.warns(RenamedWarning, match="rivals is called baselines now"):
        assert EvaluationConfig(methods=["selector", "rivals"]).methods == ["selector", "baselines"]


def test_the_command_says_what_a_key_is_called_now():
    done = nde("run", "data.test_share=0.2", "stage=none")
    said = " ".join(done.stdout.split())
    assert (
        "! data.test_share= is called data.test_fraction= now." in said
        and "stage=none: there is none" in said
    )


OLD = {
    "data": {
        "test_share": 0.5,
        "mix": {"code": {"draft_share": 0.1}},
        "sets": {},
        "prompt_tokens": [1, 2],
    },
    "evaluation": {"methods": ["rivals", "head"]},
    "tables": {"my/table.json": "0"},
}
NEW = {
    "data": {
        "test_fraction": 0.5,
        "mix": {"code": {"draft_fraction": 0.1}},
        "sets": {},
        "prompt_tokens": [1, 2],
    },
    "evaluation": {"methods": ["baselines", "head"]},
    "tables": {"my/table.json": "0"},
}


@dataclass
class Round:
    """A shape with one number."""

    name: str = "round"
    radius: int = 3


@dataclass
class Square:
    """Another shape, with a number that was not there before."""

    name: str = "square"
    side: int = 2
    corners: int = 4


@dataclass
class Group:
    shape: Any = field(
        default_factory=Round, metadata={"options": {"round": Round, "square": Square}}
    )


@dataclass
class Shapes:
    draft: Group = field(default_factory=Group)


def test_keys_that_mean_nothing_for_what_is_chosen_today_are_left_out(monkeypatch):
    monkeypatch.setattr("nde_talf.pipelines.config.Config", Shapes)
    old = {
        "draft.shape": "draft.shape.name",
        "draft.radius": "draft.shape.radius",
        "draft.side": "draft.shape.side",
    }
    for key, value in old.items():
        monkeypatch.setitem(OLD_KEYS, key, value)
    shapes = (("round", {"radius": 9}), ("square", {"side": 8, "corners": 4}))
    for name, rest in shapes:
        remembered = {"draft": {"shape": name, "radius": 9, "side": 8}, "warm_start": None}
        assert current_settings(remembered) == {
            "draft": {"shape": {"name": name, **rest}},
            "warm_start": None,
        }
    with pytest.warns(RenamedWarning):
        assert current("draft.shape=square") == "draft.shape.name=square"
    assert current("draft.shape={name: square, side: 1}") == "draft.shape={name: square, side: 1}"
    assert {"draft.shape.name", "draft.shape.radius", "draft.shape.corners"} <= {
        key.name for key in keys(Shapes)
    }


def test_remembered_settings_have_todays_keys_and_values():
    assert current_settings(OLD) == NEW and current_settings(NEW) == NEW


@pytest.mark.parametrize("begun", [False, True])
def test_a_stage_of_before_the_renaming_stays_finished_or_goes_on(tmp_path, begun):
    done = []

    def work(config, folders):
        done.append((folders["pair"] / "half.txt").exists())
        (folders["pair"] / "half.txt").write_text("half")
        if begun and len(done) == 1:
            raise KeyboardInterrupt
        return {}

    config = Config()
    config.paths.checkpoints = str(tmp_path)

    def run(settings: dict) -> None:
        stage = Stage("pair", "pair", lambda config: (), lambda config: settings, work)
        run_stage(stage, config, {"pair": stage}, force=False)

    if begun:
        with pytest.raises(KeyboardInterrupt):
            run(OLD)
    else:
        run(OLD)
        before = identity(read_manifest(tmp_path / "default/pair"))
    run(NEW)
    run(NEW)
    assert done == ([False, True] if begun else [False])
    if not begun:
        assert (
            identity(read_manifest(tmp_path / "default/pair")) == before
        )  # later stages know it by that


def test_a_models_preset_brings_its_text_and_an_argument_replaces_it():
    """`model=tiny` is the old default run, its text included; `data=...` on the command line comes
    first.
    """
    register()
    texts = {}
    with initialize_config_dir(str(CONFIGS), version_base=None):
        for arguments in (
            ["model=tiny1"],
            ["model=paper"],
            ["model=paper", "data=text", "data.source=mine.txt"],
            [],
        ):
            data = OmegaConf.to_object(compose("config", arguments)).data
            texts[" ".join(arguments)] = data.source, [*data.mix]
        with pytest.warns(RenamedWarning, match="model=tiny is called model=tiny1 now"):
            old = OmegaConf.to_object(compose("config", [current("model=tiny")]))
    mixture = "stdlib", ["code", "manual", "arithmetic", "tables"]
    mine = "model=paper data=text data.source=mine.txt"
    assert texts == {
        "model=tiny1": ("stdlib", []),
        "model=paper": mixture,
        mine: ("mine.txt", []),
        "": mixture,
    }
    assert (old.model.target_lm.layers, old.model.target_lm.steps, old.data.mix) == (12, 200, {})


def test_a_key_that_was_added_since_is_no_difference():
    now = plain({"selector": SelectorConfig(), "evaluation": EvaluationConfig()})
    before = {"selector": dict(now["selector"]), "evaluation": dict(now["evaluation"])}
    for key in ("initialisation", "fallback"):
        del before["selector"][key]
    for key in ("policies", "draft_temperature"):
        del before["evaluation"][key]
    assert not changed({"settings": before}, now)
    now["selector"]["fallback"] = False
    assert changed({"settings": before}, now) == ["selector.fallback was True, now False"]


def test_a_group_of_keys_that_was_added_has_its_defaults_in_what_a_stage_remembers():
    own = {"evaluation": {"ngram": asdict(EvaluationConfig().ngram)}}
    assert (
        add_defaults({"evaluation": {}}, own) == own and own["evaluation"]["ngram"]["min_size"] == 1
    )
    assert add_defaults({"evaluation": {}}, {"evaluation": {}}) == {"evaluation": {}}
