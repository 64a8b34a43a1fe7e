"""Speculative decoding inside vLLM: what a target writes with an exported head, an n-gram or a
draft model, and how many of the drafted tokens are accepted at each position.

Sampled speculation is refused where vLLM does it wrongly. That is found out by a trial, not by the
version.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nde_talf.data.engines.vllm import import_vllm, open_llm, sampling_params
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json
from nde_talf.decoding.sampling import SamplingSetting

Method = dict[str, Any]
"""vLLM's `speculative_config`."""


def head_method(folder: str, drafted: int) -> Method:
    """An exported EAGLE or EAGLE-3 head that drafts `drafted` tokens at a time.

    Raises UserError where there is none.
    """
    config = read_json(Path(folder) / "config.json")
    return {
        "method": config["draft_head"]["kind"],
        "model": str(folder),
        "num_speculative_tokens": drafted,
    }


def ngram_method(drafted: int, shortest: int = 2, longest: int = 4) -> Method:
    """What followed the last `shortest` to `longest` tokens where they occurred before."""
    return {
        "method": "ngram",
        "num_speculative_tokens": drafted,
        "prompt_lookup_min": shortest,
        "prompt_lookup_max": longest,
    }


def draft_method(folder: str, drafted: int) -> Method:
    """A smaller model of the same vocabulary."""
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": drafted}


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

        Raises UserError as `check_speculation` does.
        """
        if self.method:
            check_speculation(setting)
        found = []
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
            found.append(
                Speculated(list(output.outputs[0].token_ids), passes - 1, drafts, accepted, seconds)
            )
        return found

    def _counts(self) -> list[int]:
        """So far: passes, drafts, then accepted tokens at each position."""
        metrics = {metric.name: metric for metric in self._model.get_metrics()}
        passes = metrics["vllm:iteration_tokens_total"].count
        if not self.method:
            return [passes, 0]
        drafts = metrics["vllm:spec_decode_num_drafts"].value
        return [passes, drafts, *metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values]


def check_speculation(setting: SamplingSetting) -> None:
    """Raise UserError if the installed vLLM does not speculate faithfully under `setting`."""
    if setting.temperature and setting.min_p:
        raise UserError(
            f"vLLM: speculation at {setting} is refused, because vLLM has no min-p there. Use"
            " SpeculativeDecoder."
        )
    if setting.temperature and (fault := sampling_fault()):
        raise UserError(
            f"vLLM: speculation at {setting} is refused, because {fault}. Use temperature 0 here,"
            " vLLM on a GPU, or SpeculativeDecoder, which samples on any machine."
        )


def sampling_fault() -> str | None:
    """Why sampled speculation would not follow the target in the installed vLLM; None if nothing is
    known against it.

    Each drafted token's row of logits is divided by the temperature of its request. A Triton kernel
    copies temperatures (and top-p and top-k) to the rows. vLLM's CPU build has no Triton. In 0.32
    the function that replaces the kernel there writes to a temporary copy, so that the rows get
    uninitialised memory. This calls that function and looks at the result.
    """
    vllm = import_vllm()
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu() or HAS_TRITON:
        return None
    version = f"vLLM {vllm.__version__} on the CPU"
    try:
        from vllm.utils.cpu_triton_utils import _expand_kernel_impl

        current_platform.import_kernels()
        got = torch.full((3,), torch.nan)
        _expand_kernel_impl(
            got, torch.tensor([0.5, 2.0]), torch.tensor([1, 3], dtype=torch.int32), 0, 0
        )
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        return (
            f"{version} cannot be checked to hand every drafted token its temperature"
            f" ({type(error).__name__}: {error})"
        )
    if got.tolist() == [0.5, 2.0, 2.0]:
        return None
    return (
        f"{version} hands drafted tokens other temperatures than asked for (0.5, 2, 2 came out as"
        f" {got.tolist()})"
    )
