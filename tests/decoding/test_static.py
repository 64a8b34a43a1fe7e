"""Static shapes: the same numbers as the plain path, and one graph a size."""

import pytest
import torch

from nde_talf import (
    Action,
    Beam,
    CausalModel,
    Delayed,
    EagleDrafter,
    LMDrafter,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
    StaticShapes,
    TreePolicy,
)
from nde_talf.decoding.device import blocked
from nde_talf.decoding.models import static_shapes
from nde_talf.decoding.models.cache import Slots
from nde_talf.decoding.policies.delayed import draft_delayed
from nde_talf.decoding.recorded_step import RecordedShapes
from tests.decoding.families import CONTEXT, family
from tests.decoding.pairs import tiny_pair
from tests.draft_training.heads import random_eagle3, random_head
from tests.refusal import refusal

PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [3], [4, 4, 2])


def pair(name):
    return (family(name), family(name, noise=0.01)) if name != "tiny" else tiny_pair(16, layers=3)


def decoder(target, draft, policy, rule, static, head=None):
    drafter = LMDrafter(draft, static) if head is None else EagleDrafter(head, static)
    return SpeculativeDecoder(target, drafter, policy, rule, static=static)


class ManySizes(TreePolicy):
    """Trees of 2, 5, 8 and 11 drafted tokens in turn."""

    trees = "delayed"

    def draft(self, state, drafter, rng):
        step = state.memory[self] = (state.memory.get(self, -1) + 1) % 4
        return draft_delayed(Action(2, step, 1 + step), state, drafter, rng)


class Graphs:
    """A backend that runs graphs as they are, and how many there were of which number of rows."""

    def __init__(self):
        self.made = 0

    def __call__(self, graph, inputs):
        self.made += 1
        return graph.forward

    def compile(self, function):
        torch._dynamo.config.recompile_limit = 64
        return torch.compile(function, backend=self, fullgraph=True, dynamic=False)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "pythia", "gpt2", "gemma-3", "llama-4"])
@pytest.mark.parametrize(
    "policy,rule", [(Delayed(Action(3, 1, 3)), "specinfer"), (Beam(k=3, depth=3, nodes=9), "nss")]
)
def test_tokens_are_those_of_the_plain_path_up_to_a_full_context(name, policy, rule):
    target, draft = pair(name)
    static = StaticShapes(CONTEXT, rows=32)
    plain, fixed = (decoder(target, draft, policy, rule, shapes) for shapes in (None, static))
    for seed, prompt in enumerate(PROMPTS):
        asked = prompt, 1000, SamplingSetting(0.8)
        expected = plain.generate(*asked, Rng.seeded(seed)).tokens
        assert len(prompt) + len(expected) == CONTEXT + 1
        assert fixed.generate(*asked, Rng.seeded(seed)).tokens == expected


@pytest.mark.long
@pytest.mark.parametrize(
    "name,make_head",
    [
        ("llama", None),
        ("pythia", None),
        ("llama", random_head),
        pytest.param("gemma-3", None, marks=pytest.mark.law),
        pytest.param("tiny", random_eagle3, marks=pytest.mark.law),
    ],
)
def test_there_is_one_graph_a_size_and_no_other_is_ever_made(name, make_head):
    target, draft = pair(name)
    head = make_head(target) if make_head else None
    torch._dynamo.reset()
    graphs = Graphs()
    static = StaticShapes(CONTEXT, rows=16, compile=graphs.compile)
    plain, fixed = (
        decoder(target, draft, ManySizes(), "specinfer", shapes, head) for shapes in (None, static)
    )
    made = []
    for seed, prompt in enumerate(PROMPTS):
        asked = prompt, 40, SamplingSetting()
        generation = fixed.generate(*asked, Rng.seeded(seed))
        assert generation.tokens == plain.generate(*asked, Rng.seeded(seed)).tokens
        made.append(graphs.made)
    assert len(generation.stats.nodes) > 3  # trees of many sizes
    # Of target and draft, and what moves slots; all at the first prompt.
    assert made == [made[0]] * len(made) and made[0] <= 2 * (len(static.sizes) + 1)


