"""What is traced, and who samples: the settings of `traces.*` and `engine.*`. Imports no torch."""

from dataclasses import dataclass, field

from decoding.common.errors import UserError
from decoding.names import LABELLED, ON_PATHS
from decoding.setting import SamplingSetting


@dataclass
class EngineConfig:
    """Who samples. name: transformers, vllm, or auto (vllm on CUDA where it is installed). tensor_parallel, gpu_memory,
    max_length: vLLM's GPUs a model, share of their memory, longest sequence. workers: 1 works in this process, more are Ray
    actors, each with `gpus` GPUs (null: one, or tensor_parallel of them under vllm)."""

    name: str = "auto"
    tensor_parallel: int = 1
    gpu_memory: float = 0.85
    max_length: int | None = None
    workers: int = 1
    gpus: float | None = None


@dataclass
class TracesConfig:
    """What to trace.

    settings: names of sampling settings (see SETTINGS). train_prompts, validation_prompts: how many of the held-out
    prompts. new_tokens: length of a trajectory behind its prompt. stride: a root every so many tokens. samples: s,
    super-trees a root; validation_samples: of the validation prompts' roots, the judge's labels (0: as samples). verifiers:
    whose labels. draft_temperature: "match" warps the draft like the target; "raw" leaves it, and then one trajectory a prompt
    (sampled under the settings in turn) and one set of super-trees serve all settings. micro_batch: super-trees in one pass.
    node_chunk: rows of next-token distributions held at once; 0 takes 256 MB a matrix. shard_prompts: prompts in one Parquet
    shard. dtype: of the models.
    """

    settings: list[str] = field(default_factory=lambda: ["t0.6", "t1.0"])
    train_prompts: int = 28
    validation_prompts: int = 14
    new_tokens: int = 64
    stride: int = 16
    samples: int = 2
    validation_samples: int = 4
    verifiers: list[str] = field(default_factory=lambda: ["specinfer", "naivetree", "traversal"])
    draft_temperature: str = "match"
    micro_batch: int = 8
    node_chunk: int = 0
    shard_prompts: int = 8
    dtype: str = "float32"
    seed: int = 0


# The eight sampling settings of the NDE paper (section 4.1).
SETTINGS: dict[str, SamplingSetting] = {
    **{f"t{t}": SamplingSetting(float(t)) for t in ("0.2", "0.4", "0.6", "0.8", "1.0", "1.2")},
    **{f"p{p}": SamplingSetting(1.0, float(p)) for p in ("0.9", "0.99")},
}


def check_traces_config(config: TracesConfig) -> None:
    """Raise UserError for settings, verifiers or sizes that cannot be traced."""
    for name in config.settings:
        if name not in SETTINGS:
            raise UserError(f"traces.settings: '{name}' is no sampling setting; choose from {', '.join(SETTINGS)}.")
    for name in config.verifiers:
        if name not in (*LABELLED, *ON_PATHS):
            known = ", ".join((*LABELLED, *ON_PATHS))
            raise UserError(f"traces.verifiers: there are no labels for '{name}'; choose from {known}.")
    if config.draft_temperature not in ("match", "raw"):
        raise UserError(f"traces.draft_temperature={config.draft_temperature}: it is either match or raw.")
    for name in ("train_prompts", "validation_prompts", "new_tokens", "stride", "samples", "micro_batch"):
        if getattr(config, name) < 1:
            raise UserError(f"traces.{name}={getattr(config, name)}: it must be at least 1.")
    if config.node_chunk:
        from data.traces.label_chunks import rows_together
        from decoding.super_tree import super_tree_layout

        if config.node_chunk < (least := rows_together(super_tree_layout())):
            raise UserError(
                f"traces.node_chunk={config.node_chunk}: a branch point needs {least} rows at once; or 0 for automatic."
            )
