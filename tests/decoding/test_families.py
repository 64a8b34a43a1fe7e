"""Today's model families, with tiny random weights, well past their windows and with drafts of
other rows: decoding, caches, super-trees and sampled laws are those of plain passes.

Where one pass cannot hold a tree, it is scored branch by branch.
"""

import random
from itertools import product

import pytest
import torch
from transformers import DynamicCache

from nde_talf import (
    Action,
    Beam,
    CausalModel,
    Delayed,
    EagleDrafter,
    LMDrafter,
    NgramDrafter,
    NgramTree,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
    StaticShapes,
)
from nde_talf.data.traces.super_trees import Prefix, super_trees
from nde_talf.decoding import registry
from nde_talf.decoding.models.cache import KVCache
from nde_talf.decoding.models.choose_forward import HALF
from nde_talf.decoding.models.forward import attention
from nde_talf.decoding.sampling.rng import warp
from nde_talf.decoding.super_tree import super_tree_layout
from nde_talf.decoding.testing import exact_law
from tests.decoding.families import CONTEXT, EVERY, FAMILIES, FORMS, V, family, module, text
from tests.decoding.memoized import memoized_model
from tests.decoding.policies import EVERY_POLICY
from tests.draft_training.heads import random_eagle3, random_head
from tests.refusal import refusal

# One of each kind of mask, read-out and table of positions: these run in make check, and their long
# tests in make test.
FAST = ("mistral", "gemma-3-images", "opt-350m", "llama-4", "lfm2", "bloom", "mamba")
EACH = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in EVERY]
LONG = [
    pytest.param(
        name, marks=pytest.mark.slow if name in (*FAST, "gemma-2", "gpt-oss") else pytest.mark.law
    )
    for name in EVERY
]
FEWER, MORE = V - 3, V + 5  # rows of a draft


def padded_pair(name, rows):
    target, draft = family(name), family(name, noise=0.01, rows=rows)
    draft.match(target.vocab_size)
    return target, draft


@torch.no_grad()
def alone(model, tokens):
    """Logits [L, V] of a plain pass over tokens that the model knows."""
    return model.module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_greedy_text_is_that_of_plain_passes(name):
    """Well past the window, with trees deeper than half of it; also with static shapes."""
    prompt, static = text(20), StaticShapes(CONTEXT, rows=32)
    for rows, policy, rule, shapes in (
        (FEWER, Delayed(Action(2, 3, 8)), "specinfer", None),
        (MORE, Beam(k=2, depth=10, nodes=16), "greedy", static),
    ):
        target, draft = padded_pair(name, rows)
        assert target.form == draft.form == FORMS[name]
        shapes = shapes if target.form == "masks" else None
        decoder = SpeculativeDecoder(target, LMDrafter(draft, shapes), policy, rule, static=shapes)
        generation = decoder.generate(prompt, 32, SamplingSetting(0.0), Rng.seeded(0))
        plain = alone(target, [*prompt, *generation.tokens])[len(prompt) - 1 : -1].argmax(-1)
        assert generation.tokens == plain.tolist()
        assert generation.block_efficiency > 1.1


@pytest.mark.slow
@pytest.mark.parametrize("name", (*FAST[:-1], "llama-3", "qwen2", "qwen3", "gemma-2", "gemma-3"))
def test_greedy_text_in_bfloat16_is_transformers_but_for_close_tokens(name):
    """Weights, the output layer and the cache are in bfloat16; probabilities are in float32.

    Transformers' Mamba does not run in bfloat16 without its kernels.
    """
    target, prompt = CausalModel(family(name).module.to(torch.bfloat16), name), text(20)
    drafter = LMDrafter(family(name, noise=0.01))
    decoder = SpeculativeDecoder(target, drafter, Delayed(Action(2, 3, 4)), "specinfer")
    generation = decoder.generate(prompt, 32, SamplingSetting(0.0), Rng.seeded(0))
    plain = alone(target, [*prompt, *generation.tokens])[len(prompt) - 1 : -1].float()
    best, taken = plain.max(-1).values, plain[torch.arange(32), torch.tensor(generation.tokens)]
    assert (best - taken <= HALF * plain.abs().amax(-1)).all()
    assert (taken == best).float().mean() > 0.8
    if target.config.model_type in registry.FAMILIES:
        matrices = [each for each in target.native.tensors if each.numel() > 4 * target.hidden_size]
        assert {each.dtype for each in matrices} == {torch.bfloat16}
    if target.form == "masks":
        (session := target.session()).append(prompt)
        assert {layer.keys.dtype for layer in session.cache.layers} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
