"""A device's memory has one owner: no torch model is alive when an engine starts, and none is
loaded before it has gone.
"""

import gc
import shutil
from pathlib import Path

import pytest
import torch

import nde_talf.data.traces.worker
from nde_talf.data.engines.settings import EngineConfig
from nde_talf.data.traces.settings import TracesConfig
from nde_talf.decoding.model import CausalModel
from nde_talf.pipelines.config import Config
from tests import ROOT


def models() -> list[CausalModel]:
    """Those that are alive, without a collection first: what waits for one still has its memory."""
    return [found for found in gc.get_objects() if isinstance(found, CausalModel)]


@pytest.fixture
def pair(tmp_path) -> Path:
    gc.collect()
    shutil.copytree(ROOT / "tests/fixtures/pair", tmp_path / "pair")
    return tmp_path / "pair"


def config(**own) -> Config:
    small = TracesConfig(
        train_prompts=1,
        validation_prompts=1,
        new_tokens=8,
        stride=4,
        verifiers=["specinfer"],
        shard_prompts=1,
    )
    found = Config(traces=small, engine=EngineConfig(name="vllm"), **own)
    found.tracking.mode = "disabled"
    return found


def test_closing_a_worker_frees_its_models(tmp_path, pair):
    others = len(models())
    tracer = nde_talf.data.traces.worker.Tracer(
        pair,
        {"traces": tmp_path / "traces"},
        config().traces,
        ("cpu", "float32", None, "auto"),
        config().engine,
    )
    assert len(tracer.models) == 2 and len(models()) == others + 2
    assert all(
        torch.isfinite(w).all() for model in tracer.models for w in model.module.parameters()
    )
    tracer.close()
    assert len(models()) == others
