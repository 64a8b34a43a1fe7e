"""Trajectories: what the target itself writes after a prompt under a sampling setting."""

import torch

from decoding.model import CausalModel
from decoding.sampling import SamplingSetting


@torch.inference_mode()
def sample_trajectories(
    target: CausalModel, prompts: list[list[int]], setting: SamplingSetting, new_tokens: int, seed: int
) -> list[list[int]]:
    """Prompt plus up to `new_tokens` sampled tokens, for each of `prompts` (left-padded into one batch).

    The same seed gives the same trajectories. An end-of-text token ends one, and is dropped.
    """
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long, device=target.device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    eos = target.module.generation_config.eos_token_id
    stops = set(eos if isinstance(eos, list) else [eos]) - {None}
    sampled = setting.temperature > 0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        out = target.module.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=sampled,
            pad_token_id=next(iter(stops), 0),
            **({"temperature": setting.temperature, "top_p": setting.top_p, "top_k": 0} if sampled else {}),
        )[:, width:].tolist()
    return [prompt + _until_stop(row, stops) for prompt, row in zip(prompts, out, strict=True)]


def _until_stop(tokens: list[int], stops: set[int]) -> list[int]:
    for i, token in enumerate(tokens):
        if token in stops:
            return tokens[:i]
    return tokens
