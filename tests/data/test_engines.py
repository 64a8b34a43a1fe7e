"""Engines: the same text and features from torch and from real vLLM, and continuations that follow
the model's law.
"""

import importlib.util
from collections import Counter
from dataclasses import astuple
from types import SimpleNamespace

import pytest
import torch

from nde_talf import CausalModel, SamplingSetting
from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.decoding.sampling.rng import warp
from nde_talf.evaluation.chi_square import p_value
from tests.decoding.families import BRANCHES, FAMILIES, module
from tests.decoding.pairs import tiny_model
from tests.vllm_process import in_process

GREEDY, PROMPTS = SamplingSetting(0.0), [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
SETTINGS = [
    SamplingSetting(0.7),
    SamplingSetting(1.0, 0.9),
    SamplingSetting(1.0, 0.8, 12),
    SamplingSetting(1.0, min_p=0.3),
]
DRAWS = 600


@pytest.fixture(scope="module")
def model():
    model = tiny_model(40, hidden=64, layers=2, scale=0.5)
    model.module.generation_config.eos_token_id = None
    return model


def law_fits(
    tokens: torch.Tensor, model: CausalModel, prefix: list[int], setting: SamplingSetting
) -> bool:
    """Chi-square of the first tokens [n] of continuations against the model's distribution behind
    `prefix`.
    """
    positions = torch.arange(len(prefix))[None]
    logits = model.logits(model.hidden(torch.tensor([prefix]), positions, None, None))[0, -1]
    p = warp(logits, setting).double()
    law = {token: float(chance) for token, chance in enumerate(p) if chance > 0}
    return p_value(Counter(tokens.tolist()), law) > 1e-4


def first_tokens(engine, setting: SamplingSetting) -> torch.Tensor:
    """The first token that is sampled after each of two prompts [2, DRAWS]."""
    texts = engine.sample([p for p in PROMPTS[:2] for _ in range(DRAWS)], setting, 1, 0)
    return torch.tensor([text[-1] for text in texts]).view(2, DRAWS)


@pytest.mark.slow
def test_sampling_follows_the_model_and_its_seed(model):
    engine = TransformersEngine(model)
    for prompt, text in zip(PROMPTS, engine.sample(PROMPTS, GREEDY, 6, 0), strict=True):
        best = model.module(torch.tensor([text])).logits[0].argmax(-1).tolist()
        assert text[len(prompt) :] == best[len(prompt) - 1 : -1]
    first, again, other = (engine.sample(PROMPTS, SETTINGS[0], 8, seed) for seed in (3, 3, 4))
    assert first == again != other
    for setting in SETTINGS:
        drawn = first_tokens(engine, setting)
        assert all(law_fits(drawn[i], model, PROMPTS[i], setting) for i in range(2))
    assert not law_fits(drawn[0], model, PROMPTS[1], SETTINGS[1]), "the test must be able to fail"


def test_an_end_of_text_ends_a_text(model, monkeypatch):
    engine = TransformersEngine(model)
    (text,) = engine.sample(PROMPTS[:1], GREEDY, 6, 0)
    monkeypatch.setattr(model.module.generation_config, "eos_token_id", text[4])
    assert engine.sample(PROMPTS[:1], GREEDY, 6, 0) == [text[:4]]


def test_what_memory_does_not_hold_is_sampled_in_parts(model, monkeypatch):
    """A row's text is the same in any batch, and repeated prompts have texts of their own."""

    asked, room = [*PROMPTS, *PROMPTS], SimpleNamespace(available=64 * 2 * 2 * 4 * 3 * 14)
    whole = TransformersEngine(model).sample(asked, SETTINGS[0], 6, 0)
    assert len({tuple(text) for text in whole}) == len(asked)
    monkeypatch.setattr("psutil.virtual_memory", lambda: room)  # of three rows of 14 tokens
    engine = TransformersEngine(model, 5)
    assert engine.sample(asked, SETTINGS[0], 6, 0) == whole and engine._batch.size == 2


@pytest.mark.parametrize("family", ["mistral", "gemma-3n", "bloom"])
def test_every_row_of_a_batch_is_the_text_of_its_prompt_alone(family):
    model = CausalModel(module(*(FAMILIES | BRANCHES)[family]), family)
    assert (model.form == "masks") == (family != "bloom")
    model.module.generation_config.eos_token_id = [*range(0, 50, 9)]
    draws = torch.Generator().manual_seed(0)
    asked = [torch.randint(1, 50, (n,), generator=draws).tolist() for n in (3, 20, 7, 30, 1)]
    asked += [[*asked[3][:10], 5, 6], asked[3][:10], asked[3]]
    texts = TransformersEngine(model, 7).sample(asked, GREEDY, 24, 0)
    for prompt, text in zip(asked, texts, strict=True):
        alone = [*prompt]
        while len(alone) < len(prompt) + 24:
            token = int(model.module(torch.tensor([alone]), use_cache=False).logits[0, -1].argmax())
            if token in model.ends:
                break
            alone.append(token)
        assert text == alone


IN_VLLM = """
import json, sys
from nde_talf.data.engines.settings import EngineConfig
from nde_talf.data.engines.vllm import VLLMEngine
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.sampling.rng import SamplingSetting

def too_long(engine, settings, prompts):
    try:
        engine.sample(prompts, settings[0], 62, 0)
    except UserError as error:
        return str(error)

if __name__ == "__main__":
    folder, prompts, settings, draws = json.load(open(sys.argv[1]))
    engine = VLLMEngine(folder, "float32", EngineConfig(), 64)
    settings = [SamplingSetting(*setting) for setting in settings]
    sampled = {
        "greedy": engine.sample(prompts, SamplingSetting(0.0), 12, 0),
        "sampled": [engine.sample(prompts, settings[0], 12, seed) for seed in (3, 3, 4)],
        "drawn": [engine.sample([p for p in prompts[:2] for _ in range(draws)], setting, 1, 0) for setting in settings],
        "equal": [engine.sample([prompts[0]] * 4, settings[0], 12, 5) for _ in range(2)],
        "too_long": too_long(engine, settings, prompts),
    }
    engine.close()
    json.dump(sampled, open(sys.argv[2], "w"))
"""


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_agrees_with_torch(model, tmp_path, monkeypatch):
    engine = TransformersEngine(model)
    (text,) = engine.sample(PROMPTS[:1], GREEDY, 12, 0)
    # vLLM has to find it beside the weights.
    monkeypatch.setattr(model.module.generation_config, "eos_token_id", text[6])
    model.module.save_pretrained(tmp_path / "model")
    settings = [astuple(setting) for setting in SETTINGS]
    sampled = in_process(IN_VLLM, [str(tmp_path / "model"), PROMPTS, settings, DRAWS], tmp_path)
    assert sampled["greedy"] == engine.sample(PROMPTS, GREEDY, 12, 0)
    assert len(sampled["greedy"][0]) < len(text)
    first, again, other = sampled["sampled"]
    assert first == again != other
    first, again = sampled["equal"]
    assert first == again
    assert len({tuple(row) for row in first}) == len(first), (
        "requests must not share random numbers"
    )
    assert "sequences of 64 tokens" in sampled["too_long"]
    lengths = [len(prompt) for prompt in PROMPTS[:2] for _ in range(DRAWS)]
    for setting, texts in zip(SETTINGS, sampled["drawn"], strict=True):
        # An end of text is dropped from a text.
        tokens = [t[-1] if len(t) > n else text[6] for t, n in zip(texts, lengths, strict=True)]
        drawn = torch.tensor(tokens).view(2, DRAWS)
        assert all(law_fits(drawn[i], model, PROMPTS[i], setting) for i in range(2))
