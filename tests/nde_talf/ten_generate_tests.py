"""Ten tests of `generate` alone, as others write them, for the plugin `repeat_generate`."""

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor
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


def test_a_seed_gives_one_text(model, ids):
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        texts.append(model.generate(ids, max_new_tokens=8, do_sample=True, num_return_sequences=2))
    assert torch.equal(*texts)


def test_padding_on_the_left(model, ids):
    mask = torch.ones_like(ids).index_fill(1, torch.arange(2), 0)
    alone = model.generate(ids[:, 2:], **NEW)
    assert torch.equal(model.generate(ids, attention_mask=mask, **NEW)[:, 2:], alone)


def test_penalties(model, ids):
    options = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "bad_words_ids": [[7]]}
    assert not (model.generate(ids, **NEW, **options)[:, 6:] == 7).any()


def test_a_criterion_that_counts(model, ids):
    class Count(StoppingCriteria):
        calls = 0

        def __call__(self, input_ids, scores, **kwargs):
            self.calls += 1
            return torch.full((len(input_ids),), self.calls >= 4)

    text = model.generate(ids, **NEW, eos_token_id=None, stopping_criteria=[Count()])
    assert text.shape[1] == 10


def test_a_result_with_fields(model, ids):
    made = model.generate(ids, **NEW, return_dict_in_generate=True)
    assert torch.equal(made.sequences[:, :6], ids)


def test_a_configuration(model, ids):
    config = GenerationConfig(max_length=9, min_length=9, do_sample=False, eos_token_id=3)
    assert model.generate(ids, generation_config=config).shape[1] == 9


def test_a_processor_of_ones_own(model, ids):
    class Only(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.index_fill(1, torch.arange(10), -torch.inf)

    assert (model.generate(ids, **NEW, logits_processor=[Only()])[:, 6:] >= 10).all()


def test_beams(model, ids):
    assert len(model.generate(ids, **NEW, num_beams=2)) == 3


def test_what_generate_refuses(model, ids):
    with pytest.raises(ValueError):
        model.generate(ids, max_new_tokens=0)
