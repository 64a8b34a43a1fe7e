"""The transformers engine: sampling in torch, for every machine."""

from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nde_talf.data.engines.base import end_of_text
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.sampling import SamplingSetting


def sampling_options(setting: SamplingSetting) -> dict[str, Any]:
    """The arguments of transformers' `generate` that draw as `setting` says."""
    warped = {name: getattr(setting, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return {"do_sample": True, **warped} if setting.temperature > 0 else {"do_sample": False}


class TransformersEngine:
    """Samples from a `CausalModel` with transformers' `generate`.

    Prompts are left-padded into one batch. Of a draft with more rows than its target, the surplus
    ones are never drawn; of one with fewer, a token that it does not know counts as its padding
    token.
    """

    def __init__(self, model: CausalModel):
        self.model = model

    def sample(
        self, prompts: list[list[int]], setting: SamplingSetting, new_tokens: int, seed: int
    ) -> list[list[int]]:
        stops = end_of_text(self.model.module.generation_config)
        continued = self._generate(prompts, setting, new_tokens, seed).tolist()
        written = [list(takewhile(lambda token: token not in stops, row)) for row in continued]
        return [prompt + row for prompt, row in zip(prompts, written, strict=True)]

    def rollouts(
        self,
        prefixes: list[list[int]],
        setting: SamplingSetting,
        length: int,
        copies: int,
        seed: int,
    ) -> Tensor:
        # No token has that id. min_new_tokens instead would forbid the end of text, and so change
        # the law.
        repeated = [prefix for prefix in prefixes for _ in range(copies)]
        found = self._generate(repeated, setting, length, seed, eos_token_id=self.model.vocab_size)
        return found.view(len(prefixes), copies, length)

    def close(self) -> None:
        """Nothing to do: the model belongs to whoever made it."""

    @torch.inference_mode()
    def _generate(
        self,
        prompts: list[list[int]],
        setting: SamplingSetting,
        new_tokens: int,
        seed: int,
        **options,
    ) -> Tensor:
        rows = [torch.tensor(prompt) for prompt in prompts]
        ids, mask = (
            pad_sequence(each, batch_first=True, padding_side="left").to(self.model.device)
            for each in (rows, [torch.ones_like(row) for row in rows])
        )
        with torch.random.fork_rng(
            range(torch.cuda.device_count())
        ):  # all, as without; but then torch warns of several
            torch.manual_seed(seed)
            return self.model.module.generate(
                input_ids=self.model.known(ids),
                attention_mask=mask,
                max_new_tokens=new_tokens,
                suppress_tokens=list(range(self.model.vocab_size, len(self.model.lm_head.weight)))
                or None,
                pad_token_id=next(iter(end_of_text(self.model.module.generation_config)), 0),
                **sampling_options(setting),
                **options,
            )[:, ids.shape[1] :]
