"""What `generate` can be asked for: every policy with a verifier that fits, and why a device cannot
be used.
"""

import pytest

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.settings import keys, nearest
from nde_talf.decoding.names import LABELLED
from nde_talf.decoding.registry import POLICIES, VERIFIERS
from nde_talf.decoding.rules.acceptance import SOLVERS
from nde_talf.decoding.verifier import check_compatible
from nde_talf.pipelines.cli import explained
from nde_talf.pipelines.config import Config
from nde_talf.pipelines.generate import GenerateConfig
from nde_talf.pipelines.machine import _reason, check_device
from nde_talf.pipelines.policy_table import default_verifier, make_policy


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_policy_has_a_verifier_that_is_lossless_on_its_trees(name, temperature):
    check_compatible(make_policy(name, {}).trees, VERIFIERS[default_verifier(name, temperature)])


def test_options_reach_the_policy():
    assert make_policy("delayed", {"k": 3, "l1": 2, "l2": 1}).action == (3, 2, 1)
    assert make_policy("dynatree", {"branches": [1, 2, 2]}).config.branches == (1, 2, 2)
    with pytest.raises(UserError, match="it has k, depth, nodes"):
        make_policy("beam", {"width": 3})


@pytest.mark.parametrize(
    "given,said",
    [
        (
            {"draft_temperature": "-0.1"},
            "draft_temperature=-0.1: choose auto, match, raw, or a number of at least 0",
        ),
        ({"draft_temperature": "hot"}, "draft_temperature=hot: choose auto"),
        (
            {"draft_temperature": "raw", "policy": "autoregressive"},
            "policy=autoregressive drafts nothing; leave it out",
        ),
    ],
)
def test_a_draft_temperature_that_cannot_be_is_refused(given, said):
    with pytest.raises(UserError, match=said):
        GenerateConfig(prompt="x", **given)


def test_suggestions_name_the_key_that_was_meant():
    known = set(keys(Config))
    assert {"selector.lr", "model.target_lm.steps", "run"} <= known
    assert nearest("traces.sampels", known) == "traces.samples"
    assert nearest("new_token", keys(GenerateConfig)) == "new_tokens"
    assert nearest("zzz", known) is None


def test_an_error_that_nobody_foresaw_is_told_in_its_own_words():
    from omegaconf.errors import OmegaConfBaseException

    assert (
        explained(OmegaConfBaseException("something odd"), Config)
        == "something odd. See --help for every key."
    )


@pytest.mark.parametrize(
    "device,said",
    [
        ("gpu", "cpu, cuda or cuda:N"),
        ("meta", "cpu, cuda or cuda:N"),
        ("cuda", "model.device=c"),
        ("cuda:99", "99|CPU"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(device, said):
    import torch

    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=said):
        check_device(device)


def test_an_old_driver_is_not_called_a_missing_gpu():
    old = "The NVIDIA driver on your system is too old (found version 11040)."
    assert "driver is too old for this torch, which is built for CUDA 13.0" in _reason(old, "13.0")


def test_names_that_are_checked_without_torch_are_the_names_there_are():
    assert set(LABELLED) == {*SOLVERS, "traversal", "gbv"}


def test_an_option_of_another_type_is_told_with_what_the_policy_takes():
    with pytest.raises(
        UserError,
        match=r"nodes=abc is of another type than policy=dyspec takes: \(nodes: int = 64\)",
    ):
        make_policy("dyspec", {"nodes": "abc"})
    wrong = (
        ("salf", "nodes", 3.7),
        ("salf", "nodes", True),
        ("dynatree", "step", float("nan")),
    )
    for policy, option, value in wrong:
        with pytest.raises(
            UserError, match=f"{option}={value} is of another type than policy={policy} takes"
        ):
            make_policy(policy, {option: value})
    with pytest.raises(UserError, match="window=-1"):
        make_policy("dynatree", {"window": -1})
    make_policy("dynatree", {"branches": [1, 2, 3], "confident_low": 0})
