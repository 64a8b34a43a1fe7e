"""Stage traces: from trajectories to a table of roots, with their features and their labels.

This module does not know what sampled the trajectories, or where tables go.
"""

import torch
from torch import Tensor

from data.text.prompts import Prompt
from data.traces.label_chunks import chunk_rows, labels
from data.traces.settings import TracesConfig
from data.traces.super_trees import Prefix, super_trees
from decoding.common.micro_batch import MicroBatch
from decoding.features import SCALARS, scalar_features
from decoding.model import CausalModel
from decoding.sampling import RAW, SamplingSetting, warp
from decoding.super_tree import super_tree_layout


def draft_setting(setting: SamplingSetting, config: TracesConfig) -> SamplingSetting:
    """What the draft samples under where the target samples under `setting`."""
    return setting if config.draft_temperature == "match" else RAW


def root_positions(prompt: list[int], trajectory: list[int], stride: int) -> list[int]:
    """Positions of the roots: the first generated token, and every `stride`-th after it."""
    return list(range(len(prompt), len(trajectory), stride))


def trace_trajectories(
    target: CausalModel,
    draft: CausalModel,
    prompts: list[Prompt],
    trajectories: list[list[int]],
    settings: list[SamplingSetting],
    config: TracesConfig,
    micro_batch: MicroBatch,
    seed: int,
    drawn: list[Tensor] | None = None,
) -> dict[str, list | Tensor]:
    """Trace trajectories: a table with a row for each root and setting.

    Args:
        target, draft: the pair.
        prompts, trajectories: [P] each; a trajectory begins with its prompt's tokens.
        settings: the sampling settings that labels are computed for.
        micro_batch: how many super-trees go through the models at once. It does not change the result.
        seed: of the super-trees.
        drawn: super-trees that an engine has drawn, for each trajectory [roots * samples, N - 1]; all settings must then share
            the draft's.

    Returns:
        Columns of R rows; none if the target ended its text at once after every prompt. prompt_id, kind, split [R];
        temperature, top_p, context (tokens up to and with the root) [R]; h_p_previous [R, H_p], h_q_previous and h_q_root
        [R, H_q]; the scalars of `decoding.features`; and for every verifier its estimates of E[tau + 1], the expected block
        efficiency, for the trees of `decoding.actions.TREES` [R, samples, 233].
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for i, (prompt, trajectory) in enumerate(zip(prompts, trajectories, strict=True)):
        positions = root_positions(prompt.tokens, trajectory, config.stride)
        if positions:  # else the target ended its text at once
            rollouts = None if drawn is None else drawn[i]
            found = _trace(target, draft, trajectory, positions, settings, config, micro_batch, generator, rollouts)
            parts += [(prompt, setting, columns) for setting, columns in zip(settings, found, strict=True)]
    if not parts:
        return {}
    columns: dict[str, list | Tensor] = {
        name: [getattr(prompt, attribute) for prompt, _, part in parts for _ in part["context"]]
        for name, attribute in (("prompt_id", "id"), ("kind", "kind"), ("split", "split"))
    }
    for name in ("temperature", "top_p"):
        columns[name] = torch.cat([torch.full((len(part["context"]),), getattr(setting, name)) for _, setting, part in parts])
    for name in parts[0][2]:
        columns[name] = torch.cat([part[name] for _, _, part in parts])
    return columns


@torch.inference_mode()
def _trace(target, draft, trajectory, positions, settings, config, micro_batch, generator, drawn) -> list[dict[str, Tensor]]:
    """The columns of one trajectory that are computed from the models, setting by setting."""
    tokens = torch.tensor(trajectory, device=target.device)
    positions = torch.tensor(positions, device=target.device)
    layout = super_tree_layout()
    chunk = chunk_rows(target.vocab_size, config.node_chunk, layout)
    pairs = [(setting, draft_setting(setting, config)) for setting in settings]
    p_prefix, q_prefix = Prefix(target, tokens), Prefix(draft, tokens)
    features = {
        "context": positions + 1,
        "h_p_previous": p_prefix.hidden[positions - 1],
        "h_q_previous": q_prefix.hidden[positions - 1],
        "h_q_root": q_prefix.hidden[positions],
    }
    roots = positions.repeat_interleave(config.samples)
    uniforms = torch.rand(len(roots), len(layout), generator=generator, dtype=torch.float64)

    def found(part: slice) -> list[dict[str, Tensor]]:
        own = None if drawn is None else drawn[part]
        trees = super_trees(p_prefix, q_prefix, tokens, roots[part], layout, pairs[0][1], uniforms[part], own, chunk)
        return labels(trees, target, draft, pairs, config.verifiers, layout, chunk)

    batches = micro_batch.run(len(roots), found)
    columns = []
    for i, pair in enumerate(pairs):
        scalars = _scalars(target, draft, features, pair, chunk)
        estimates = {
            name: torch.cat([batch[i][name] for batch in batches]).view(len(positions), config.samples, -1)
            for name in config.verifiers
        }
        own = {**features, **dict(zip(SCALARS, scalars.unbind(-1), strict=True)), **estimates}
        columns.append({name: x.float().cpu() if x.is_floating_point() else x.cpu() for name, x in own.items()})
    return columns


def _scalars(target, draft, features, pair, chunk: int) -> Tensor:
    """Scalar features [R, 6] from the hidden states, a chunk of rows at a time."""
    states = (features["h_p_previous"], features["h_q_previous"], features["h_q_root"])
    models, own = (target, draft, draft), (pair[0], pair[1], pair[1])
    parts = [
        scalar_features(*(warp(m.logits(h[at : at + chunk]), s) for m, h, s in zip(models, states, own, strict=True)))
        for at in range(0, len(states[0]), chunk)
    ]
    return torch.cat(parts)
