"""Engines sample text: token ids go in and come out. That of transformers is for every machine."""

from itertools import chain, takewhile
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence

from nde_talf.decoding.common.micro_batch import MicroBatch
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.sampling import SamplingSetting


class Engine(Protocol):
    """A model that samples. The same seed gives the same tokens."""

    def sample(
        self, prompts: list[list[int]], setting: SamplingSetting, new_tokens: int, seed: int
    ) -> list[list[int]]:
        """Continue each prompt by up to `new_tokens` tokens.

        A text ends before the first of the model's end tokens (`nde_talf.decoding.end_tokens`).
        """

    def close(self) -> None:
        """Free the memory."""


def sampling_options(setting: SamplingSetting) -> dict[str, Any]:
    """Return the arguments of transformers' `generate` that draw as `setting` says."""
    warped = {name: getattr(setting, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return {"do_sample": True, **warped} if setting.temperature > 0 else {"do_sample": False}


class TransformersEngine:
    """Samples from a `CausalModel` with transformers' `generate`.

    Prompts are left-padded into one batch, or into several where memory does not hold one.
    """

    def __init__(self, model: CausalModel):
        self.model, self._batch = model, MicroBatch(1 << 30)  # all at once, if they fit

    @torch.inference_mode()
    def sample(
        self, prompts: list[list[int]], setting: SamplingSetting, new_tokens: int, seed: int
    ) -> list[list[int]]:
        """Continue each prompt, see `Engine.sample`."""
        stops = self.model.ends

        def some(at: slice) -> list[list[int]]:
            rows = [torch.tensor(prompt) for prompt in prompts[at]]
            ids, mask = (
                pad_sequence(each, batch_first=True, padding_side="left").to(self.model.device)
                for each in (rows, [torch.ones_like(row) for row in rows])
            )
            # All devices, as without; but then torch warns of several.
            with torch.random.fork_rng(range(torch.cuda.device_count())):
                torch.manual_seed(seed + 1_000_003 * at.start)
                texts = self.model.module.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=new_tokens,
                    eos_token_id=sorted(stops) or None,
                    pad_token_id=min(stops, default=0),
                    **sampling_options(setting),
                )[:, ids.shape[1] :].tolist()
            return [[*takewhile(lambda token: token not in stops, text)] for text in texts]

        parts = self._batch.run(len(prompts), some)
        return [prompt + text for prompt, text in zip(prompts, chain(*parts), strict=True)]

    def close(self) -> None:
        """Nothing to do: the model belongs to whoever made it."""
