"""A target sharded over two processes of a CPU (gloo): the same tokens, labels and heads as one
process gives, and what happens when a process ends.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, OPTConfig

from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.settings import SETTINGS, TracesConfig
from nde_talf.data.traces.trace import trace_trajectories
from nde_talf.decoding import tensor_parallel
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.micro_batch import MicroBatch
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.decoding.static import StaticShapes
from nde_talf.decoding.tensor_parallel import Leader, leading
from nde_talf.decoding.tensor_parts import check_sharding
from nde_talf.draft_training.export import target_fingerprint
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.draft_training.settings import EagleLoss, HeadConfig, TalfLoss
from nde_talf.draft_training.train_head import fit_head
from nde_talf.selector.fingerprint import fingerprint
from tests import ROOT
from tests.decoding.families import family
from tests.draft_training.heads import predictable_rows, random_head, tiny_target

pytestmark = pytest.mark.slow
PROMPT = [1, 5, 2, 7, 3]
OTHERS = (
    "qwen2",
    "qwen3",
    "gemma-3",
    "gemma-3-images",
)  # biases, tied embeddings, norms of heads, windows


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models on disk: a target, a draft of other weights, and small targets of other families."""
    folder = tmp_path_factory.mktemp("models")
    models = {"target": tiny_target(), "draft": tiny_target(layers=1)}
    models |= {name: family(name) for name in OTHERS}
    for name, model in models.items():
        model.module.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def leader(folders):
    pytest.importorskip("accelerate")
    if torch.cuda.is_available():
        pytest.skip("transformers would shard over the GPUs")
    leader = Leader(2, "cpu")
    with leading(leader):
        yield leader


def test_processes_that_did_not_come_up_are_reported_at_every_load(folders, monkeypatch):
    monkeypatch.setattr(tensor_parallel, "START_SECONDS", 0.0)
    leader = Leader(2, "cpu")
    for _ in range(2):
        with pytest.raises(UserError, match=r"cannot go on together .*did not come up"):
            leader.load(folders / "target", "float32", "model.target")
    (process,) = leader._processes.values()
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def one(folders):
    return CausalModel.load(folders / "target")


@pytest.fixture(scope="module")
def two(leader, folders):
    return CausalModel.load(folders / "target", name="model.target")


@pytest.fixture(scope="module")
def draft(folders):
    return CausalModel.load(folders / "draft")


def test_each_process_holds_a_part_of_the_weights(one, two):
    def held(model, name):
        weight = model.module.get_parameter(name)
        return getattr(weight, "to_local", lambda: weight)().numel()

    for name, weight in one.module.named_parameters():
        shared = "proj" in name
        assert held(two, name) * (2 if shared else 1) == weight.numel(), name
        assert torch.equal(two.weight(name), weight), name
    assert target_fingerprint(two) == target_fingerprint(one) and fingerprint(two) == fingerprint(
        one
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["path", "delayed", "beam", "head"])
def test_the_text_is_that_of_one_process(one, two, draft, kind, temperature):
    def text(target):
        policy = {"path": Delayed(Action(1, 0, 4)), "beam": Beam(k=3, depth=3, nodes=8)}.get(
            kind, Delayed(Action(3, 2, 2))
        )
        drafter = EagleDrafter(random_head(target)) if kind == "head" else LMDrafter(draft)
        decoder = SpeculativeDecoder(
            target, drafter, policy, VERIFIERS["nss" if temperature else "greedy"]
        )
        return decoder.generate(PROMPT, 12, SamplingSetting(temperature), Rng.seeded(3)).tokens

    assert text(two) == text(one)


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(leader, folders, name):
    """Loading runs trees through the sharded model, too. The texts are longer than the windows."""
    alone, sharded = (
        CausalModel.load(folders / name, name=role) for role in ("model", "model.target")
    )
    texts = [
        SpeculativeDecoder(target, LMDrafter(alone), Delayed(Action(2, 1, 2)), VERIFIERS["nss"])
        .generate([*PROMPT, *range(9, 19)], 10, SamplingSetting(1.0), Rng.seeded(2))
        .tokens
        for target in (alone, sharded)
    ]
    assert texts[0] == texts[1]


def test_features_of_layers_are_those_of_one_process(one, two):
    tokens = torch.tensor([PROMPT])
    states = [
        m.reader([0, 1])(tokens, torch.arange(len(PROMPT))[None], None, None) for m in (one, two)
    ]
    assert states[0].shape[-1] == 3 * one.hidden_size and torch.allclose(*states, atol=1e-5)


