"""What samples: the settings of `engine.*`. Imports no torch."""

from dataclasses import dataclass

from nde_talf.decoding.common.schema import check_fields, choice, number


@dataclass
class EngineConfig:
    """The engine that samples trajectories, super-trees and regenerated answers, and the workers
    that trace.
    """

    name: str = choice("auto", ("auto", "transformers", "vllm"))
    """transformers, vllm, or auto: vllm where it is installed and model.device is one GPU."""
    tensor_parallel: int = number(1, 1, 1024)
    """vLLM: number of GPUs that share one model."""
    gpu_memory: float = number(0.85, 0, 1, above=True)
    """vLLM: fraction of a GPU's memory to use."""
    max_length: int | None = number(None, 2, 10_000_000, example=4096)
    """vLLM: longest sequence in tokens; null: what is needed, up to the model's own limit."""
    workers: int = number(1, 1, 10_000)
    """1: trace in this process; more: Ray actors, on this machine or on a cluster (ray.address)."""
    gpus: float | None = number(None, 0, 1024, example=1)
    """GPUs of each Ray actor; null: one, or engine.tensor_parallel with vLLM."""

    def __post_init__(self) -> None:
        check_fields(self, "engine")
