"""Test whether an engine is lossless: `python -m benchmarks.lossless --engine vllm`.

Two tests of an engine under its speculative settings:

1. It samples many short texts from a tiny model, whose law is known exactly. A chi-square test
   compares the joint law of the first tokens, since a bias may show in pairs of tokens alone. The
   smallest detectable bias is printed.
2. With --target and --draft it continues real text greedily. Every text must equal plain
   decoding's up to its end, except for tokens whose two best logits are nearly equal.

--engine: nde (our loop), transformers (assisted generation), vllm, or module:function. The function
takes the folders of target and draft and returns sample(prompts, new_tokens, setting, seed) -> the
new tokens of each prompt; setting is a SamplingSetting. The exit status is 1 where a test fails.
"""

import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.timing import parser_of
from nde_talf.data.engines.vllm import open_llm, sampling_params, stops_of
from nde_talf.data.engines.vllm_speculation import Method, draft_method
from nde_talf.data.text.pair import set_ends
from nde_talf.data.text.templates import load_tokenizer
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.drafters.lm import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.end_tokens import up_to_end
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.sampling.rng import Rng, SamplingSetting, warp
from nde_talf.evaluation.chi_square import LEVEL, p_value, smallest_bias
from nde_talf.evaluation.loops import generated
from nde_talf.pipelines.commands.compare_texts import first_difference

Texts = list[list[int]]
Sample = Callable[[Texts, int, SamplingSetting, int], Texts]
Law = dict[tuple[int, ...], float]
NOISE = 0.1
"""Noise of the tiny draft's weights, beside its target's of size 0.3: most drafts are accepted."""
EQUAL = 1e-4
"""Rounding may swap two best logits that are closer, as a fraction of the largest."""
VOCABULARY = 4  # of the tiny model
TESTED = 3  # first tokens in the joint law
PROMPT = [token % VOCABULARY for token in (3, 1, 4, 1, 5, 9, 2, 6)]
PROMPTS, NEW_TOKENS = 16, 48  # of the greedy test


def tiny_pair(folder: Path, seed: int) -> tuple[str, str]:
    """Make a tiny Llama with random weights and a draft like it; returns their folders."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "target")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(NOISE * torch.randn_like(weight))
    model.save_pretrained(folder / "draft")
    return str(folder / "target"), str(folder / "draft")


@torch.inference_mode()
def exact_law(target: CausalModel, prompt: list[int], length: int, setting: SamplingSetting) -> Law:
    """Compute the probability of every text of `length` tokens, in one plain pass over all."""
    texts = list(product(range(target.vocab_size), repeat=length))
    ids = torch.tensor([[*prompt, *text] for text in texts])
    rows = warp(target.module(ids).logits[:, len(prompt) - 1 : -1].double(), setting)
    chances = rows.gather(-1, ids[:, len(prompt) :, None])[..., 0].prod(-1).tolist()
    return {text: chance for text, chance in zip(texts, chances, strict=True) if chance > 0}


def _target(folder: str, **how: Any) -> CausalModel:
    model = CausalModel.load(folder, **how)
    set_ends(model, folder)
    return model


def nde(target: str, draft: str, options: Namespace) -> Sample:
    """Open our loop, with delayed trees."""
    policy = Delayed(Action(2, 1, max(1, options.speculate - 1)))
    drafter = LMDrafter(CausalModel.load(draft))
    model = _target(target)
    decoder = SpeculativeDecoder(model, drafter, policy, "traversal")

    def sample(prompts: Texts, new_tokens: int, setting: SamplingSetting, seed: int) -> Texts:
        rng = Rng.seeded(seed)
        return [
            decoder.generate(prompt, new_tokens, setting, rng, model.ends).tokens
            for prompt in prompts
        ]

    return sample


def transformers(target: str, draft: str, options: Namespace) -> Sample:
    """Open assisted generation, with a draft model or prompt lookup, one prompt at a time."""
    model, assistant = _target(target), CausalModel.load(draft).module
    assistant.generation_config.num_assistant_tokens = options.speculate
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    drafts: dict[str, Any] = {"assistant_model": assistant}
    if options.drafts == "ngram":
        drafts = {"prompt_lookup_num_tokens": options.speculate}

    def sample(prompts: Texts, new_tokens: int, setting: SamplingSetting, seed: int) -> Texts:
        torch.manual_seed(seed)
        return [
            generated(model, prompt, setting, new_tokens, **drafts)[0, len(prompt) :].tolist()
            for prompt in prompts
        ]

    return sample


def ngram_method(drafted: int, shortest: int = 2, longest: int = 4) -> Method:
    """Draft what followed the last `shortest` to `longest` tokens where they occurred before."""
    return {
        "method": "ngram",
        "num_speculative_tokens": drafted,
        "prompt_lookup_min": shortest,
        "prompt_lookup_max": longest,
    }


def vllm(target: str, draft: str, options: Namespace) -> Sample:
    """Open vLLM as it is installed, all prompts at once.

    Raises UserError from the first sample where it drafts nothing.
    """
    method = ngram_method(options.speculate, 1, 3)
    if options.drafts == "model":
        method = draft_method(draft, options.speculate)
    length = 512 if options.target == target else len(PROMPT) + 32
    ends = stops_of(target)
    llm = open_llm(target, "float32", length, speculative_config=method, disable_log_stats=False)

    def sample(prompts: Texts, new_tokens: int, setting: SamplingSetting, seed: int) -> Texts:
        seeds = range(seed, seed + len(prompts)) if setting.temperature else [None] * len(prompts)
        how = [sampling_params(setting, new_tokens, each, stop_token_ids=ends) for each in seeds]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, how, use_tqdm=False)
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        if not metrics["vllm:spec_decode_num_drafts"].value:
            raise UserError(
                "--engine vllm: it drafted nothing, so nothing was tested. Take other drafts."
            )
        return [list(output.outputs[0].token_ids) for output in outputs]

    return sample


ENGINES = {"nde": nde, "transformers": transformers, "vllm": vllm}


def opened(options: Namespace, target: str, draft: str) -> Sample:
    """Open the engine that was asked for over two model folders.

    Raises UserError for a function that cannot be imported.
    """
    if options.engine in ENGINES:
        return ENGINES[options.engine](target, draft, options)
    module, _, name = options.engine.partition(":")
    sys.path.insert(0, "")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"--engine {options.engine}: it cannot be imported ({error}).") from error
    return function(target, draft)


def check_law(options: Namespace, folder: Path) -> tuple[bool, str]:
    """Test the joint law of the first tokens against the model's; return result and sentence."""
    target, draft = tiny_pair(folder, options.seed)
    setting = SamplingSetting(options.temperature, options.top_p, options.top_k)
    plain = CausalModel.load(target, forward="transformers")
    law = exact_law(plain, PROMPT, TESTED, setting)
    # More tokens than tested: an engine may draft less near the end of a text.
    sample = opened(options, target, draft)
    prompts, length = [PROMPT] * options.samples, TESTED + options.speculate + 1
    texts = sample(prompts, length, setting, options.seed)
    counts = Counter(tuple(text[:TESTED]) for text in texts)
    if len(texts) != options.samples or any(len(text) != TESTED for text in counts):
        raise UserError(
            f"--engine {options.engine}: it gave {len(texts)} texts, some too short;"
            f" {options.samples} were asked for."
        )
    p = p_value(counts, law)
    passed = p > LEVEL
    return passed, (
        f"joint law of the first {TESTED} tokens at {setting}:"
        f" {'as the model has it' if passed else 'BIASED'}, p = {p:.2g} at level {LEVEL:g};"
        f" {options.samples} texts. A bias of total variation"
        f" {smallest_bias(options.samples, law):.3f} or more would have been found in 99 of 100"
        " runs."
    )


