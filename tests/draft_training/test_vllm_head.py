"""vLLM reads exported heads as we mean them: greedy text as without one, and every drafted token
accepted there that is accepted here.
"""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from nde_talf import (
    VERIFIERS,
    Action,
    CausalModel,
    Delayed,
    EagleDrafter,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
)
from nde_talf.data.engines.vllm_speculation import head_method
from nde_talf.data.text.shipped import smollm2
from nde_talf.data.text.templates import load_tokenizer
from nde_talf.draft_training.export.head_format import save_head
from nde_talf.draft_training.training.head_training import fit_head
from nde_talf.draft_training.training_settings import HassLoss, HeadConfig, TalfLoss
from nde_talf.pipelines.commands.fetch import fetch
from nde_talf.pipelines.runs.finished import Run
from tests.draft_training.in_vllm import DRAFTED, NEW_TOKENS, VOCABULARY, in_vllm

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

TRAINING = {"loss": TalfLoss(k=2), "roots": 4, "batch": 8, "warm_up": 4, "chain_fraction": 0.3}
CASES = {
    "EAGLE": (LlamaConfig, {}),
    "EAGLE-3": (LlamaConfig, {"features": "three"}),
    "EAGLE-3, some tokens": (LlamaConfig, {"features": "three", "draft_vocab": 40}),
    "EAGLE 3.1": (LlamaConfig, {"features": "three", "norms": ["fc_norm", "norm_output"]}),
    "EAGLE 3.1 of speculators, HASS": (
        LlamaConfig,
        {
            "features": "three",
            "norms": ["norm_before_residual", "norm_before_fc", "norm_output"],
            "loss": HassLoss(regression=0),
        },
    ),
    "a Qwen2 layer, lm_head tied": (Qwen2Config, {}),
    "a Llama layer beside Qwen3, lm_head tied": (Qwen3Config, {"layer": "llama"}),
}


def target_in(folder, config):
    torch.manual_seed(0)
    extra = {"head_dim": 32} if config is Qwen3Config else {}
    sizes = config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.15,
        tie_word_embeddings=config is not LlamaConfig, bos_token_id=0, eos_token_id=0, **extra,
    )  # fmt: skip
    target = AutoModelForCausalLM.from_config(sizes)
    with torch.no_grad():
        for weight in target.parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
    target.save_pretrained(folder)
    return CausalModel.load(folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """By case, what vLLM generates without and with the head, and what our loop generates with it;
    vLLM runs all cases in one process.
    """
    folder, ours, jobs = tmp_path_factory.mktemp("served"), [], []
    rows = torch.randint(VOCABULARY, (64, 32), generator=torch.Generator().manual_seed(0))
    prompts = [row[:6].tolist() for row in rows[:8]]
    for number, (config, settings) in enumerate(CASES.values()):
        target = target_in(folder / f"target-{number}", config)
        settings = HeadConfig(steps=150, **(TRAINING | settings))
        head = fit_head(target, rows, settings, folder / f"training-{number}")
        export = save_head(head, folder / f"head-{number}")
        for method in (None, head_method(str(export), DRAFTED)):
            jobs.append((folder / f"target-{number}", method, prompts))
        path = Delayed(Action(1, 0, DRAFTED))
        drafter = EagleDrafter.from_pretrained(export, target)
        decoder = SpeculativeDecoder(target, drafter, path, VERIFIERS["naive"])
        greedy = SamplingSetting(0.0)
        ours.append([decoder.generate(p, NEW_TOKENS, greedy, Rng.seeded(0)) for p in prompts])
    theirs = in_vllm(folder, jobs)
    return dict(zip(CASES, zip(theirs[::2], theirs[1::2], ours, strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_vllm_writes_the_same_text_and_accepts_the_same_drafts_as_our_loop(served, case):
    """Prompt by prompt, and exactly: the same head, the same chain, the same greedy rule."""
    plain, fast, ours = served[case]
    assert [one["tokens"] for one in fast["greedy"]] == [one["tokens"] for one in plain["greedy"]]
    assert [one["tokens"] for one in fast["greedy"]] == [one.tokens for one in ours]
    for one, generation in zip(fast["greedy"], ours, strict=True):
        accepted = [sum(step.tau > at for step in generation.steps) for at in range(DRAFTED)]
        assert (one["drafts"], one["accepted"]) == (len(generation.steps), accepted)
    assert sum(sum(one["accepted"]) for one in fast["greedy"]) > 0, "the head has to be accepted"


def test_vllm_accepts_of_smollm2s_shipped_head_what_our_loop_accepts(tmp_path):
    fetch()  # into the tests' own cache
    run, tokenizer = Run("smollm2", ""), load_tokenizer(smollm2())
    export, target = run.stage("draft") / "export", CausalModel.load(smollm2())
    turns = [
        [{"role": "user", "content": text}] for text in ("Why is the sky blue?", "Count to ten.")
    ]
    asked = {"add_generation_prompt": True, "return_dict": False}
    prompts = [tokenizer.apply_chat_template(turn, **asked) for turn in turns]
    method = head_method(str(export), DRAFTED)
    (fast,) = in_vllm(tmp_path, [(smollm2(), method, prompts)])
    drafter = EagleDrafter.from_pretrained(export, target)
    path = Delayed(Action(1, 0, DRAFTED))
    decoder = SpeculativeDecoder(target, drafter, path, VERIFIERS["naive"])
    for prompt, one in zip(prompts, fast["greedy"], strict=True):
        ours = decoder.generate(prompt, NEW_TOKENS, SamplingSetting(0.0), Rng.seeded(0))
        accepted = [sum(step.tau > at for step in ours.steps) for at in range(DRAFTED)]
        assert one["tokens"] == ours.tokens and one["drafts"] == len(ours.steps)
        assert one["accepted"] == accepted and accepted[0] > len(ours.steps) / 4


def test_the_fault_of_sampled_speculation_is_seen_and_not_the_version(served):
    _, fast, _ = served["EAGLE"]
    assert fast["fault_once_repaired"] is None
