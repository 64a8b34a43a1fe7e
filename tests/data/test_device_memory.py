"""A device's memory has one owner: no torch model is alive when an engine starts, and none is
loaded before it has gone.
"""

import gc
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import nde_talf.data.traces.worker
from nde_talf.data.engines.settings import EngineConfig
from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.data.text.pair import Pair
from nde_talf.data.traces.settings import TracesConfig
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.model import CausalModel
from nde_talf.pipelines import traces
from nde_talf.pipelines.config import Config
from tests import ROOT


def models() -> list[CausalModel]:
    """Those that are alive, without a collection first: what waits for one still has its memory."""
    return [found for found in gc.get_objects() if isinstance(found, CausalModel)]


class Witness(TransformersEngine):
    """Samples as the transformers engine does.

    When it starts, as vLLM does with its first request, it notes how many models of torch are
    alive. Its own model counts as an engine's.
    """

    alive: ClassVar[list[int]] = []
    open: ClassVar[list[str]] = []

    def __init__(self, folder: str, dtype: str, config: EngineConfig, target: Path | None = None):
        self.folder = str(folder)

    @property
    def model(self) -> CausalModel:
        if "loaded" not in self.__dict__:
            self.alive.append(len(models()))
            self.open.append(self.folder)
            self.loaded = CausalModel.load(self.folder)
        return self.loaded

    def close(self) -> None:
        self.open.remove(self.folder)
        del self.loaded
        gc.collect()


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


def test_traces_load_torchs_models_and_engines_one_after_the_other(tmp_path, pair, monkeypatch):
    others = len(models())
    load = Pair.models

    def models_of(self, *args):
        assert not Witness.open, "an engine still holds the memory"
        return load(self, *args)

    monkeypatch.setattr(nde_talf.data.traces.worker, "VLLMEngine", Witness)
    monkeypatch.setattr(Pair, "models", models_of)
    monkeypatch.setattr(Witness, "alive", [])
    (tmp_path / "traces").mkdir()
    found = traces.work(config(), {"pair": pair, "traces": tmp_path / "traces"})
    assert found["roots"] > 0 and not Witness.open
    assert Witness.alive == [others]
    texts = TraceStore(tmp_path / "traces/trajectories", "trajectories")
    assert texts.shards and not texts.faults() and not TraceStore(tmp_path / "traces").faults()
    assert TraceStore(tmp_path / "traces").read("train")["h_p_previous"].dtype == "float16"


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
