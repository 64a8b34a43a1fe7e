"""Native forward passes: transformers' numbers in every kind of pass, with its own weights,
whatever is done to them.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nde_talf import CausalModel
from nde_talf.decoding.models.cache import KVCache
from nde_talf.decoding.models.forward import attention, layer
from nde_talf.decoding.models.forward.attention import attend, seen_in
from nde_talf.decoding.models.forward.rotary import RotaryTable
from nde_talf.decoding.models.forward.seen import Seen
from nde_talf.decoding.models.forward.windows import Window
from tests.decoding.families import FAMILIES, family, module, text
from tests.refusal import refusal

NATIVE = ("llama", "llama-2", "llama-3", "mistral", "mistral-3", "qwen2", "qwen2-window", "qwen3")
NATIVE += ("gemma-2", "gemma-3", "gemma-3-images")


# Attention


@pytest.mark.parametrize("window", [None, 3, 12])
@pytest.mark.parametrize("prefix", [1, 50])
@pytest.mark.parametrize(
    "heads,dtype", [(2, torch.float32), (6, torch.float32), (6, torch.bfloat16)]
)
@torch.no_grad()
def test_text_without_a_mask_and_tree_under_one_are_plain_attention(
    monkeypatch, window, prefix, heads, dtype
):
    """Also past the window, whose edge runs through the text, and deeper than the window."""
    monkeypatch.setattr(attention, "OPEN_FROM", {"cpu": 1})
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(2, count, slots, 8, generator=generator).to(dtype)
        for count, slots in ((heads, 6), (2, prefix + 8), (2, prefix + 8))
    )
    parents, depth = [-1, 0, 0, 1, 3, 4, 5, 6], [0, 1, 1, 2, 3, 4, 5, 6]
    sees = torch.eye(8, dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            sees[row] |= sees[parent]
    columns = torch.tensor([[*range(prefix), *(prefix + d for d in depth)]])
    rows = columns[:, -6:].expand(2, -1)  # the first two rows of the tree lie in the cache
    mask = torch.zeros(1, 1, 6, 8, dtype=dtype).masked_fill(~sees[2:], torch.finfo(dtype).min)
    how = None if window is None else Window(window)
    seen = seen_in(how, mask, rows, columns.expand(2, -1), prefix + 2, dtype, heads // 2)
    assert seen.text == (prefix if window is None else 0)
    attended = attend(query, keys, values, seen, 0.3)

    full = torch.zeros(6, prefix + 8, dtype=torch.bool)
    full[:, prefix:] = ~sees[2:]
    if window is not None:
        full |= rows[0, :, None] - columns >= window
    wide = torch.zeros(6, prefix + 8).masked_fill(full, -torch.inf)
    repeated = (states.float().repeat_interleave(heads // 2, 1) for states in (keys, values))
    expected = F.scaled_dot_product_attention(query.float(), *repeated, attn_mask=wide, scale=0.3)
    error = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        attended.view(2, 6, heads, 8).transpose(1, 2).float(), expected, atol=error, rtol=error
    )


@torch.no_grad()
def test_a_lone_row_of_bfloat16_is_plain_attention():
    query, keys, values = (torch.randn(2, 3, slots, 8) for slots in (1, 300, 300))
    ours = attend(query.bfloat16(), keys.bfloat16(), values.bfloat16(), Seen(), 0.3)
    theirs = F.scaled_dot_product_attention(query, keys, values, scale=0.3)
    assert (ours.view(theirs.shape) - theirs).abs().max() < 0.02


# Passes


@pytest.mark.slow
@pytest.mark.parametrize("name", NATIVE)
@torch.no_grad()
def test_batches_under_a_mask_and_features_of_inner_layers_are_those_of_transformers(
    name, monkeypatch
):
    monkeypatch.setattr("nde_talf.decoding.models.forward.attention.BLOCK", 7)
    model, layers = family(name), (0, 1, 2)
    theirs = CausalModel(model.module, model.name, "transformers")
    assert model.forward.startswith("native")
    assert theirs.forward == "transformers'" and theirs.native is None
    tokens, positions = torch.tensor([text(30), text(30, 2)]), torch.arange(30)[None]
    for mask in (None, torch.full((2, 1, 30, 30), torch.finfo(torch.float32).min).triu(1)):
        if mask is not None:
            mask[1, 0, 20:, 3:5] = mask.min()
        states = [
            m.reader(layers)(tokens, positions.expand(2, -1), mask, KVCache())
            for m in (model, theirs)
        ]
        torch.testing.assert_close(*states, atol=2e-5, rtol=1e-4)
    assert model.reader(layers) is model.reader(layers)


@torch.no_grad()
def test_a_context_beyond_the_first_table_of_positions():
    model = CausalModel(module("llama", {"max_position_embeddings": 4096}))
    session, tokens = model.session(), [i * 7 % 50 for i in range(1100)]
    for part in (tokens[:9], tokens[9:]):
        session.append(part)
    logits = model.logits(session.grow([1, 2, 3], [-1, 0, 0]))[-1]
    alone = model.module(input_ids=torch.tensor([[*tokens, 1, 3]])).logits[0, -1]
    torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


# Weights


def same_logits(model):
    tokens = torch.tensor([text(9)], device=model.device)
    with torch.no_grad():
        logits = model.logits(
            model.hidden(tokens, torch.arange(9)[None], None, KVCache(model.layers))
        )
        torch.testing.assert_close(
            logits, model.module(input_ids=tokens).logits, atol=1e-4, rtol=1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma-3"])
def test_weights_are_shared_and_changes_of_any_kind_are_seen_by_the_next_sequence(name, tmp_path):
    model = family(name)
    weights = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes()
        for weight in model.module.parameters()
    }
    assert sum(weights.values()) == sum(
        weight.nbytes for weight in model.module.parameters()
    )  # and no storage is half used
    block = model.body.layers[0]
    assert model.native.layers[0].qkv.weight.data_ptr() == block.self_attn.q_proj.weight.data_ptr()
    generator = torch.Generator().manual_seed(0)
    for weight in model.module.parameters():  # in place, as an optimizer or load_state_dict does
        weight.data.add_(0.05 * torch.randn(weight.shape, generator=generator))
    same_logits(model)
    block.self_attn.k_proj.weight = nn.Parameter(
        block.self_attn.k_proj.weight * 1.1, requires_grad=False
    )
    same_logits(model)
    block.mlp.up_proj = nn.Linear(32, 48, bias=False).requires_grad_(False)
    same_logits(model)
    model.module.double()
    same_logits(model)
    model.module.save_pretrained(tmp_path)
    loaded = CausalModel.load(tmp_path, dtype="float64")
    assert all(
        torch.equal(parameter, loaded.module.get_parameter(n))
        for n, parameter in model.module.named_parameters()
    )


def test_passes_inside_and_outside_of_inference_mode():
    for made_inside in (True, False):
        with torch.inference_mode(made_inside):
            model = family("llama")
        same_logits(model)
        with torch.inference_mode():
            same_logits(model)
        same_logits(model)


def test_a_model_that_became_something_else_is_refused():
    class Adapted(nn.Linear):
        pass

    model = family("llama")
    model.body.layers[1].mlp.down_proj = Adapted(48, 32)
    with refusal(r"changed since it was loaded.* Adapted.*CausalModel of it again"):
        same_logits(model)


# Which forward


def test_quantised_weights_have_no_native_forward():
    changed = module("llama", {})
    changed.is_quantized = True
    assert "its weights are quantised" in CausalModel(changed).forward


@pytest.mark.parametrize(
    "name,changes,reason",
    [
        ("gpt2", {}, "none for models of type gpt2"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "of type dynamic",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "looks ahead"),
    ],
)
def test_what_has_no_native_forward_runs_through_transformers_and_says_why(name, changes, reason):
    if name != "gemma3_text":  # which transformers cannot run here either
        model = CausalModel(module(name, changes))
        assert reason in model.forward
    with refusal(f"its name: model.forward=native is not possible: .*{reason}"):
        CausalModel(module(name, changes), "its name", "native")


@pytest.mark.parametrize(
    "dtype,factor,allowed", [(torch.float32, 1.001, "0.0001"), (torch.bfloat16, 1.5, "0.05")]
)
def test_logits_that_differ_by_more_than_the_stated_bound_fall_back(dtype, factor, allowed):
    changed = module("llama", {}).to(dtype)
    changed.model.layers[0].mlp.register_forward_hook(lambda layer, args, output: output * factor)
    model = CausalModel(changed)
    assert f"of the largest, and {allowed} is allowed" in model.forward
    for forward, words in (("native", "its logits differ"), ("fast", "choose one of auto, native")):
        with refusal(words):
            CausalModel(changed, forward=forward)
    assert float(model.forward.split(" by ")[1].split()[0]) < 50 * float(
        allowed
    )  # so that a looser bound would take it


def untrained(name, dtype):
    """A model whose first tokens are huge, as special and unused ones may be, in `dtype`."""
    model = module(*FAMILIES[name])
    rows = model.get_input_embeddings().weight
    with torch.no_grad():
        rows[:9] = torch.randn(9, 1) * 1e4
    return model.to(dtype)


PLANTED = {
    "siblings": "seen_in",
    "NaN": "seen_in",
    "windows": "seen_in",
    "positions": "RotaryTable.at",
    "norms": "Norm.__call__",
}
SOME = ("mistral", "gemma-2")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SOME else pytest.mark.long) for n in NATIVE]
)
def test_faults_are_found_at_loading_beside_untrained_tokens(name, dtype, monkeypatch):
    """The plain pass over a few tokens is right in most cases."""
    model = untrained(name, dtype)
    whole = CausalModel(model)
    assert "over text, trees and far positions its logits are transformers'" in whole.forward
    at, norm = RotaryTable.at, layer.Norm.__call__

    def seen(window, mask, rows, columns, cached, *others, **more):
        if cached and mask is not None:  # siblings see one another
            mask = mask * {"siblings": 0, "NaN": torch.nan}.get(fault, 1)
        return seen_in(
            None if fault == "windows" else window, mask, rows, columns, cached, *others, **more
        )

    wrong = {
        "seen_in": seen,
        "RotaryTable.at": lambda table, positions: at(table, positions.clamp(max=20)),
        "Norm.__call__": lambda own, states: norm(own, states) * 1.2,
    }
    for fault, place in PLANTED.items():
        if fault == "windows" and not whole.windows.get("sliding_attention"):
            continue
        with monkeypatch.context() as patched:
            patched.setattr(f"nde_talf.decoding.models.forward.native.{place}", wrong[place])
            words = CausalModel(model).forward
        assert "its logits differ from transformers' by" in words, fault


def test_a_model_whose_first_tokens_differ_between_transformers_own_passes_is_native():
    """Its layers blow rounding up after those tokens, as SmolLM2's do in bfloat16."""
    model = module("llama", {}).to(torch.bfloat16)
    first = torch.arange(9)

    def chaotic(layer, args, output):
        return output + output.abs().amax() * torch.randn_like(output) if seen[-1] else output

    seen = [False]
    model.model.embed_tokens.register_forward_hook(
        lambda part, args, output: seen.append(bool(torch.isin(args[0], first).any()))
    )
    model.model.layers[0].mlp.register_forward_hook(chaotic)
    assert CausalModel(model).forward.startswith("native")


def test_under_autocast_passes_are_those_of_transformers():
    model, tokens = family("llama"), torch.tensor([text(9)])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden = model.hidden(tokens, torch.arange(9)[None], None, None)
        assert torch.equal(hidden, model.body(tokens).last_hidden_state)
