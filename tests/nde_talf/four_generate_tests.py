"""Four tests of `generate` alone, as others write them, for the plugin `repeat_generate`."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import StoppingCriteria

NEW = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "initializer_range": 0.5}
    return LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=3, pad_token_id=0)).eval()


@pytest.fixture
def ids():
    return torch.randint(4, 40, (3, 6), generator=torch.Generator().manual_seed(1))


def test_greedy(model, ids):
    assert torch.equal(model.generate(ids, **NEW)[:, :6], ids)


def test_a_criterion_that_counts(model, ids):
    class Count(StoppingCriteria):
        calls = 0

        def __call__(self, input_ids, scores, **kwargs):
            self.calls += 1
            return torch.full((len(input_ids),), self.calls >= 4)

    text = model.generate(ids, **NEW, eos_token_id=None, stopping_criteria=[Count()])
    assert text.shape[1] == 10


def test_scores(model, ids):
    made = model.generate(ids, **NEW, return_dict_in_generate=True, output_scores=True)
    assert len(made.scores) == made.sequences.shape[1] - 6


def test_beams(model, ids):
    assert len(model.generate(ids, **NEW, num_beams=2)) == 3