@torch.inference_mode()
def test_trees_and_cache_are_those_of_plain_passes_after_random_steps(name, monkeypatch):
    """Under a mask as wide as the text, or with attention to the text without one."""
    model, choose = family(name), random.Random(0)
    session, committed = model.session(), text(18)
    session.append(committed)
    for _ in range(20):
        monkeypatch.setattr(attention, "OPEN_FROM", {"cpu": choose.choice((1, CONTEXT))})
        if len(committed) > 60:
            session.reset()
            session.append(committed := text(18, choose.randrange(99)))
        paths = []  # rows from the top down to each row
        for count in (choose.randint(1, 9), choose.randint(1, 6)):
            parents = [
                choose.randint(max(-1, row - 4), row - 1)
                for row in range(len(paths), len(paths) + count)
            ]
            for row, parent in enumerate(parents, len(paths)):
                paths.append([*(paths[parent] if parent >= 0 else []), row])
            tokens = text(len(paths))
            hidden = session.grow(tokens[-count:], parents)
        last = paths[-1]
        expected = alone(model, [*committed, *(tokens[row] for row in last)])[-1]
        torch.testing.assert_close(model.logits(hidden[-1]), expected, atol=1e-4, rtol=1e-4)
        path = choose.choice(paths)[: choose.randint(0, 3)]
        session.commit(path)
        committed += [tokens[row] for row in path]
        if choose.random() < 0.5:
            session.append(more := text(choose.randint(1, 3), choose.randrange(99)))
            committed += more
    if model.form != "masks":
        return
    plain = KVCache()
    model.hidden(torch.tensor([committed]), torch.arange(len(committed))[None], None, plain)
    for layer, other in zip(
        session.cache.layers, plain.layers, strict=False
    ):  # layers that share keys have none of their own
        for ours, theirs in ((layer.keys, other.keys), (layer.values, other.values)):
            length = len(committed)
            torch.testing.assert_close(
                ours[:, :, :length], theirs[:, :, :length], atol=1e-4, rtol=1e-4
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
@torch.inference_mode()
def test_rows_of_super_trees_are_those_of_plain_passes(name):
    """Both models' distributions, over the target's rows, from which labels are made."""
    setting, layout, trajectory = (
        SamplingSetting(0.8),
        super_tree_layout(2, 2, 8),
        torch.tensor(text(30)),
    )
    roots = torch.tensor([3, 22])
    for rows in (FEWER, MORE):
        target, draft = padded_pair(name, rows)
        prefixes = Prefix(target, trajectory), Prefix(draft, trajectory)
        generator = torch.Generator().manual_seed(0)
        uniforms = torch.rand(2, len(layout), generator=generator, dtype=torch.float64)
        trees = super_trees(*prefixes, roots, layout, setting, uniforms, 9)
        states = (target, trees.h_p), (draft, trees.h_q)
        rows_of = [warp(model.logits(hidden), setting) for model, hidden in states]
        for tree, root in enumerate(roots.tolist()):
            for row in range(layout.inner - 6, layout.inner):
                tokens = [
                    *trajectory[:root].tolist(),
                    *trees.tokens[tree][layout.ancestors[row]].tolist(),
                ]
                known = (
                    torch.tensor(tokens).where(torch.tensor(tokens) < rows, draft._unknown).tolist()
                )
                p, q = warp(alone(target, tokens)[-1], setting), torch.zeros(V)
                q[:rows] = warp(alone(draft, known)[-1, :V], setting)
                torch.testing.assert_close(rows_of[0][tree, row], p, atol=1e-4, rtol=1e-3)
                torch.testing.assert_close(rows_of[1][tree, row], q, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", LONG)
def test_the_law_of_three_tokens_is_the_targets(name):
    """Past the window; the draft knows one token less than the target, and one more that the target
    does not have.
    """
    setting, prompt = SamplingSetting(0.9), [token % 3 for token in text(18)]
    for rows in (2, 4):
        target, draft = family(name, rows=3), family(name, noise=0.1, rows=rows)
        draft.match(target.vocab_size)
        remembered = memoized_model if target.form == "masks" else lambda model: model
        decoder = SpeculativeDecoder(
            remembered(target), LMDrafter(remembered(draft)), Delayed(Action(1, 0, 1)), "naive"
        )
        law = exact_law(lambda rng, of=decoder: tuple(of.generate(prompt, 3, setting, rng).tokens))
        for tokens in product(range(3), repeat=3):
            p = warp(alone(target, [*prompt, *tokens])[len(prompt) - 1 : -1].double(), setting)
            assert law.get(tokens, 0.0) == pytest.approx(
                float(p[range(3), tokens].prod()), abs=1e-5
            )


def test_a_model_whose_pass_returns_no_memory_is_refused_with_the_reason():
    changes = {"block_types": ["recurrent", "attention"], "lru_width": 32}
    with refusal(r"its name: .*recurrent state.*returns no memory"):
        CausalModel(module("recurrent_gemma", changes), "its name")


DRAFTERS = {
    "a transformer for a hybrid": ("lfm2", lambda target: LMDrafter(family("llama"))),
    "a recurrent one for a transformer": ("llama", lambda target: LMDrafter(family("mamba"))),
    "n-grams for a hybrid": ("qwen3-next", lambda target: NgramDrafter(V)),
    "a head for a hybrid": ("qwen3-next", lambda target: EagleDrafter(random_head(target))),
    "EAGLE-3 for a hybrid": ("qwen3-next", lambda target: EagleDrafter(random_eagle3(target))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_serve_targets_of_another_kind(name):
    target = family(DRAFTERS[name][0])
    prompt, drafter = text(20), DRAFTERS[name][1](target)
    looked_up = isinstance(drafter, NgramDrafter)
    policy, rule = (NgramTree(), "greedy") if looked_up else (Delayed(Action(2, 1, 2)), "specinfer")
    decoder = SpeculativeDecoder(target, drafter, policy, rule)
    tokens = decoder.generate(prompt, 24, SamplingSetting(0.0), Rng.seeded(0)).tokens
    plain = alone(target, [*prompt, *tokens])[len(prompt) - 1 : -1].argmax(-1)
    assert tokens == plain.tolist()


def test_a_memory_that_does_not_copy_is_found_out(monkeypatch):
    """Branches that wrote into one memory would see each other's tokens."""
    monkeypatch.setattr(DynamicCache, "__module__", "somebody's")
    with refusal(r"branch by branch it failed \(.*[Ss]ize"):
        CausalModel(module(*EVERY["lfm2"]), "its name")


def test_a_context_ends_where_logits_would_depend_on_the_pass():
    """Phi-3's long angles hold for a pass as a whole; Llama 4's scale of scores counts slots of the
    cache.
    """
    assert (
        family("phi-3-long").max_context
        == CONTEXT
        < family("phi-3-long").config.max_position_embeddings
    )
    kind, changes = FAMILIES["llama-4"]
    assert CausalModel(module(kind, changes | {"floor_scale": 1100})).max_context == 76


def test_a_window_in_the_configuration_of_a_family_without_any_does_nothing():
    assert CausalModel(module("llama", {"sliding_window": 3})).windows == {}


def test_attention_that_ignores_the_mask_is_found_out():
    """The check runs the model; it does not go by its name."""
    model = module("llama", {})
    whole = model.base_model.forward
    model.base_model.forward = lambda attention_mask=None, **inputs: whole(**inputs)
    model = CausalModel(model, "its name", "transformers")
    assert model.form == "branches" and "each branch alone" in model.forward


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_POLICY)
def test_a_context_that_fills_up_in_the_middle_of_a_tree_makes_it_smaller(name):
    """OPT's table of positions ends with its context: a tree that reached beyond would be an error."""
    target, draft = family("opt"), family("opt", noise=0.01)
    make, rule = EVERY_POLICY[name]
    decoder = SpeculativeDecoder(target, LMDrafter(draft), make(), rule)
    prompt = [5] * 80
    generation = decoder.generate(prompt, 1000, SamplingSetting(), Rng.seeded(0))
    assert len(prompt) + len(generation.tokens) == CONTEXT + 1  # the last token needs no position
    assert all(step.nodes >= 1 for step in generation.steps)
