"""How often a step waits for the device, counted without one."""

from collections import Counter

import pytest
import torch

from nde_talf.decoding import device
from nde_talf.decoding.actions import Action
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.policies.fixed import Shaped, fixed_shape
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting, search_on_device
from nde_talf.decoding.static import StaticShapes
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.selector.evaluate import EntropyRule
from nde_talf.selector.network import Selector
from nde_talf.selector.policy import NeuralPolicy
from tests.decoding.fake_device import Made, OnDevice, moved, moved_pass, pretend
from tests.decoding.on_device import METHODS
from tests.decoding.pairs import tiny_pair
from tests.draft_training.heads import random_head
from tests.selector.examples import TABLE, schema


@pytest.fixture
def on_a_device(monkeypatch):
    """Target, draft and head."""
    target, draft = tiny_pair(16, layers=2)
    head = random_head(target)
    head.run_native()
    for module, native in (
        (target.module, target.native),
        (draft.module, draft.native),
        (head, head.native),
    ):
        moved(module)
        moved_pass(native)
    pretend(monkeypatch)
    return target, draft, head


def waits_of_steps(
    decoder: SpeculativeDecoder, setting: SamplingSetting, steps: int = 12
) -> list[Counter]:
    """What the host waited for in each step."""
    found = []
    with Made():
        stream = decoder.stream([1, 2, 3], setting, Rng.seeded(0))
        next(stream)
        for _ in range(steps):
            OnDevice.waits.clear()
            next(stream)
            found.append(+OnDevice.waits)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [SamplingSetting(1.0), SamplingSetting(0.7, 0.9), SamplingSetting(0.0)], ids=str
)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize(
    "name,policy", METHODS, ids=lambda x: x if isinstance(x, str) else type(x).__name__
)
def test_a_step_waits_once(on_a_device, name, policy, with_head, static, setting):
    target, draft, head = on_a_device
    shapes = StaticShapes(120, rows=32) if static else None
    drafter = EagleDrafter(head, shapes) if with_head else LMDrafter(draft, shapes)
    decoder = SpeculativeDecoder(
        target, drafter, policy, VERIFIERS[name], static=shapes, device=True
    )
    assert waits_of_steps(decoder, setting) == [Counter(tolist=1)] * 12


@pytest.mark.parametrize("name", ["naivetree", "spectr", "khisti", "gbv", "greedy"])
def test_a_step_waits_once_by_the_other_rules(on_a_device, name):
    target, draft, _ = on_a_device
    decoder = SpeculativeDecoder(
        target, LMDrafter(draft), Delayed(Action(3, 2, 2)), VERIFIERS[name], device=True
    )
    setting = SamplingSetting(0.0) if name == "greedy" else SamplingSetting(0.7, 0.9)
    assert waits_of_steps(decoder, setting, steps=6) == [Counter(tolist=1)] * 6


@pytest.mark.parametrize(
    "trees,name",
    [
        ("iid", "traversal"),
        ("without_replacement", "traversal_without_replacement"),
        ("top_k", "nss"),
    ],
)
def test_a_step_with_a_fixed_shape_waits_once(on_a_device, trees, name):
    target, draft, _ = on_a_device
    policy = Shaped(fixed_shape(3, 3, 12), trees)
    decoder = SpeculativeDecoder(target, LMDrafter(draft), policy, VERIFIERS[name], device=True)
    assert waits_of_steps(decoder, SamplingSetting(0.7, 0.9), steps=6) == [Counter(tolist=1)] * 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,setting", [("nss", SamplingSetting(0.7, 0.9)), ("greedy", SamplingSetting(0.0))], ids=str
)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("with_head", [False, True])
def test_a_step_with_a_beam_waits_once(on_a_device, with_head, static, name, setting):
    target, draft, head = on_a_device
    shapes = StaticShapes(120, rows=16) if static else None
    drafter = EagleDrafter(head, shapes) if with_head else LMDrafter(draft, shapes)
    decoder = SpeculativeDecoder(
        target, drafter, Beam(3, 3, 9), VERIFIERS[name], static=shapes, device=True
    )
    assert waits_of_steps(decoder, setting, steps=6) == [Counter(tolist=1)] * 6


@pytest.mark.slow
@pytest.mark.parametrize("with_head", [False, True])
def test_a_policy_that_chooses_by_features_waits_no_more(on_a_device, with_head):
    target, draft, head = on_a_device
    chosen = NeuralPolicy(moved(Selector(schema(16, 16, ("specinfer", "traversal")))), TABLE)
    drafter = EagleDrafter(head) if with_head else LMDrafter(draft)
    decoder = SpeculativeDecoder(target, drafter, chosen, chosen.verifier, device=True)
    assert waits_of_steps(decoder, SamplingSetting()) == [Counter(tolist=1)] * 12


@pytest.mark.slow
@pytest.mark.parametrize("with_head", [False, True])
def test_streams_read_in_turn_wait_once_a_step_each_and_write_what_they_write_alone(
    on_a_device, with_head
):
    target, draft, head = on_a_device
    chosen = NeuralPolicy(moved(Selector(schema(16, 16, ("specinfer", "traversal")))), TABLE)
    asked = [([1, 2, 3], SamplingSetting(1.0)), ([5, 4], SamplingSetting(0.7, 0.9))]
    decoder = SpeculativeDecoder(
        target,
        EagleDrafter(head) if with_head else LMDrafter(draft),
        chosen,
        chosen.verifier,
        device=True,
    )

    def begun() -> list:
        return [
            decoder.stream(prompt, setting, Rng.seeded(seed))
            for seed, (prompt, setting) in enumerate(asked)
        ]

    with Made():
        alone = [[next(stream)[0], *(next(stream).tokens for _ in range(8))] for stream in begun()]
        streams = begun()
        together, waits = [[next(stream)[0]] for stream in streams], []
        for _ in range(8):
            for text, stream in zip(together, streams, strict=True):
                OnDevice.waits.clear()
                text.append(next(stream).tokens)
                waits.append(+OnDevice.waits)
    assert together == alone and waits == [Counter(tolist=1)] * 16


def test_the_rule_by_entropy_waits_no_more(on_a_device):
    target, draft, _ = on_a_device
    rule = EntropyRule([0.5, 2.5], [Action(1, 0, 4), Action(2, 1, 2), Action(3, 0, 1)])
    decoder = SpeculativeDecoder(
        target, LMDrafter(draft), rule, VERIFIERS["traversal"], device=True
    )
    assert waits_of_steps(decoder, SamplingSetting()) == [Counter(tolist=1)] * 12


def test_draws_of_a_level_are_read_together(on_a_device):
    rows = torch.rand(3, 8).as_subclass(OnDevice)
    OnDevice.waits.clear()
    with Made():
        found = search_on_device(rows, [0, 1, 1, 2], [0.1, 0.5, 0.9, 0.99])
    assert len(found) == 4 and +OnDevice.waits == Counter(tolist=1)


def test_waits_are_counted(on_a_device):
    """On the host's path there are many, so the count is one."""
    target, draft, _ = on_a_device
    decoder = SpeculativeDecoder(
        target, LMDrafter(draft), Delayed(Action(3, 2, 2)), VERIFIERS["specinfer"], device=False
    )
    assert min(sum(waits.values()) for waits in waits_of_steps(decoder, SamplingSetting())) > 5


def test_a_gpu_is_asynchronous_and_a_cpu_is_not():
    assert device.asynchronous(torch.device("cuda")) and not device.asynchronous(
        torch.device("cpu")
    )
