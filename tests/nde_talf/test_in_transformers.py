"""transformers' generate() with `speculate` gives what it gives without: tokens if it is greedy,
the law if it samples.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, TextStreamer
from transformers.generation import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from nde_talf import (
    Action,
    Beam,
    CausalModel,
    Delayed,
    LMDrafter,
    SamplingSetting,
    SpeculativeDecoder,
    speculate,
)
from nde_talf.data.text.shipped import SHIPPED, shipped
from nde_talf.decoding.common.errors import Advice
from nde_talf.decoding.sampling.rng import warp
from nde_talf.decoding.testing import exact_law
from nde_talf.draft_training.export.head_format import save_head
from nde_talf.evaluation.chi_square import p_value, smallest_bias
from nde_talf.integrations.generate_arguments import Row, RowProcess
from tests.decoding.families import FAMILIES, V, module
from tests.decoding.families import text as some_text
from tests.decoding.laws import distance
from tests.decoding.tiny_loop import DRAFT, HEAD, PROMPT, TARGET, VOCABULARY
from tests.refusal import refusal

TREE = Delayed(Action(2, 1, 2))
ASKED = {"input_ids": torch.tensor([PROMPT]), "max_new_tokens": 4}
QUICK = ("llama", "gemma-3")
PENALISED = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 3,
    "bad_words_ids": [[5], [7, 8]],
    "min_new_tokens": 12,
}


def noisy(name, noise=0.02):
    """A family's model and a draft like it."""
    models = [module(*FAMILIES[name]).eval() for _ in range(2)]
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in models[1].parameters():
            weight.add_(noise * torch.randn_like(weight))
    return models


def batch(rows=2, **options):
    """Ask for greedy texts after prompts of different lengths, padded on the left."""
    ids = torch.randint(1, V, (rows, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        ids[row, : 2 * row], mask[row, : 2 * row] = 0, 0
    asked = {"input_ids": ids, "attention_mask": mask, "do_sample": False, "pad_token_id": 0}
    return asked | {"max_new_tokens": 12} | options


def same(model, ours, **asked):
    """The text of `generate` alone, which has to be ours."""
    theirs = model.generate(**asked)
    assert torch.equal(model.generate(**asked, custom_generate=ours), theirs)
    return theirs


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.law) for name in FAMILIES],
)
def test_greedy_text_is_that_of_generate_alone(name):
    model, draft = noisy(name)
    ours = speculate(draft, TREE)
    for options in ({}, PENALISED):
        same(model, ours, **batch(max_new_tokens=16, **options))
        assert max(generation.block_efficiency for generation in ours.generations) > 1.1


@pytest.fixture(scope="module")
def pair():
    return noisy("llama", 0.01)


def test_results_and_streams_are_those_of_generate(pair, capsys):
    class Words:
        def decode(self, ids, **_):
            return "".join(f"{int(token)} " for token in ids)

    asked = batch(1, eos_token_id=None, repetition_penalty=1.2, return_dict_in_generate=True)
    made, printed, door = [], [], speculate(pair[1], TREE)
    for more in ({}, {"custom_generate": door}):
        made.append(pair[0].generate(**asked, **more, streamer=TextStreamer(Words())))
        printed.append(capsys.readouterr().out)
    theirs, ours = made
    assert printed[0] == printed[1] and type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)


@pytest.mark.parametrize("kind", ["tree", "beam"])
def test_a_grammar_is_asked_about_every_node_that_it_allows_and_not_beyond_the_end(pair, kind):
    start, asked_at = 9, []

    def following(count):
        if count == 11:
            return [0]
        tokens = [token for token in range(1, V) if token % 5 == count % 5]
        return tokens[: 3 if count % 2 else 20]

    def allowed(_, ids):
        text = ids.tolist()[start:]
        assert 0 not in text, "asked beyond the end of the text"
        assert all(token in following(count) for count, token in enumerate(text)), (
            "asked after what it forbids"
        )
        asked_at.append(len(text))
        return following(len(text))

    asked = batch(1, max_new_tokens=40, prefix_allowed_tokens_fn=allowed)
    policy = TREE if kind == "tree" else Beam(k=5, depth=3, nodes=12)
    assert same(pair[0], speculate(pair[1], policy), **asked).shape[1] == start + 12
    assert len(asked_at) > 24  # twelve times by `generate` alone


