"""What samples: the settings of `engine.*`. Imports no torch."""

from dataclasses import dataclass

from decoding.common.errors import check_choice, check_minimum


@dataclass
class EngineConfig:
    """The engine that samples trajectories, super-trees and regenerated answers, and the workers that trace."""

    name: str = "auto"
    """transformers, vllm, or auto: vllm where it is installed and model.device is one GPU."""
    tensor_parallel: int = 1
    """vLLM: number of GPUs that share one model."""
    gpu_memory: float = 0.85
    """vLLM: fraction of a GPU's memory to use."""
    max_length: int | None = None
    """vLLM: longest sequence in tokens; null: what is needed, up to the model's own limit."""
    workers: int = 1
    """1: trace in this process; more: Ray actors, on this machine or on a cluster (ray.address)."""
    gpus: float | None = None
    """GPUs of each Ray actor; null: one, or engine.tensor_parallel with vLLM."""

    def __post_init__(self) -> None:
        check_choice(self, "engine", name=("auto", "transformers", "vllm"))
        check_minimum(self, "engine", workers=1, tensor_parallel=1)