def test_a_pass_is_shown_no_more_slots_than_a_text_needs(monkeypatch):
    """512, 1024, ... slots, here 16, 32, ...; every size of a pass runs before the first of these."""
    monkeypatch.setattr(static_shapes, "_SHOWN", 16)
    target, draft = tiny_pair(16)
    shown = []

    def compile(function):
        def run(*args, **inputs):
            if len(args) > 2:
                shown.append((args[2].shape[-1], args[0].shape[-1]))
            return function(*args, **inputs)

        return run

    static = StaticShapes(60, rows=4, compile=compile)
    assert [static.shown(end) for end in (5, 16, 17, 33, 64, 65)] == [16, 16, 32, 64, 64, 72]
    asked = [3, 4, 5], 50, SamplingSetting(0.8)
    path = Delayed(Action(1, 0, 2))
    plain, fixed = (decoder(target, draft, path, "specinfer", shapes) for shapes in (None, static))
    texts = [each.generate(*asked, Rng.seeded(0)).tokens for each in (plain, fixed)]
    assert texts[0] == texts[1]
    assert {*shown} == {(slots, size) for slots in (16, 32, 64) for size in static.sizes}
    for passes in static._passes.values():
        assert passes.cache.layers[0].keys.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,make_head", [("llama", None), ("gemma-3", None), ("llama", random_head)]
)
def test_recorded_passes_over_fixed_buffers_give_the_plain_tokens(name, make_head, monkeypatch):
    monkeypatch.setattr(static_shapes, "_SHOWN", 16)
    target, draft = pair(name)
    head = make_head(target) if make_head else None
    static = RecordedShapes(CONTEXT, rows=16)
    plain, fixed = (
        decoder(target, draft, ManySizes(), "specinfer", shapes, head) for shapes in (None, static)
    )
    for seed, prompt in enumerate(PROMPTS):
        asked = prompt, 30, SamplingSetting()
        expected = plain.generate(*asked, Rng.seeded(seed)).tokens
        assert fixed.generate(*asked, Rng.seeded(seed)).tokens == expected
    for passes in static._passes.values():
        assert len(passes.buffers) > 4  # of sizes and numbers of slots
        # Of each shape of keys one tensor.
        assert len({id(layer.slots) for layer in passes.cache.layers}) == 1


def test_keys_and_values_that_a_device_cannot_hold_are_refused_with_their_size(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    target, _ = tiny_pair(16)
    monkeypatch.setattr(Slots, "room", full)
    session = target.session((), RecordedShapes(1 << 20, rows=4))
    with refusal("keys and values of 1048632 tokens need"):
        session.append([1, 2])


def test_nothing_is_left_in_the_slot_of_padded_rows():
    """A NaN there would reach every later pass: it is multiplied by a weight of 0."""
    target, _ = tiny_pair(16)
    static = StaticShapes(20, rows=4, compile=lambda function: lambda *args: function(*args))
    session = target.session((), static)
    session.append([1, 2])
    layer = session.cache.layers[0]
    assert layer.keys[:, :, :2].any() and not layer.keys[:, :, session.passes.nowhere].any()
    session.grow([3, 4, 5], [-1, 0, 0])  # padded by one row
    assert layer.keys[:, :, session.passes.nowhere].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_a_row_does_not_see_is_no_infinity_to_a_kernel(dtype):
    hidden = torch.tensor([blocked(dtype), 0.0], dtype=dtype)
    assert (hidden.float() * 1.4427).isfinite().all()
    assert hidden.softmax(0).tolist() == [0, 1]


def test_what_does_not_fit_is_named():
    target, draft = tiny_pair(16)
    small = StaticShapes(40, rows=4)
    for action, prompt, words in (
        (Action(1, 2, 2), [1, 2], "rows=5"),
        (Action(1, 0, 1), [1] * 40, "static shapes"),
    ):
        with refusal(words):
            decoder(target, draft, Delayed(action), "specinfer", small).generate(
                prompt, 9, SamplingSetting(), Rng.seeded(0)
            )


def test_features_of_inner_layers_are_refused_where_hooks_collect_them():
    target, draft = tiny_pair(16, layers=3)
    target = CausalModel(target.module, forward="transformers")
    drafter = LMDrafter(draft)
    drafter.feature_layers = (0, 1, 2)
    with refusal("layers 0, 1, 2"):
        SpeculativeDecoder(
            target, drafter, Delayed(Action(1, 0, 2)), "naive", static=StaticShapes(100)
        )


@pytest.mark.slow
def test_a_forward_pass_that_makes_no_graph_is_refused():
    target, draft = tiny_pair(16)
    whole = target.body.forward

    def waiting(**inputs):
        print(float(inputs["position_ids"].sum()))  # a look at the numbers
        return whole(**inputs)

    target.body.forward, target.native = waiting, None
    torch._dynamo.reset()
    looking = decoder(
        target, draft, Delayed(Action(1, 0, 2)), "specinfer", StaticShapes(100, 8, Graphs().compile)
    )
    with refusal("one graph"):
        looking.generate([1], 9, SamplingSetting(), Rng.seeded(0))