def test_labels_are_those_of_one_process(one, two, draft):
    config = TracesConfig(samples=2, stride=8, verifiers=["specinfer", "traversal"])
    prompt, text = (
        Prompt("a", "code", "", [1, 2, 3], "train"),
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 9, 8, 7],
    )
    columns = [
        trace_trajectories(
            target,
            draft,
            [prompt],
            [text],
            [SETTINGS["t1.0"]],
            config,
            MicroBatch(3, pytest.fail),
            7,
        )
        for target in (one, two)
    ]
    assert len(columns[0]["context"]) == 2
    for name, column in columns[0].items():
        if isinstance(column, torch.Tensor):
            assert torch.allclose(column, columns[1][name], atol=1e-5), name


def test_transformers_own_sampling_is_that_of_one_process(one, two):
    """With caches of transformers' own."""
    texts = [
        TransformersEngine(m).sample([PROMPT, [3, 1]], SamplingSetting(0.8), 6, seed=5)
        for m in (one, two)
    ]
    assert texts[0] == texts[1]


def test_assisted_generation_is_that_of_one_process(one, two, draft):
    """It goes back in its cache after every pass."""
    ids = torch.tensor([PROMPT])
    options = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "max_new_tokens": 16,
        "pad_token_id": 0,
    }
    texts = [
        m.module.generate(ids, assistant_model=draft.module, eos_token_id=None, **options)
        for m in (one, two)
    ]
    assert torch.equal(*texts) and texts[0].shape[1] == len(PROMPT) + 16


@pytest.mark.parametrize("loss", [TalfLoss(k=2, depth=2), EagleLoss()], ids=["talf", "eagle"])
def test_a_head_trained_beside_it_is_that_of_one_process(one, two, tmp_path, loss):
    config = HeadConfig(loss=loss, steps=6, batch=4, roots=3, precision="32-true")
    heads = [
        fit_head(m, predictable_rows(m, 12), config, tmp_path / str(i))
        for i, m in enumerate((one, two))
    ]
    for (name, weight), other in zip(
        heads[0].named_parameters(), heads[1].parameters(), strict=True
    ):
        assert torch.allclose(weight, other, atol=1e-4), name
        assert not torch.equal(weight, torch.zeros_like(weight)), name


def test_static_shapes_are_refused(two, draft):
    decoder = SpeculativeDecoder(
        two, LMDrafter(draft), Delayed(Action(1, 0, 2)), VERIFIERS["nss"], static=StaticShapes(32)
    )
    with pytest.raises(UserError, match=r"model\.tensor_parallel=2 does not go with static shapes"):
        decoder.generate(PROMPT, 4, SamplingSetting(1.0), Rng.seeded(0))


def test_a_folder_without_a_model_is_refused_and_the_next_one_is_loaded(leader, folders, tmp_path):
    with pytest.raises(
        UserError, match=r"model\.target=.*: no causal language model could be loaded"
    ):
        CausalModel.load(tmp_path, name="model.target")
    CausalModel.load(folders / "qwen2", name="model.target")


def test_models_that_cannot_be_held_in_equal_parts_are_refused():
    pytest.importorskip("accelerate")
    config = LlamaConfig(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=2, intermediate_size=30
    )
    check_sharding(config, 2, "model.target=m")
    for count, what in ((4, "6 attention heads"), (3, "2 key/value heads")):
        with pytest.raises(
            UserError,
            match=rf"model\.tensor_parallel={count} does not divide the {what} .*; 1 or 2 does",
        ):
            check_sharding(config, count, "model.target=m")
    with pytest.raises(UserError, match="type opt, for which transformers has no plan"):
        check_sharding(OPTConfig(num_attention_heads=2), 2, "model.target=m")


def test_without_accelerate_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)  # as where it is not installed
    with pytest.raises(UserError, match=r"pip install -e '\.\[tp\]'"):
        check_sharding(LlamaConfig(), 2, "model.target=m")


def test_when_a_process_ends_the_others_do_not_hang(folders):
    """See `tests.decoding.ending`, which ends its processes in turn; at last this kills the program
    itself.
    """
    pytest.importorskip("accelerate")
    command = [sys.executable, "-m", "tests.decoding.ending", str(folders / "target")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    limit = threading.Timer(300, process.kill)
    limit.start()
    try:
        lines = [process.stdout.readline().strip() for _ in range(3)]
        killed, stopped, last = lines
        assert (
            "process 1 of 2 was killed by SIGKILL" in killed
            and "Run the same command again" in killed
        )
        assert "model.tensor_parallel=2" in stopped and float(stopped.split()[0]) < 30
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and _lives(int(last)):
            time.sleep(0.1)
        assert not _lives(int(last))
    finally:
        limit.cancel()
        process.kill()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return (
        not status.exists() or ") Z " not in status.read_text()
    )  # else an orphan that nobody has waited for