@pytest.mark.slow
def test_drafts_of_every_kind_give_the_same_text(pair, tmp_path):
    asked = ASKED | {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    save_head(HEAD, tmp_path / "head")
    DRAFT.module.save_pretrained(tmp_path / "draft")
    for draft in (tmp_path / "head", str(tmp_path / "draft"), DRAFT.module, "ngram"):
        ours = speculate(draft)
        same(TARGET.module, ours, **asked)
        assert len(ours.generations[0].steps) < 20
        loaded = ours._loaded
        same(TARGET.module, ours, **asked)
        assert ours._loaded is loaded


def test_a_draft_with_a_short_context_is_left_out_once_it_is_full():
    model, (_, draft) = noisy("llama")[0], noisy("llama")
    draft.config.max_position_embeddings = 20
    ours = speculate(draft, TREE)
    same(model, ours, **batch(2, max_new_tokens=30, eos_token_id=None))
    assert len(ours.generations) == 4  # of each row with the draft and without


def test_a_row_ends_once_the_context_is_full_and_the_others_go_on():
    model, draft = noisy("llama")
    model.config.max_position_embeddings, model.generation_config.pad_token_id = 20, None
    asked = batch(2, max_new_tokens=30, eos_token_id=None)  # of 9 and 7 tokens
    with pytest.warns(Advice, match="context of 20 tokens is full"):
        ours = model.generate(**asked, custom_generate=speculate(draft, TREE))
        with refusal("no padding token"):
            model.generate(**asked | {"pad_token_id": None}, custom_generate=speculate("ngram"))
    rows = model.generate(**asked)[:, : 9 + 14]
    rows[0, 9 + 12 :] = 0  # the last token needs no position
    assert torch.equal(ours, rows)


@pytest.mark.slow
def test_hooks_and_forwards_that_change_between_two_calls_are_called():
    """A native pass calls no hooks, so it may run only while there are none."""
    model, draft = noisy("llama")
    ours, asked = speculate(draft, TREE), batch(1)
    before = same(model, ours, **asked)
    hook = model.model.layers[0].mlp.register_forward_hook(lambda layer, args, output: -output)
    assert not torch.equal(same(model, ours, **asked), before)
    hook.remove()
    # It leaves hooks of transformers, which rest.
    model.generate(**asked, output_hidden_states=True, return_dict_in_generate=True)
    assert torch.equal(same(model, ours, **asked), before) and ours._loaded.plain.target.native
    model.model.layers[0].mlp.forward = torch.neg
    assert not torch.equal(same(model, ours, **asked), before)


def test_the_model_is_left_as_it_was(pair):
    model = module(*FAMILIES["llama"]).eval()
    before = [(weight.requires_grad, weight.data.clone()) for weight in model.parameters()]
    model.generation_config.top_k = 7
    model.generate(**batch(1, max_new_tokens=5), custom_generate=speculate(pair[1]))
    assert model.generation_config.top_k == 7
    for weight, (wants, value) in zip(model.parameters(), before, strict=True):
        assert weight.requires_grad == wants and torch.equal(weight, value)


def test_threads_on_a_model_with_windows_write_their_own_texts_and_nothing_of_the_model():
    model, draft = noisy("mistral")
    for one in (model, draft):
        kind = type(one.config)

        class Guarded(kind):
            def __setattr__(self, name, value, whole=kind, config=one.config):
                assert self is not config, f"{name} was written"
                whole.__setattr__(self, name, value)

        one.config.__class__ = Guarded
    places = [weight.data_ptr() for weight in model.parameters()]
    asked = [batch(1, input_ids=torch.tensor([some_text(40, seed)])) for seed in (1, 2)]
    for one in asked:
        one["attention_mask"] = torch.ones_like(one["input_ids"])
    theirs = [model.generate(**one).tolist() for one in asked]

    def ours(one):
        return model.generate(**one, custom_generate=speculate(draft, TREE)).tolist()

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(ours, asked * 2)] == theirs * 2
    assert [weight.data_ptr() for weight in model.parameters()] == places


