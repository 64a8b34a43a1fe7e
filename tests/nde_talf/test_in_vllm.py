"""Our drafts inside the installed vLLM: four requests at once, preempted and resumed, by draft model
and n-grams.
"""

import importlib.util

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nde_talf import (
    Action,
    Delayed,
    LMDrafter,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
    for_vllm,
)
from nde_talf.decoding.common.checksums import write_checksums
from nde_talf.integrations.vllm import KEY
from tests.decoding.pairs import tiny_pair
from tests.vllm_process import in_process

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

VOCABULARY, DRAFTED, NEW = 32, 4, 60
BLOCKS = 6  # of the cache, of 32 tokens: too few for four requests, so that some are preempted

# Two engines: without speculation, and with ours, whose `Proposals` are exchanged between runs.
IN_VLLM = """
import json, sys

from nde_talf.data.engines.vllm import open_llm
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.sampling.rng import SamplingSetting
from nde_talf.data.engines.vllm import import_vllm, sampling_params

def opened(given, **options):
    options |= {"block_size": 32, "num_gpu_blocks_override": given["blocks"] + 1, "enable_prefix_caching": False}
    return open_llm(given["target"], "float32", 80, disable_log_stats=False, **options)

def texts(llm, given, prompts):
    asked = [sampling_params(SamplingSetting(0.0), new, None) for new in given["new"][:len(prompts)]]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]

def counted(llm, name):
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)

def main(given):
    plain = opened(given)
    served = {"plain": texts(plain, given, given["prompts"])}
    plain.llm_engine.engine_core.shutdown()
    del plain
    llm = opened(given, **given["asked"]["fixed"])  # of all the one that drafts most tokens
    for name, asked in given["asked"].items():
        preempted = counted(llm, "vllm:num_preemptions")
        (drafter,) = llm.collective_rpc(lambda worker: worker.model_runner.drafter)
        drafts = type(drafter)(replaced(drafter.config, asked))  # as vLLM makes it of these options
        drafts.load_model(None)
        llm.collective_rpc(lambda worker: setattr(worker.model_runner, "drafter", drafts))
        run = served[name] = {"texts": texts(llm, given, given["prompts"])}
        run["preempted"] = counted(llm, "vllm:num_preemptions") - preempted
        drafts.load_model(None)
        run["steps"] = []
        for prompt in given["prompts"]:  # one at a time: a sequence is one text from begin to end
            texts(llm, given, [prompt])
            run["steps"].append(drafts.proposals.followed[0].steps)
    served["refused"] = []
    for asked in given["refused"]:
        try:
            type(drafter)(replaced(drafter.config, asked)).load_model(None)
        except UserError as error:
            served["refused"].append(str(error))
    llm.llm_engine.engine_core.shutdown()
    return served

def replaced(config, asked):
    from copy import copy
    config, config.speculative_config = copy(config), copy(config.speculative_config)
    config.additional_config = asked["additional_config"]
    config.speculative_config.num_speculative_tokens = asked["speculative_config"]["num_speculative_tokens"]
    return config

if __name__ == "__main__":
    json.dump(main(json.load(open(sys.argv[1]))), open(sys.argv[2], "w"))
"""


def saved(model, folder, words):
    """A model folder with a tokenizer."""
    model.module.save_pretrained(folder)
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    write_checksums(folder)
    return folder


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(VOCABULARY, noise=0.03, hidden=64)


@pytest.fixture(scope="module")
def prompts():
    return [
        torch.randint(VOCABULARY, (4 + 3 * i,), generator=torch.Generator().manual_seed(i)).tolist()
        for i in range(4)
    ]


@pytest.fixture(scope="module")
def served(pair, prompts, tmp_path_factory):
    folder, words = tmp_path_factory.mktemp("served"), [f"word{i}" for i in range(VOCABULARY)]
    target, draft = (
        saved(model, folder / name, words)
        for model, name in zip(pair, ("target", "draft"), strict=True)
    )
    other = saved(pair[1], folder / "other", words[::-1])
    asked = {
        "fixed": for_vllm(draft, tokens=DRAFTED),
        "ngram": for_vllm("ngram", tokens=3),
    }
    refused = [
        for_vllm(other),
        {**asked["fixed"], "additional_config": {KEY: {"fast": 1}}},
    ]
    given = {
        "target": str(target),
        "prompts": prompts,
        "new": [NEW, NEW - 30, NEW, NEW - 10],
        "blocks": BLOCKS,
    }
    return in_process(
        IN_VLLM, given | {"asked": asked, "refused": refused}, tmp_path_factory.mktemp("script")
    )


@pytest.mark.parametrize("kind", ["fixed", "ngram"])
def test_four_requests_at_once_get_the_text_of_plain_decoding(served, kind):
    """Some are preempted meanwhile, and they end at different times, so that rows move."""
    assert served[kind]["texts"] == served["plain"] and served[kind]["preempted"] > 0
    assert len({tuple(text) for text in served["plain"]}) == 4


def test_as_many_drafted_tokens_are_accepted_as_in_our_loop(served, pair, prompts):
    """Step by step, up to the last one, which vLLM cuts where the text ends."""
    target, draft = pair
    decoder = SpeculativeDecoder(
        target, LMDrafter(draft), Delayed(Action(1, 0, DRAFTED)), "traversal"
    )
    for prompt, steps in zip(prompts, served["fixed"]["steps"], strict=True):
        loop = [
            step.tau
            for step in decoder.generate(prompt, NEW, SamplingSetting(0.0), Rng.seeded(0)).steps
        ]
        assert len(steps) > 5 and [accepted for _, accepted in steps] == loop[: len(steps)]
    assert len({accepted for steps in served["fixed"]["steps"] for _, accepted in steps}) > 1


def test_what_it_cannot_use_is_refused_in_a_sentence(served):
    tokenizer, unknown = served["refused"]
    assert "for_vllm(draft=)" in tokenizer and "another vocabulary" in tokenizer
    assert "additional_config['nde_talf']" in unknown and "fast" in unknown
