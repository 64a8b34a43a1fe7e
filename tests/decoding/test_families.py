"""Model families with tiny random weights: rotary and absolute positions decode as transformers does; what cannot hold a tree
is refused with the reason."""

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from decoding.actions import Action
from decoding.common.errors import UserError
from decoding.drafter import LMDrafter
from decoding.loop import SpeculativeDecoder
from decoding.model import CausalModel
from decoding.policies.beam import Beam
from decoding.policies.delayed import Delayed
from decoding.policies.dynatree import DynaTree
from decoding.policies.dyspec import DySpec, DySpecThreshold
from decoding.policies.fixed import Shaped, fixed_shape
from decoding.policies.salf import Salf
from decoding.sampling import Rng, SamplingSetting
from decoding.session import TreeSession
from decoding.verification import VERIFIERS
from tests.decoding.families import CONTEXT, FAMILIES, ROTARY, V, family

REFUSED = {
    "sliding window": lambda: MistralForCausalLM(MistralConfig(**ROTARY, sliding_window=16)),
    "sliding_attention": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**ROTARY, head_dim=8, sliding_window=16)),
    "recurrent state": lambda: MambaForCausalLM(MambaConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2, state_size=4)),
    "ALiBi": lambda: BloomForCausalLM(BloomConfig(vocab_size=V, hidden_size=32, n_layer=2, n_head=4)),
}
EVERY_POLICY = {
    "delayed": (lambda: Delayed(Action(3, 4, 4)), "specinfer"),
    "beam": (lambda: Beam(k=3, depth=6, nodes=12), "nss"),
    "salf": (lambda: Salf(nodes=12, batch=3, threshold=0.2), "nss"),
    "dynatree": (DynaTree, "nss"),
    "dyspec": (lambda: DySpec(nodes=12), "without_replacement"),
    "threshold": (lambda: DySpecThreshold(threshold=0.01, nodes=12), "without_replacement"),
    "fixed": (lambda: Shaped(fixed_shape(6, 2, 20), "iid"), "specinfer"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_decoding_is_the_models_own(name):
    target, draft = family(name), family(name, noise=0.01)
    prompt = torch.randint(V, (7,), generator=torch.Generator().manual_seed(1)).tolist()
    ids = torch.tensor([prompt])
    expected = target.module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :].tolist()
    for policy, rule in ((Delayed(Action(3, 1, 2)), "specinfer"), (Beam(k=3, depth=3, nodes=9), "greedy")):
        decoder = SpeculativeDecoder(target, LMDrafter(draft), policy, VERIFIERS[rule], SamplingSetting(1.0))
        generation = decoder.generate(prompt, 48, SamplingSetting(0.0), Rng.seeded(0))
        assert generation.tokens == expected
        assert generation.block_efficiency > 1.1


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_a_tree_pass_is_each_branch_alone(name):
    model = family(name)
    session = TreeSession(model.hidden, model.device, model.dtype, model.layers)
    prefix, tokens, parents = [1, 2, 3], [7, 8, 9, 10, 11, 12], [-1, 0, 0, 1, 2, 1]
    session.append(prefix)
    logits = torch.cat([model.logits(session.grow(tokens[a:b], parents[a:b])) for a, b in ((0, 1), (1, 4), (4, 6))])
    for node in range(len(tokens)):
        path, at = [], node
        while at >= 0:
            path, at = [tokens[at], *path], parents[at]
        alone = model.module(torch.tensor([[*prefix, *path]])).logits[0, -1]
        torch.testing.assert_close(logits[node], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("reason", REFUSED)
def test_a_model_that_cannot_hold_a_tree_is_refused_with_the_reason(reason):
    torch.manual_seed(0)
    with pytest.raises(UserError, match=reason):
        CausalModel(REFUSED[reason](), "its name")


def test_attention_that_ignores_the_mask_is_found_out():
    """The check runs the model; it does not go by its name."""
    model = FAMILIES["llama"]()
    whole = model.base_model.forward
    model.base_model.forward = lambda attention_mask=None, **inputs: whole(**inputs)
    with pytest.raises(UserError, match="each branch alone"):
        CausalModel(model, "its name")


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_a_context_that_fills_up_in_the_middle_of_a_tree_makes_it_smaller(name):
    """OPT's table of positions ends with its context: a tree that reached beyond would be an error."""
    target, draft = family("opt"), family("opt", noise=0.01)
    make, rule = EVERY_POLICY[name]
    decoder = SpeculativeDecoder(target, LMDrafter(draft), make(), VERIFIERS[rule])
    prompt = [5] * 80
    generation = decoder.generate(prompt, 1000, SamplingSetting(), Rng.seeded(0))
    assert len(prompt) + len(generation.tokens) == CONTEXT + 1  # the last token needs no position
    assert all(step.nodes >= 1 for step in generation.steps)