def check_greedy(options: Namespace, target: str, draft: str) -> tuple[bool, str]:
    """Compare greedy texts after real text with plain decoding's; return result and sentence."""
    model = _target(target, forward="transformers")
    tokenizer = load_tokenizer(target)
    prompts = real_prompts(tokenizer)
    sample = opened(options, target, draft)
    sampled = sample(prompts, NEW_TOKENS, SamplingSetting(0.0), options.seed)
    texts = [up_to_end(text, model.ends) for text in sampled]
    ended = [bool(model.ends & {*text[-1:]}) for text in texts]
    lengths = [NEW_TOKENS if end else len(text) for text, end in zip(texts, ended, strict=True)]
    if lengths != [NEW_TOKENS] * len(prompts):
        raise UserError(
            f"--engine {options.engine}: it gave {len(texts)} texts, the shortest of"
            f" {min(map(len, texts), default=0)} tokens; {len(prompts)} of {NEW_TOKENS} were asked"
            " for, or up to and with a token that ends a text."
        )
    margins = [first_difference(model, *pair) for pair in zip(prompts, texts, strict=True)]
    equal = margins.count(None)
    other = [str(at) for at, margin in enumerate(margins) if margin is not None and margin > EQUAL]
    return not other, (
        f"greedy texts of up to {NEW_TOKENS} tokens after real text, of which {sum(ended)} ended by"
        f" themselves: {equal} of {len(prompts)}"
        f" equal plain decoding's, {len(prompts) - equal - len(other)} differ first where the two"
        f" best logits are equal to {EQUAL:g}"
        + (f", and texts {', '.join(other)} are OTHERS." if other else ".")
    )


def real_prompts(tokenizer: Any) -> list[list[int]]:
    """Return beginnings of the standard library's sources, which every machine has."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    prompts: list[list[int]] = []
    for path in sources[:: len(sources) // PROMPTS][:PROMPTS]:
        text = path.read_text(encoding="utf-8", errors="ignore")[:2000]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompts.append(ids[: 24 + len(prompts) % 17])
    return prompts


def read(arguments: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--engine", default="nde")
    parser.add_argument(
        "--drafts",
        choices=("model", "ngram"),
        default="model",
        help="model: a draft model; ngram: with --engine vllm or transformers",
    )
    parser.add_argument("--speculate", type=int, default=3, help="tokens drafted at a time")
    parser.add_argument("--samples", type=int, default=4000, help="texts that are sampled")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", help="folder of a model for the greedy test")
    parser.add_argument("--draft", help="folder of its draft")
    options = parser.parse_args(arguments)
    if options.engine not in ENGINES and ":" not in options.engine:
        parser.error(f"--engine: choose {', '.join(ENGINES)}, or module:function")
    if options.engine == "nde" and options.drafts == "ngram":
        parser.error("--drafts ngram: give --engine vllm or transformers with it")
    if (options.target is None) != (options.draft is None):
        parser.error("--target and --draft: the greedy test needs both")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests; return the exit status."""
    options = read(arguments)
    try:
        with TemporaryDirectory() as folder:
            passed, sentence = check_law(options, Path(folder))
        print(f"{options.engine}: {sentence}", flush=True)
        if options.target is not None:
            equal, sentence = check_greedy(options, options.target, options.draft)
            print(f"{options.engine}: {sentence}")
            passed = passed and equal
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