def test_a_pair_is_loaded_under_autocast_and_draws_nothing():
    """So a seed gives one text, in the first call and in others."""
    dice = torch.get_rng_state()
    ours = speculate(shipped("draft"), SHIPPED / "selector/export/traversal")
    with torch.autocast("cpu"):
        ours._load(CausalModel.load(shipped("target")).module)
    assert torch.equal(torch.get_rng_state(), dice)


def test_other_faults_are_refused_too(pair, monkeypatch):
    def fault(draft, **given):
        with refusal() as caught:
            TARGET.module.generate(**ASKED | given, custom_generate=speculate(draft))
        return str(caught.value)

    assert "another number of tokens" in fault(pair[1])
    with refusal(r'custom_generate=speculate\("'):  # it is not called
        TARGET.module.generate(**ASKED, custom_generate=speculate)
    monkeypatch.setattr("transformers.__version__", "5.2.0")
    assert "5.2.0 is not supported" in fault("ngram")


def test_a_model_for_images_continues_a_text_and_refuses_an_image():
    model, draft = noisy("gemma-3-images")
    asked, ours = batch(1, max_new_tokens=4), speculate(draft, TREE)
    same(model, ours, **asked)
    with refusal(r"input \w+ is not possible"):
        model.generate(**asked, pixel_values=torch.zeros(1, 3, 16, 16), custom_generate=ours)


def test_a_processor_that_is_said_to_be_stateless_is_asked_one_text_at_a_time(pair):
    class Even(LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert len(input_ids) == len(scores) == 1
            return scores.index_fill(1, torch.arange(int(input_ids[0, -1]) % 2, V, 2), -1e9)

    ours = speculate(pair[1], TREE, stateless=[Even])
    same(pair[0], ours, **batch(1, logits_processor=LogitsProcessorList([Even()])))


# The law of what `generate` prepares, over the tiny target's four tokens.
PREPARED = {
    "temperature": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.4,
    "bad_words_ids": [[2, 2]],
}


@torch.no_grad()
def prepared_law(length):
    """P of every text of `length` tokens, by transformers' own processors."""
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.4), NoBadWordsLogitsProcessor([[2, 2]])]
    )
    processors += [TopKLogitsWarper(3), TemperatureLogitsWarper(0.9)]
    law = {(): 1.0}
    for _ in range(length):
        grown = {}
        for text, chance in law.items():
            ids = torch.tensor([[*PROMPT, *text]])
            row = processors(ids, TARGET.module(ids).logits[:, -1])
            row = warp(row[0].double(), SamplingSetting(1.0, min_p=0.1))
            grown |= {(*text, token): chance * float(row[token]) for token in range(VOCABULARY)}
        law = grown
    return law


def test_the_exact_law_is_that_of_the_processed_logits():
    asked = [
        RepetitionPenaltyLogitsProcessor(1.4),
        NoBadWordsLogitsProcessor([[2, 2]]),
        TopKLogitsWarper(3),
    ]
    process, setting = RowProcess(asked, Row(0, [], PROMPT), 10), SamplingSetting(0.9, min_p=0.1)
    tree = Delayed(Action(2, 0, 1))
    decoder = SpeculativeDecoder(TARGET, LMDrafter(DRAFT), tree, "traversal", process=process)
    law = exact_law(lambda rng: tuple(decoder.generate(PROMPT, 2, setting, rng).tokens))
    assert distance(law, prepared_law(2)) < 1e-6


@pytest.mark.law
@pytest.mark.parametrize("draft", ["lm", "head", "ngram"])
def test_the_sampled_law_is_that_of_generate(draft, tmp_path):
    """Level 1e-6; a bias of total variation `smallest_bias` would be seen with probability 0.99."""
    save_head(HEAD, tmp_path / "head")
    drafts = {"lm": DRAFT.module, "head": tmp_path / "head", "ngram": "ngram"}
    ours = speculate(drafts[draft])
    torch.manual_seed(7)
    rows = [
        tuple(row[len(PROMPT) :].tolist())
        for _ in range(3)
        for row in TARGET.module.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=3,
            do_sample=True,
            eos_token_id=None,
            num_return_sequences=750,
            custom_generate=ours,
            **PREPARED,
        )
    ]
    law = {text: chance for text, chance in prepared_law(3).items() if chance > 0}
    assert p_value(Counter(rows), law) > 1e-6
    assert smallest_bias(len(rows), law) < 0.1
