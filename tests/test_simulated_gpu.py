"""On a GPU every tensor is where it has to be, and the numbers are the host's."""

import pytest
import torch

from nde_talf import (
    CausalModel,
    EagleDrafter,
    LMDrafter,
    NeuralPolicy,
    Rng,
    SamplingSetting,
    Selector,
    SpeculativeDecoder,
)
from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.forward import layer, parts
from nde_talf.draft_training.training.head_training import HeadModule, build_head
from nde_talf.draft_training.training_settings import HeadConfig
from tests.data.test_traces import trace
from tests.decoding.pairs import tiny_pair
from tests.decoding.policies import EVERY_POLICY
from tests.draft_training.heads import predictable_rows, random_eagle3, random_head
from tests.selector.examples import TABLE, schema
from tests.simulated_gpu import GPU, OnGpu, Simulated, move

PROMPT = [1, 2, 3, 4] * 3


@pytest.fixture
def on_gpu(monkeypatch):
    """A model's copy on the simulated GPU."""
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_: move(module))
    monkeypatch.setattr(layer, "Tensor", OnGpu)
    monkeypatch.setattr(parts, "has_flash", lambda *_: False)
    with Simulated():
        yield lambda model: CausalModel(move(model.module))


def test_devices_do_not_mix(on_gpu):
    ones = torch.ones(3, device=GPU)
    for mixed in (lambda: ones + torch.ones(3), lambda: torch.ones(3)[ones > 0], ones.numpy):
        with pytest.raises(RuntimeError, match="on a GPU"):
            mixed()
    assert (ones + 1)[torch.arange(2)].device == GPU and ones.cpu().device.type == "cpu"


def on_both(request, work):
    """What `work` gives for the host, and for the GPU that `place` copies to."""
    host = work(lambda it: it)
    place = request.getfixturevalue("on_gpu")
    return host, work(place)


def selecting():
    torch.manual_seed(4)
    return NeuralPolicy(Selector(schema(16, 16, "specinfer")), TABLE)


POLICIES = EVERY_POLICY | {"selector": (selecting, "specinfer")}
CASES = [(name, "lm") for name in POLICIES]
CASES += [(name, head) for name in ("delayed", "beam") for head in ("eagle", "eagle3")]


@pytest.mark.slow
@pytest.mark.parametrize("name,drafter", CASES)
def test_a_gpu_draws_the_hosts_tokens(name, drafter, request):
    make, rule = POLICIES[name]

    def work(place):
        target, draft = map(place, tiny_pair(29, hidden=16, layers=4))
        if drafter == "lm":
            drafts = LMDrafter(draft)
        else:
            drafts = EagleDrafter((random_head if drafter == "eagle" else random_eagle3)(target))
        decoder = SpeculativeDecoder(target, drafts, make(), rule)
        setting = SamplingSetting(1.0, 0.9)
        return decoder.generate(PROMPT, 24, setting, Rng.seeded(0)).tokens, target.device.type

    (expected, _), (tokens, device) = on_both(request, work)
    assert tokens == expected and device == "cuda"


@pytest.mark.slow
def test_labels_and_losses_are_the_hosts(request):
    def work(place):
        traced = trace([*map(place, tiny_pair(11, noise=0.06))], ["t0.6", "p0.9"])
        numbers = [float(each.double().sum()) for each in traced.values() if torch.is_tensor(each)]
        target = place(tiny_pair(29, hidden=16, layers=4)[0])
        for wiring in ({}, {"features": "three", "norms": ["fc_norm", "norm_output"]}):
            torch.manual_seed(0)
            config = HeadConfig(steps=4, batch=4, roots=3, chain_fraction=0.0, **wiring)
            module = HeadModule(build_head(target, config), config)
            rows = predictable_rows(target, 24, 4).to(target.device)
            numbers.append(float(module.loss(TokenRows.plain(rows), 2)[0].detach()))
        return numbers

    host, gpu = on_both(request, work)
    # In float32; the host computes its norms of few rows in another way (`layer.Norm`).
    assert gpu == pytest.approx(host, rel=1e-5)
