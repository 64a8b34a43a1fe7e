"""Stage 1's mathematics on real models: roots along the target's own trajectories, their features and their labels.

It turns one group of prompts under one sampling setting into a table of roots. Which groups there are, where tables
go and what is already there is the trace store's business.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.super_trees import Prefix, scored_super_trees
from data.trajectories import sample_trajectories
from decoding.actions import TREES
from decoding.errors import UserError
from decoding.features import SCALARS, scalar_features
from decoding.model import CausalModel
from decoding.sampling import RAW, SamplingSetting, warp
from decoding.super_tree import super_tree_layout
from decoding.verification.expected import LABELLED, expected_block_efficiency


@dataclass
class TracesConfig:
    """What to trace.

    settings: names of sampling settings (see SETTINGS). train_prompts, validation_prompts: how many of the held-out
    prompts. new_tokens: length of a trajectory behind its prompt. stride: a root every so many tokens. samples: s,
    super-trees a root. verifiers: whose labels. draft_temperature: "match" warps the draft like the target, "raw" leaves
    it. micro_batch: super-trees in one pass (memory). shard_prompts: prompts in one Parquet shard. dtype: of the models.
    """

    settings: list[str] = field(default_factory=lambda: ["t0.2", "t0.6", "t1.0"])
    train_prompts: int = 40
    validation_prompts: int = 16
    new_tokens: int = 64
    stride: int = 16
    samples: int = 4
    verifiers: list[str] = field(default_factory=lambda: ["specinfer", "naivetree", "traversal"])
    draft_temperature: str = "match"
    micro_batch: int = 8
    shard_prompts: int = 8
    dtype: str = "float32"
    seed: int = 0


# The eight sampling settings of paper 000 (section 4.1).
SETTINGS: dict[str, SamplingSetting] = {
    **{f"t{t}": SamplingSetting(float(t)) for t in ("0.2", "0.4", "0.6", "0.8", "1.0", "1.2")},
    **{f"p{p}": SamplingSetting(1.0, float(p)) for p in ("0.9", "0.99")},
}


@dataclass(frozen=True)
class TracePrompt:
    """A prompt as token ids, with the id and kind it is reported under and the split all its roots belong to."""

    id: str
    kind: str
    split: str
    tokens: list[int]


def check_traces_config(config: TracesConfig) -> None:
    """Raise UserError for settings, verifiers or sizes that cannot be traced."""
    for name in config.settings:
        if name not in SETTINGS:
            raise UserError(f"traces.settings: '{name}' is no sampling setting; choose from {', '.join(SETTINGS)}.")
    for name in config.verifiers:
        if name not in LABELLED:
            raise UserError(f"traces.verifiers: there are no labels for '{name}'; choose from {', '.join(LABELLED)}.")
    if config.draft_temperature not in ("match", "raw"):
        raise UserError(f"traces.draft_temperature={config.draft_temperature}: it is either match or raw.")
    for name in ("train_prompts", "validation_prompts", "new_tokens", "stride", "samples", "micro_batch"):
        if getattr(config, name) < 1:
            raise UserError(f"traces.{name}={getattr(config, name)}: it must be at least 1.")


def trace_group(
    target: CausalModel,
    draft: CausalModel,
    prompts: list[TracePrompt],
    setting: SamplingSetting,
    config: TracesConfig,
    seed: int,
) -> dict[str, list | Tensor]:
    """Columns of all roots of these prompts' trajectories under `setting`; R rows.

    prompt_id, kind, split [R]; temperature, top_p, context (tokens up to and with the root) [R]; h_p_previous [R, H_p],
    h_q_previous, h_q_root [R, H_q]; the scalars of `decoding.features`; and for every verifier its estimates
    [R, samples, 233] of E[tau + 1] for the trees of `decoding.actions.TREES`. The same seed gives the same columns.
    """
    trajectories = sample_trajectories(target, [p.tokens for p in prompts], setting, config.new_tokens, seed)
    generator = torch.Generator().manual_seed(seed)
    parts = [
        {"prompt": prompt, **_trace(target, draft, prompt, trajectory, setting, config, generator)}
        for prompt, trajectory in zip(prompts, trajectories, strict=True)
    ]
    parts = [part for part in parts if len(part["context"])]
    if not parts:
        raise UserError(
            f"the target ended its text at once after every one of {len(prompts)} prompts ({setting}): there is no root to "
            "trace. Are these prompts complete texts already?"
        )
    columns: dict[str, list | Tensor] = {
        name: [getattr(part["prompt"], attribute) for part in parts for _ in part["context"]]
        for name, attribute in (("prompt_id", "id"), ("kind", "kind"), ("split", "split"))
    }
    rows = len(columns["prompt_id"])
    columns["temperature"] = torch.full((rows,), setting.temperature)
    columns["top_p"] = torch.full((rows,), setting.top_p)
    for name in parts[0]:
        if name != "prompt":
            columns[name] = torch.cat([part[name] for part in parts])
    return columns


@torch.inference_mode()
def _trace(target, draft, prompt, trajectory, setting, config, generator) -> dict[str, Tensor]:
    """The columns of one trajectory that are computed from the models."""
    tokens = torch.tensor(trajectory, device=target.device)
    positions = torch.arange(len(prompt.tokens), len(trajectory), config.stride, device=target.device)
    if not len(positions):  # the target ended its text at once
        return {"context": positions}
    draft_setting = setting if config.draft_temperature == "match" else RAW
    p_prefix, q_prefix = Prefix(target, tokens), Prefix(draft, tokens)
    p_previous = warp(target.logits(p_prefix.hidden[positions - 1]), setting)
    q_previous = warp(draft.logits(q_prefix.hidden[positions - 1]), draft_setting)
    q_root = warp(draft.logits(q_prefix.hidden[positions]), draft_setting)
    columns = {
        "context": positions + 1,
        "h_p_previous": p_prefix.hidden[positions - 1],
        "h_q_previous": q_prefix.hidden[positions - 1],
        "h_q_root": q_prefix.hidden[positions],
        **dict(zip(SCALARS, scalar_features(p_previous, q_previous, q_root).unbind(-1), strict=True)),
    }
    labels = {name: [] for name in config.verifiers}
    layout = super_tree_layout()
    for scored in scored_super_trees(
        p_prefix,
        q_prefix,
        tokens,
        positions,
        config.samples,
        layout,
        setting,
        draft_setting,
        config.micro_batch,
        generator,
    ):
        for name, values in labels.items():
            values.append(expected_block_efficiency(scored.p, scored.q, scored.tokens, name, layout, check=False))
    for name, values in labels.items():
        columns[name] = torch.cat(values).view(len(positions), config.samples, len(TREES))
    return {name: column.float().cpu() if column.is_floating_point() else column.cpu() for name, column in columns.items()}
