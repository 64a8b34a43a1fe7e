"""The outside reference: transformers' own assisted generation on the same pair."""

import time

import torch

from decoding.model import CausalModel
from decoding.sampling import SamplingSetting
from evaluation.benchmark import Generate, Record


def transformers_assisted(
    name: str, target: CausalModel, draft: CausalModel, setting: SamplingSetting, new_tokens: int
) -> Generate:
    """`target.generate(assistant_model=draft)` with its default schedule.

    Its first target pass holds the prompt and a first draft at once. As for our own methods, that pass and the tokens it
    gives are not counted: the clock starts when it ends, and what it committed is read off the cache at the second pass.
    """
    prefill = {"end": 0.0, "passes": 0, "cached": 0}

    def before(module, args, kwargs) -> None:
        prefill["passes"] += 1
        if prefill["passes"] == 2:
            prefill["cached"] = kwargs["past_key_values"].get_seq_length()

    def after(*_) -> None:
        if prefill["passes"] == 1:
            prefill["end"] = clock()

    def clock() -> float:
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        return time.perf_counter()

    sampling = (
        {"do_sample": True, "temperature": setting.temperature, "top_p": setting.top_p, "top_k": 0}
        if setting.temperature
        else {"do_sample": False}
    )

    def generate(prompt: list[int], seed: int, kind: str) -> Record:
        ids = torch.tensor([prompt], device=target.device)
        prefill.update(end=0.0, passes=0, cached=0)
        hooks = [
            target.body.register_forward_pre_hook(before, with_kwargs=True),
            target.body.register_forward_hook(after),
        ]
        try:
            with torch.inference_mode(), torch.random.fork_rng():
                torch.manual_seed(seed)
                out = target.module.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    assistant_model=draft.module,
                    max_new_tokens=new_tokens,
                    eos_token_id=None,
                    pad_token_id=0,
                    **sampling,
                )
                seconds = clock() - prefill["end"]
        finally:
            for hook in hooks:
                hook.remove()
        # All committed tokens but the last are in the cache when the second pass begins.
        before_second = prefill["cached"] + 1 if prefill["passes"] > 1 else out.shape[1]
        return Record(str(setting), name, "", "", out.shape[1] - before_second, prefill["passes"] - 1, 0, seconds)

    return generate
