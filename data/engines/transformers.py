"""Engines sample text: token ids go in and come out. That of transformers is for every machine."""

from collections.abc import Collection
from itertools import chain, groupby, takewhile
from typing import Any, Protocol

import torch

from nde_talf.data.engines.batch import sample_batch
from nde_talf.decoding.common.micro_batch import MicroBatch
from nde_talf.decoding.common.progress import activity
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.sampling.rng import Rng, SamplingSetting

AT_ONCE = 128
"""Texts that are sampled together, unless engine.batch says otherwise."""


class Engine(Protocol):
    """A model that samples. The same seed gives the same tokens."""

    def sample(
        self,
        prompts: list[list[int]],
        setting: SamplingSetting,
        new_tokens: int,
        seed: int,
        ends: Collection[int] = (),
    ) -> list[list[int]]:
        """Continue each prompt by up to `new_tokens` tokens.

        A text ends before the first of the model's end tokens (see `models.end_tokens`), or of
        `ends`.
        """

    def close(self) -> None:
        """Free the memory."""


def sampling_options(setting: SamplingSetting) -> dict[str, Any]:
    """Return the arguments of transformers' `generate` that draw as `setting` says."""
    warped = {name: getattr(setting, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return {"do_sample": True, **warped} if setting.temperature > 0 else {"do_sample": False}


def seed_of_row(seed: int, row: int) -> int:
    """Return the seed of a row's generator."""
    return (seed * 1_000_003 + row) % (1 << 62)


class TransformersEngine:
    """Samples from a `CausalModel`, `at_once` texts together, or fewer if memory is short.

    Prompts of about one length go together. A model without masks for trees, such as one with a
    recurrent state, samples by transformers' `generate`.
    """

    def __init__(self, model: CausalModel, at_once: int = AT_ONCE):
        self.model, self._batch = model, MicroBatch(at_once)

    @torch.inference_mode()
    def sample(
        self,
        prompts: list[list[int]],
        setting: SamplingSetting,
        new_tokens: int,
        seed: int,
        ends: Collection[int] = (),
    ) -> list[list[int]]:
        """Continue each prompt, see `Engine.sample`."""
        order = sorted(range(len(prompts)), key=lambda at: (-len(prompts[at]), prompts[at]))
        stops = self.model.ends | frozenset(ends)
        with activity("texts", len(prompts), "text") as now:

            def tell(texts: int, tokens: int) -> None:
                now.done, now.tokens = now.done + texts, now.tokens + tokens

            def some(at: slice) -> list[list[int]]:
                rows = order[at]
                asked = [prompts[row] for row in rows]
                seeds = [seed_of_row(seed, row) for row in rows]
                if self.model.form != "masks":
                    return self._generate(asked, setting, new_tokens, seeds[0], stops)
                rngs = [Rng.seeded(each) for each in seeds]
                return sample_batch(self.model, asked, setting, new_tokens, rngs, stops, tell)

            sampled = chain(*self._batch.run(len(prompts), some))
        texts = dict(zip(order, sampled, strict=True))
        return [prompt + texts[row] for row, prompt in enumerate(prompts)]

    def _generate(
        self,
        prompts: list[list[int]],
        setting: SamplingSetting,
        new_tokens: int,
        seed: int,
        stops: frozenset[int],
    ) -> list[list[int]]:
        """Sample by transformers' `generate`, prompts of one length together."""
        texts: list[list[int]] = []
        # All devices, as without; but then torch warns of several.
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            for length, same in groupby(prompts, len):
                ids = torch.tensor([*same], device=self.model.device)
                texts += self.model.module.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new_tokens,
                    eos_token_id=sorted(stops) or None,
                    pad_token_id=min(stops, default=0),
                    **sampling_options(setting),
                )[:, length:].tolist()
        return [[*takewhile(lambda token: token not in stops, text)] for text in texts]

    def close(self) -> None:
        """Nothing to do: the model belongs to whoever made it."""
