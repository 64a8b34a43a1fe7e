"""vLLM reads an exported head as we mean it: greedy text as without it, and as many drafts accepted as here."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from decoding.actions import Action
from decoding.loop import SpeculativeDecoder
from decoding.model import CausalModel
from decoding.policies.delayed import Delayed
from decoding.sampling import Coins, SamplingSetting
from decoding.verification import VERIFIERS
from draft_training.drafter import EagleDrafter
from draft_training.export import save_head
from draft_training.language_model import LanguageModel, LanguageModelConfig, build_llama, fit
from draft_training.talf import HeadConfig, fit_head

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

VOCABULARY, DRAFTED, NEW_TOKENS = 64, 3, 48

# Greedy text of the prompts with or without a head, and how many drafts and accepted tokens there were.
GENERATE = """
import json, sys
from vllm import LLM, SamplingParams

def main(target, head, prompts, drafted, new_tokens):
    speculative = {"method": "eagle", "model": head, "num_speculative_tokens": drafted} if head else None
    llm = LLM(target, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=128, seed=0,
              speculative_config=speculative, disable_log_stats=False)
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    counts = {metric.name: metric.value for metric in llm.get_metrics() if metric.name.startswith("vllm:spec_decode")
              and hasattr(metric, "value")}
    return {"tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "drafts": counts.get("vllm:spec_decode_num_drafts", 0),
            "accepted": counts.get("vllm:spec_decode_num_accepted_tokens", 0)}

if __name__ == "__main__":
    arguments = json.load(open(sys.argv[1]))
    json.dump(main(**arguments), open(sys.argv[2], "w"))
"""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@pytest.fixture(scope="module")
def rows():
    """Rows that can be predicted for the most part: a token is the one before it plus one, at times plus seven."""
    generator = torch.Generator().manual_seed(0)
    steps = 1 + 6 * (torch.rand(64, 32, generator=generator) < 0.2).long()
    return steps.cumsum(1) % VOCABULARY


@pytest.fixture(scope="module")
def trained(rows, tmp_path_factory):
    """(folder of a target, the target, folder of its exported head)"""
    folder = tmp_path_factory.mktemp("pair")
    config = LanguageModelConfig(hidden=64, layers=2, heads=2, intermediate=128, max_length=256, steps=60, batch=16, warm_up=4)
    model = fit(LanguageModel(build_llama(config, VOCABULARY), config), rows, config, folder / "training")
    model.save_pretrained(folder / "target")
    target = CausalModel.load(folder / "target")
    head = fit_head(target, rows, HeadConfig(k=2, roots=4, steps=60, batch=8, warm_up=4), folder / "head-training")
    return folder / "target", target, save_head(head, folder / "head")


def generate(folder, target, head, prompts):
    (folder / "generate.py").write_text(GENERATE)
    arguments = {
        "target": str(target), "head": head and str(head), "prompts": prompts, "drafted": DRAFTED,
        "new_tokens": NEW_TOKENS,
    }  # fmt: skip
    (folder / "in.json").write_text(json.dumps(arguments))
    done = subprocess.run(
        [sys.executable, folder / "generate.py", folder / "in.json", folder / "out.json"],
        env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"vLLM failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return json.loads((folder / "out.json").read_text())


def test_vllm_decodes_greedily_with_the_head_what_it_decodes_without(trained, rows, tmp_path):
    folder, target, head = trained
    prompts = [row[:6].tolist() for row in rows[:8]]
    plain = generate(tmp_path, folder, None, prompts)
    fast = generate(tmp_path, folder, head, prompts)
    assert fast["tokens"] == plain["tokens"]

    decoder = SpeculativeDecoder(
        target, EagleDrafter.from_pretrained(head, target), Delayed(Action(1, 0, DRAFTED)), VERIFIERS["naive"]
    )
    ours = [decoder.generate(prompt, NEW_TOKENS, SamplingSetting(0.0), Coins.seeded(0)) for prompt in prompts]
    assert [generation.tokens for generation in ours] == plain["tokens"]
    accepted = sum(step.tau for generation in ours for step in generation.steps)
    rate = accepted / sum(len(generation.steps) for generation in ours)
    assert rate > 1
    assert fast["accepted"] / fast["drafts"] == pytest.approx(rate, abs=0.1)
