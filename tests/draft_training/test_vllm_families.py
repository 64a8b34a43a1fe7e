"""Heads beside targets of other families mean in vLLM what they mean here: the same text, as many
drafts accepted.
"""

import importlib.util

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nde_talf.data.engines.vllm_speculation import head_method
from nde_talf.decoding.actions import Action
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.draft_training.export import save_head
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.draft_training.settings import HeadConfig, TalfLoss
from nde_talf.draft_training.train_head import fit_head
from tests.draft_training.in_vllm import DRAFTED, NEW_TOKENS, VOCABULARY, in_vllm

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


CASES = {
    "a Qwen2 layer, lm_head tied": (Qwen2Config, Qwen2ForCausalLM, "family"),
    "a Llama layer beside Qwen3, lm_head tied": (Qwen3Config, Qwen3ForCausalLM, "llama"),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> dict[str, tuple[list, list]]:
    """By case, what vLLM and our loop generate after the same prompts. vLLM runs all cases in one
    process.
    """
    ours, jobs = [], []
    for config, model, layer in CASES.values():
        folder = tmp_path_factory.mktemp(layer)
        torch.manual_seed(0)
        own = {"head_dim": 32} if config is Qwen3Config else {}
        target = model(
            config(
                vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.15, tie_word_embeddings=True,
                bos_token_id=0, eos_token_id=0, **own,
            )
        )  # fmt: skip
        with torch.no_grad():
            for weight in target.parameters():
                if weight.ndim == 1:
                    weight.add_(0.2 * torch.randn_like(weight))
        target.save_pretrained(folder / "target")
        target = CausalModel.load(folder / "target")
        rows = torch.randint(VOCABULARY, (64, 32))
        settings = HeadConfig(
            layer=layer,
            loss=TalfLoss(k=2),
            roots=4,
            steps=150,
            batch=8,
            warm_up=4,
            chain_fraction=0.3,
        )
        head = save_head(fit_head(target, rows, settings, folder / "training"), folder / "head")
        prompts = [row[:6].tolist() for row in rows[:8]]
        jobs.append((folder / "target", head_method(str(head), DRAFTED), prompts))
        drafter = EagleDrafter.from_pretrained(head, target)
        decoder = SpeculativeDecoder(
            target, drafter, Delayed(Action(1, 0, DRAFTED)), VERIFIERS["naive"]
        )
        ours.append(
            [
                decoder.generate(prompt, NEW_TOKENS, SamplingSetting(0.0), Rng.seeded(0))
                for prompt in prompts
            ]
        )
    theirs = [found["greedy"] for found in in_vllm(tmp_path_factory.mktemp("vllm"), jobs)]
    return dict(zip(CASES, zip(theirs, ours, strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_vllm_accepts_as_many_drafts_as_the_torch_loop(case, both):
    theirs, ours = both[case]
    assert [one["tokens"] for one in theirs] == [generation.tokens for generation in ours]
    accepted = [
        [sum(step.tau > at for step in generation.steps) for at in range(DRAFTED)]
        for generation in ours
    ]
    assert [one["accepted"] for one in theirs] == accepted
    assert sum(map(sum, accepted)) > 0.3 * sum(len(generation.steps) for generation in ours)
