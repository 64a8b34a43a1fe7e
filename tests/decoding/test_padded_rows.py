"""Draft and target of one tokenizer whose output layers are padded to different numbers of rows."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoding.model import CausalModel
from tests.decoding.families import ROTARY


def llama(rows: int, seed: int, bias: bool = False, **more) -> CausalModel:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**ROTARY | {"vocab_size": rows, "pad_token_id": None} | more))
    if bias:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(rows))
    return CausalModel(model)


@pytest.mark.parametrize("rows", [40, 50, 60])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_a_draft_has_the_logits_of_the_rows_that_it_shares_and_none_of_the_others(rows, bias):
    draft = llama(50, 0, bias)
    own = draft.logits
    hidden = torch.randn(2, 3, draft.hidden_size)
    whole = draft.module.lm_head(hidden)
    draft.match(rows)
    logits = own(hidden)
    assert logits.shape == (2, 3, rows) == (2, 3, draft.vocab_size)
    torch.testing.assert_close(logits[..., :50], whole[..., :rows])
    assert (logits[..., 50:] == -torch.inf).all()
    assert draft.logits(hidden[0, 0]).shape == (rows,)
    draft.match(50)
    assert torch.equal(draft.logits(hidden), whole)
    assert draft.readout.weight.data_ptr() == draft.lm_head.weight.data_ptr()


@pytest.mark.parametrize("padding,stands_in", [(None, 49), (7, 7)])
@torch.no_grad()
def test_a_token_that_the_draft_does_not_know_counts_as_its_padding(padding, stands_in):
    draft = llama(50, 0, pad_token_id=padding)
    draft.match(60)
    positions = torch.arange(4)[None]
    found = draft.hidden(torch.tensor([[3, 55, 50, 4]]), positions, None, None)
    assert torch.equal(found, draft.hidden(torch.tensor([[3, stands_in, stands_in, 4]]), positions, None, None))
