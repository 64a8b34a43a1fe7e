"""Draft and target of one tokenizer whose output layers are padded to different numbers of rows."""

import pytest
import torch

from nde_talf import CausalModel, LMDrafter, Rng, SamplingSetting, SpeculativeDecoder
from nde_talf.decoding.features import scalar_features
from tests.decoding.families import module
from tests.decoding.policies import EVERY_POLICY
from tests.refusal import refusal


def llama(rows, seed, bias=False, **more):
    model = module("llama", {"vocab_size": rows, "pad_token_id": None} | more, seed)
    if bias:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(rows))
    return CausalModel(model)


@pytest.mark.parametrize("padding,stands_in", [(None, 49), (7, 7)])
@torch.no_grad()
def test_a_token_that_the_draft_does_not_know_counts_as_its_padding(padding, stands_in):
    draft = llama(50, 0, pad_token_id=padding)
    draft.match(60)
    positions = torch.arange(4)[None]
    hidden = draft.hidden(torch.tensor([[3, 55, 50, 4]]), positions, None, None)
    assert torch.equal(
        hidden, draft.hidden(torch.tensor([[3, stands_in, stands_in, 4]]), positions, None, None)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_POLICY)
def test_a_text_of_tokens_that_the_draft_does_not_know_is_drafted_for_by_every_policy(name):
    """The target says little else, and has a prompt of them."""
    target, draft = llama(50, 0, bias=True), llama(45, 0)
    target.lm_head.bias[45:] += 6
    draft.match(50)
    make, rule = EVERY_POLICY[name]
    for setting in (SamplingSetting(0.0), SamplingSetting(0.9), SamplingSetting(1.0, 0.9)):
        decoder = SpeculativeDecoder(target, LMDrafter(draft), make(), rule)
        tokens = decoder.generate([47, 3, 49], 30, setting, Rng.seeded(0)).tokens
        assert len(tokens) == 30 and sum(token >= 45 for token in tokens) > 10
        if setting.temperature == 0:
            logits = target.module(torch.tensor([[47, 3, 49, *tokens]])).logits[0, 2:-1]
            assert tokens == logits.argmax(-1).tolist()
        rows = decoder.drafting.seen()
        assert all(
            float(row[45:].sum()) == 0 and float(row.sum()) == pytest.approx(1) for row in rows
        )
        assert scalar_features(torch.full((50,), 0.02), *rows).isfinite().all()


def test_a_draft_of_another_number_of_rows_is_refused():
    target, draft = llama(50, 0), llama(60, 0)
    make, rule = EVERY_POLICY["delayed"]
    with refusal(r"60 tokens and the target's 50.*match\(target\.vocab_size\)"):
        SpeculativeDecoder(target, LMDrafter(draft), make(), rule)
