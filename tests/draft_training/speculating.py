"""A target inside vLLM that counts its passes and accepted drafts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from nde_talf.data.engines.vllm import open_llm, sampling_params
from nde_talf.data.engines.vllm_speculation import Method
from nde_talf.decoding.sampling import SamplingSetting


@dataclass(frozen=True)
class Speculated:
    """What was written after one prompt.

    Attributes:
        tokens: the text.
        passes: passes of the target after the one over the prompt.
        drafts: passes that verified drafted tokens.
        accepted: for each position of a draft, how often its token was accepted [drafted].
        seconds: for the full request, its prompt included.
    """

    tokens: list[int]
    passes: int
    drafts: int
    accepted: list[int]
    seconds: float


class SpeculatingLLM:
    """`target` inside vLLM with `method` (None: without speculation).

    One a process: vLLM counts by process.
    """

    def __init__(self, target: str, method: Method | None, max_length: int, dtype: str = "float32"):
        self.method = method
        # Without statistics nothing is counted; without prefix caching a prompt costs the same
        # every time.
        counted = {"disable_log_stats": False, "enable_prefix_caching": False}
        self._model = open_llm(str(target), dtype, max_length, speculative_config=method, **counted)

    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, setting: SamplingSetting, seed: int = 0
    ) -> list[Speculated]:
        """`new_tokens` tokens after each prompt, one request after the other.

        End of text is a token like any other.
        """
        texts = []
        for i, prompt in enumerate(prompts):
            sampling = sampling_params(
                setting, new_tokens, seed + i if setting.temperature else None
            )
            before, started = self._counts(), time.perf_counter()
            (output,) = self._model.generate(
                [{"prompt_token_ids": prompt}], sampling, use_tqdm=False
            )
            seconds, after = time.perf_counter() - started, self._counts()
            passes, drafts, *accepted = (b - a for a, b in zip(before, after, strict=True))
            texts.append(
                Speculated(list(output.outputs[0].token_ids), passes - 1, drafts, accepted, seconds)
            )
        return texts

    def _counts(self) -> list[int]:
        """So far: passes, drafts, then accepted tokens at each position."""
        metrics = {metric.name: metric for metric in self._model.get_metrics()}
        passes = metrics["vllm:iteration_tokens_total"].count
        if not self.method:
            return [passes, 0]
        drafts = metrics["vllm:spec_decode_num_drafts"].value
        return [passes, drafts, *metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values]
