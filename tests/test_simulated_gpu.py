"""On a GPU every tensor is where it has to be, and the numbers are the host's."""

from contextlib import contextmanager

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from nde_talf import (
    Action,
    CausalModel,
    Delayed,
    EagleDrafter,
    LMDrafter,
    NeuralPolicy,
    Rng,
    SamplingSetting,
    Selector,
    SpeculativeDecoder,
)
from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.models.forward import attention, fused_weights
from nde_talf.decoding.models.lm_head import Readout
from nde_talf.decoding.models.static_shapes import FixedPasses, RecordedGraphs
from nde_talf.decoding.models.tree_session import TreeSession
from nde_talf.decoding.recorded_step import RecordedShapes
from nde_talf.decoding.rules import verification_table
from nde_talf.decoding.rules.verification_table import Rows
from nde_talf.decoding.sampling import rng as sampling
from nde_talf.decoding.sampling.nucleus import nucleus_sorted
from nde_talf.decoding.sampling.rng import locate, warp
from nde_talf.draft_training.training.head_training import HeadModule, build_head
from nde_talf.draft_training.training_settings import HeadConfig
from tests.data.test_traces import trace
from tests.decoding.pairs import tiny_pair
from tests.decoding.policies import EVERY_POLICY
from tests.draft_training.heads import predictable_rows, random_eagle3, random_head
from tests.selector.examples import TABLE, schema
from tests.simulated_gpu import GPU, Cost, OnGpu, Simulated, move

PROMPT = [1, 2, 3, 4] * 3


@pytest.fixture
def on_gpu(monkeypatch):
    """A model's copy on the simulated GPU."""
    with gpu(monkeypatch) as place:
        yield place


@contextmanager
def gpu(monkeypatch):
    """Simulate a GPU; give the function that copies a model there."""
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_: move(module))
    monkeypatch.setattr(fused_weights, "Tensor", OnGpu)
    monkeypatch.setattr(attention, "has_flash", lambda *_: False)
    monkeypatch.setattr(RecordedGraphs, "_capture", lambda graphs, function: replayed(function))
    with Simulated():
        yield lambda model: CausalModel(move(model.module))


def test_devices_do_not_mix(on_gpu):
    ones = torch.ones(3, device=GPU)
    for mixed in (lambda: ones + torch.ones(3), lambda: torch.ones(3)[ones > 0], ones.numpy):
        with pytest.raises(RuntimeError, match="on a GPU"):
            mixed()
    assert (ones + 1)[torch.arange(2)].device == GPU and ones.cpu().device.type == "cpu"


def on_host(model):
    """Leave a model on the host."""
    return model


def on_both(request, work):
    """What `work` gives for the host, and for the GPU that `place` copies to."""
    host = work(on_host)
    place = request.getfixturevalue("on_gpu")
    return host, work(place)


class Scripted(Rng):
    """Numbers by purpose: whether a draw is accepted, what a level drafts, a token at a node.

    A GPU draws the last one at every node ahead, the host where it ends: all are the same number.
    """

    def __init__(self, seed):
        self.accepted, self.drafted = Rng.seeded(seed), Rng.seeded(seed + 1)

    def bernoulli(self, probability):
        return self.accepted.bernoulli(probability)

    def categorical(self, weights, at=None):
        return self.drafted.categorical(weights, at) if at else locate(weights[None], [0], [0.6])[0]

    def ahead(self, count):
        return [0.6] * count

    def rows(self, weights, uniforms):
        drawn = self.drafted.categorical(weights, range(len(weights)))
        return torch.tensor(drawn).to(weights.device)


def selecting():
    torch.manual_seed(4)
    return NeuralPolicy(Selector(schema(16, 16, "specinfer")), TABLE)


POLICIES = EVERY_POLICY | {
    "selector": (selecting, "specinfer"),
    "gbv": (lambda: Delayed(Action(3, 0, 2)), "gbv"),
}
CASES = [(name, "lm") for name in POLICIES]
CASES += [(name, head) for name in ("delayed", "beam") for head in ("eagle", "eagle3")]
CASES += [("delayed", "recorded"), ("selector", "recorded")]


@pytest.mark.slow
@pytest.mark.parametrize("name,drafter", CASES)
def test_a_gpu_draws_the_hosts_tokens(name, drafter, request):
    make, rule = POLICIES[name]

    def work(place):
        target, draft = map(place, tiny_pair(29, hidden=16, layers=4))
        recorded = drafter == "recorded" and place is not on_host
        static = recording() if recorded else None
        if drafter in ("lm", "recorded"):
            drafts = LMDrafter(draft, static)
        else:
            drafts = EagleDrafter((random_head if drafter == "eagle" else random_eagle3)(target))
        decoder = SpeculativeDecoder(target, drafts, make(), rule, static=static)
        setting = SamplingSetting(1.0, 0.9)
        return decoder.generate(PROMPT, 24, setting, Scripted(0)).tokens, target.device.type

    (expected, _), (tokens, device) = on_both(request, work)
    assert tokens == expected and device == "cuda"


