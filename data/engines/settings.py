"""Settings of `engine.*`: what samples text. Imports no torch."""

from typing import Annotated

from pydantic import Field

from nde_talf.decoding.common.settings import Count, Few, Share, one_of, settings


@settings("engine")
class EngineConfig:
    """The engine that samples trajectories and answers, and the workers that trace."""

    name: Annotated[str, one_of(("auto", "transformers", "vllm"))] = "auto"
    """transformers, vllm, or auto: vllm where it is installed and model.device is one GPU."""
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    """vLLM: number of GPUs that share one model."""
    gpu_memory: Share = 0.85
    """vLLM: fraction of a GPU's memory to use."""
    batch: Count = 128
    """transformers: texts that are sampled together. More is faster, and takes more memory."""
    workers: Few = 1
    """1: trace in this process; more: Ray actors, on this machine or on a cluster (ray.address)."""
    gpus: Annotated[float, Field(ge=0, le=1024)] | None = None
    """GPUs of each Ray actor; null: one, or engine.tensor_parallel with vLLM."""
