"""`model.tensor_parallel`: what does not go together with it is refused before any work, by name."""

import sys

import pytest
import torch

from nde_talf.decoding.common.errors import UserError
from nde_talf.pipelines.checks import check_config
from nde_talf.pipelines.config import Config, ModelConfig
from nde_talf.pipelines.generate import GenerateConfig, generate
from nde_talf.pipelines.sharding import check_devices, check_parts, follows, parts, sharded
from nde_talf.pipelines.traces import _gpus_of_a_worker


def config(count: int = 2, **model) -> Config:
    found = Config()
    found.model.tensor_parallel = count
    for name, value in model.items():
        setattr(found.model, name, value)
    return found


def test_one_process_is_as_ever():
    model = config(1).model
    check_parts(model)
    with sharded(model):
        assert parts(model) is None and not follows(model)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "group,key,value",
    [
        ("model", "static_shapes", True),
        ("model", "forward", "native"),
        ("model", "device", "cuda:1"),
        ("engine", "name", "vllm"),
        ("engine", "workers", 2),
        ("draft", "devices", 2),
        ("model", "tensor_parallel", 0),
    ],
)
def test_what_does_not_go_together_is_refused(group, key, value, monkeypatch):
    own = config()
    setattr(getattr(own, group), key, value)
    if key == "devices":
        own.draft.strategy = "ddp_spawn"
    for package in ("vllm", "ray"):
        monkeypatch.setitem(sys.modules, package, sys)  # as where they are installed
    with pytest.raises(UserError, match=rf"(?i){group}\.{key}={value}"):
        check_config(own)
    check_config(config())


def test_a_draft_on_a_device_of_its_own():
    check_config(config(1, draft_device="cuda:1", device="cuda:0"))
    check_config(config(2, draft_device="cuda:2", device="cuda"))
    check_config(
        config(1, draft_device="cpu", static_shapes=True)
    )  # no other device than the target's
    for count, other in ((1, "static_shapes"), (2, "tensor_parallel_draft")):
        with pytest.raises(UserError, match=rf"model\.draft_device=cuda:2 .* model\.{other}=true"):
            check_config(config(count, draft_device="cuda:2", device="cuda", **{other: True}))
    with pytest.raises(UserError, match="there is no draft model"):
        ModelConfig(target="somewhere", draft_device="cuda:1")
    with pytest.raises(UserError, match=r"model\.draft_device=nowhere"):
        check_devices(config(1, draft_device="nowhere").model)


def test_a_worker_with_a_draft_of_its_own_device_has_two_gpus():
    own = config(1, device="cuda")
    assert _gpus_of_a_worker(own, own.engine) == 1
    own.model.draft_device = "cuda:1"
    assert _gpus_of_a_worker(own, own.engine) == 2


def test_a_sharded_draft_needs_several_parts():
    with pytest.raises(UserError, match=r"model\.tensor_parallel_draft=true"):
        check_config(config(1, tensor_parallel_draft=True))
    check_config(config(2, tensor_parallel_draft=True))


def test_generate_refuses_it_too():
    own = GenerateConfig(prompt="a")
    own.model.tensor_parallel, own.model.static_shapes = 2, True
    with pytest.raises(UserError, match=r"model\.static_shapes=true"):
        generate(own)


def test_models_and_machines_that_do_not_fit(monkeypatch, tmp_path):
    pytest.importorskip("accelerate")
    with pytest.raises(UserError, match=r"model\.tensor_parallel=99: there are \d+ GPUs here"):
        check_parts(config(99, device="cuda").model)
    with pytest.raises(UserError, match=r"model\.target_lm\.heads=3"):
        check_parts(config(2).model)  # of the default pair
    own = config(3)
    own.model.target_lm.heads, own.model.draft_lm.heads = 3, 4
    check_parts(own.model)
    own.model.tensor_parallel_draft = True
    with pytest.raises(UserError, match=r"model\.draft_lm\.heads=4"):
        check_parts(own.model)


def test_without_accelerate_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)  # as where it is not installed
    with pytest.raises(UserError, match=r"pip install -e '\.\[tp\]'"):
        check_parts(config().model)


def test_torchrun_with_another_number_of_processes(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match=r"torchrun started 4 processes on this machine; give --nproc-per-node=2"
    ):
        check_config(config())
