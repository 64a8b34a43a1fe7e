"""The outside reference: transformers' own assisted generation on the same pair."""

import time

import torch

from decoding.model import CausalModel
from decoding.sampling import SamplingSetting
from evaluation.benchmark import Generate, Record


def transformers_assisted(
    name: str, target: CausalModel, draft: CausalModel, setting: SamplingSetting, new_tokens: int
) -> Generate:
    """`target.generate(assistant_model=draft)` with its default schedule; target passes are counted by a hook.

    The prefill cannot be told apart from outside: its one pass and one token are in.
    """
    passes = 0

    def count(*_) -> None:
        nonlocal passes
        passes += 1

    sampling = (
        {"do_sample": True, "temperature": setting.temperature, "top_p": setting.top_p, "top_k": 0}
        if setting.temperature
        else {"do_sample": False}
    )

    def generate(prompt: list[int], seed: int) -> Record:
        nonlocal passes
        ids = torch.tensor([prompt], device=target.device)
        handle = target.body.register_forward_hook(count)
        passes = 0
        try:
            with torch.inference_mode(), torch.random.fork_rng():
                torch.manual_seed(seed)
                started = time.perf_counter()
                out = target.module.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    assistant_model=draft.module,
                    max_new_tokens=new_tokens,
                    eos_token_id=None,
                    pad_token_id=0,
                    **sampling,
                )
                seconds = time.perf_counter() - started
        finally:
            handle.remove()
        tokens = out.shape[1] - ids.shape[1]
        return Record(str(setting), name, "", "", tokens, passes, 0, seconds)

    return generate