STEPS, FORKED = 8, Action(4, 0, 3)


def recording():
    """Shapes with which steps are recorded."""
    return RecordedShapes(256, rows=48)


def replayed(function):
    """A graph's replay, counted."""

    def run():
        if Cost.now:
            Cost.now.counts["replays"] += 1
        return function()

    return run


def cost_of_a_step(
    place, patch, rule, drafter="lm", setting=SamplingSetting(0.6), static=None, action=FORKED
):
    """Kernels, waits, uploads and replays of a step, a mean, besides the models' passes."""
    cost, new, fixed = Cost(), TreeSession.__init__, FixedPasses.__init__

    def uncounted(function):
        def run(*args, **kwargs):
            with cost.paused():
                return function(*args, **kwargs)

        return run

    patch.setattr(
        TreeSession,
        "__init__",
        lambda session, forward, *args: new(session, uncounted(forward), *args),
    )
    patch.setattr(
        FixedPasses,
        "__init__",
        lambda passes, forward, *args: fixed(passes, uncounted(forward), *args),
    )
    patch.setattr(Readout, "__call__", uncounted(Readout.__call__))
    target, draft = map(place, tiny_pair(29, hidden=16, layers=4))
    if drafter == "head":
        drafts = EagleDrafter(random_head(target), static)
    else:
        drafts = LMDrafter(draft, static)
    policy = selecting() if drafter == "selector" else Delayed(action)
    decoder = SpeculativeDecoder(target, drafts, policy, rule, static=static)
    decoder.generate(PROMPT, 60, setting, Rng.seeded(0))  # what runs first is no replay
    steps = decoder.stream(PROMPT, setting, Rng.seeded(0))
    next(steps), next(steps)
    with cost:
        for _ in range(STEPS):
            next(steps)
    return {name: count / STEPS for name, count in cost.counts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["specinfer", "traversal"])
def test_verification_waits_once(rule, on_gpu, monkeypatch):
    """Besides it a step waits for the draws of each of three levels."""
    assert cost_of_a_step(on_gpu, monkeypatch, rule)["waits"] == 3 + 1


@pytest.mark.slow
@pytest.mark.parametrize("drafter,count", [("lm", 1), ("head", 1), ("selector", 2)])
def test_a_recorded_step_uploads_once_and_waits_once(drafter, count, on_gpu, monkeypatch):
    """A selector chooses between two halves of a step."""
    setting = SamplingSetting(0.6, 0.9)
    cost = cost_of_a_step(on_gpu, monkeypatch, "traversal", drafter, setting, recording())
    assert (cost["uploads"], cost["waits"]) == (count, count)


@pytest.mark.parametrize("bottom_up", [False, True])
@pytest.mark.parametrize("setting", [SamplingSetting(0.6), SamplingSetting(0.6, 0.9, 5)], ids=str)
def test_a_graph_could_hold_verification(bottom_up, setting, monkeypatch):
    """Traced with tensors that have no numbers: nothing is read, no shape depends on any."""
    monkeypatch.setattr(sampling, "nucleus", nucleus_sorted)
    above = torch.tensor([-1, 0, 0, 1, 1, 2])
    inputs = torch.randn(6, 9), torch.randn(6, 9), torch.rand(6, dtype=torch.float64), above

    def table(p, q, uniforms, above):
        """All that verification computes on a GPU, from logits."""
        p, q = warp(p, setting), warp(q, setting)
        rows = Rows(p, q, torch.ones_like(uniforms), above.clamp(min=0), above)
        if bottom_up:
            rows.reach(torch.arange(1, 3), 2)
            rows.reach(torch.arange(3, 6), 2)
        return rows.table(uniforms, 2), rows.q

    traced = make_fx(table, tracing_mode="fake")(*inputs)
    for ours, expected in zip(traced(*inputs), table(*inputs), strict=True):
        torch.testing.assert_close(ours, expected)


RULES = ("specinfer", "naivetree", "nss", "traversal")
if __name__ == "__main__":  # prints the table of benchmarks/results/gpu.md
    import sys

    with pytest.MonkeyPatch.context() as patch, gpu(patch) as place:
        if "--walk" in sys.argv:  # as before the table
            patch.setattr(verification_table, "asynchronous", lambda device: False)
        for drafter in ("lm", "head", "selector"):
            for setting in (SamplingSetting(0.6), SamplingSetting(0.6, 0.9)):
                for rule in RULES:
                    for static in (None, recording()):
                        with pytest.MonkeyPatch.context() as inner:
                            cost = cost_of_a_step(place, inner, rule, drafter, setting, static)
                        way = "as it is" if static is None else "recorded"
                        print(drafter, setting.top_p, rule, way, cost, flush=True)


@pytest.mark.slow
def test_labels_and_losses_are_the_hosts(request):
    def work(place):
        pair = [*map(place, tiny_pair(11, noise=0.06))]
        traced = [each for name in ("t0.6", "p0.9") for each in trace(pair, name).values()]
        numbers = [float(each.double().sum()) for each in traced if torch.is_tensor(each)]
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
