"""`--help` prints an overview; `--help GROUP` keys with type, value and docstring, under their
group and its presets.
"""

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.registry import POLICIES, VERIFIERS
from nde_talf.pipelines.config import Config, register
from nde_talf.pipelines.generate import GenerateConfig
from nde_talf.pipelines.help import CONFIGS, FIRST, help_text, keys, presets
from nde_talf.pipelines.recommend import RecommendConfig
from tests.pipelines.micro import nde


@pytest.mark.parametrize("schema", [Config, GenerateConfig, RecommendConfig])
def test_every_key_has_a_docstring(schema):
    for key in keys(schema):
        if key.schema and "." not in key.name:  # a group: its dataclass says what it is about
            assert key.schema.__doc__ and not key.schema.__doc__.startswith(key.schema.__name__), (
                key.name
            )
        else:
            assert key.text, f"{key.name} has no docstring in {key.parent.__name__}"
        for option in key.options.values():
            assert option.__doc__ and not option.__doc__.startswith(option.__name__), option


def text(*wanted: str, overrides: tuple[str, ...] = ()) -> str:
    register()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return help_text(
            Config,
            compose("config", list(overrides)),
            OmegaConf.load(CONFIGS / "config.yaml"),
            list(wanted),
        )


def test_alone_it_shows_the_groups_and_the_keys_that_a_first_time_user_needs():
    shown = text()
    assert shown.startswith("nde-talf: train") and len(shown.splitlines()) < 100
    for key in keys(Config):
        group = key.name.split(".")[0]
        if "." in key.name:
            assert (f"  {key.name}" in shown) == (group in FIRST and key.name.count(".") == 1), (
                key.name
            )
        elif key.schema and group not in FIRST:
            assert f"\n  {key.name} " in shown, f"{key.name} has no line"
    assert "run  str = default" in shown and "model=tiny_ci" in shown and "traces=nde" not in shown


def test_a_key_is_shown_with_its_type_its_value_and_its_text():
    shown = text("all")
    assert (
        "  traces.samples  int = 2\n      Super-trees drawn at each root; a label is their mean."
        in shown
    )
    assert "  model.target  str | null = null\n" in shown
    assert "  data.prompt_tokens  list[int] = [32, 96]\n" in shown
    assert "  data.sets.NAME.max_tokens  int = 1024\n" in shown
    for key in keys(Config):
        assert f"  {key.name}" in shown or f"\n{key.name}: " in shown, key.name


def test_values_are_those_of_the_presets_and_arguments():
    assert "model.target_lm.hidden  int = 128" in text("model")
    assert "traces.samples  int = 7" in text("traces", overrides=("traces.samples=7",))


def test_presets_stand_under_their_group():
    assert presets("traces")["nde"].startswith("The NDE paper's setting")
    assert presets("model")["tiny_ci"].startswith("Everything small")
    shown = text("all")
    for group in (
        "model",
        "data",
        "traces",
        "selector",
        "draft",
        "dialogues",
        "evaluation",
        "tracking",
    ):
        assert presets(group), group
        for name, comment in presets(group).items():
            assert comment, f"configs/{group}/{name}.yaml has no comment"
            assert f"\n  {group}={name}  {comment.split()[0]}" in shown


def test_a_name_narrows_it_to_a_group_or_a_key():
    traces = text("traces")
    assert (
        "traces.samples" in traces
        and "traces=nde" in traces
        and "selector.lr" not in traces
        and "Usage" not in traces
    )
    assert "draft.lr_adam" in text("lr_adam") and "draft.steps" not in text("lr_adam")
    with pytest.raises(
        UserError,
        match="--help trace: there is no such key or group; the groups are paths, model, data",
    ):
        text("trace")


def test_names_to_choose_from_are_listed():
    shown = {key.name: key.text for key in keys(GenerateConfig)}
    assert shown["policy"].endswith(f"Choose from {', '.join(POLICIES.table)}.")
    assert shown["verifier"].endswith(f"Choose from {', '.join(VERIFIERS.table)}.")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments,shown",
    [("run --help all", "draft.steps  int"), ("generate --help", "policy  str | null = null")],
)
def test_help_of_the_commands_needs_no_heavy_imports(arguments, shown):
    done = nde(*arguments.split())
    assert "model=tiny" not in done.stdout or arguments != "generate --help"  # it has no presets
    assert done.returncode == 0 and shown in done.stdout and done.stderr.strip().endswith("[]"), (
        done.stderr
    )


def test_a_wrong_argument_beside_help_is_answered_like_any_other():
    done = nde("run", "--help", "selector.lrr=1")
    assert done.returncode == 1 and "Did you mean selector.lr?" in done.stdout
