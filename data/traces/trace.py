"""Stage traces: from trajectories to a table of roots, with their features and their labels.

This module does not know what sampled the trajectories, or where tables go.
"""

from itertools import chain
from typing import cast

import torch
from torch import Tensor

from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.label_chunks import chunk_rows, labels
from nde_talf.data.traces.settings import TracesConfig
from nde_talf.data.traces.super_trees import Draft, Prefix, draft_prefix, super_trees
from nde_talf.decoding.common.micro_batch import MicroBatch
from nde_talf.decoding.features import SCALARS, scalar_features
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.sampling import RAW, SamplingSetting, warp
from nde_talf.decoding.setting import feature_setting
from nde_talf.decoding.super_tree import super_tree_layout

NAMES = ("prompt_id", "kind", "split")
"""Columns that are text: of the prompt."""


def draft_setting(setting: SamplingSetting, config: TracesConfig) -> SamplingSetting:
    """Return the draft's sampling setting where the target's is `setting`."""
    return setting if config.draft_temperature == "match" else RAW


def root_positions(prompt: list[int], trajectory: list[int], stride: int) -> list[int]:
    """List the roots' positions: the first generated token, and every `stride`-th after it."""
    return list(range(len(prompt), len(trajectory), stride))


def trace_trajectories(
    target: CausalModel,
    draft: CausalModel | Draft,
    prompts: list[Prompt],
    trajectories: list[list[int]],
    settings: list[SamplingSetting],
    config: TracesConfig,
    micro_batch: MicroBatch,
    seed: int,
) -> dict[str, list | Tensor]:
    """Trace trajectories: a table with a row for each root and setting.

    Args:
        target: scores.
        draft: drafts; a head comes as a `Draft`.
        prompts: [P].
        trajectories: [P]; each begins with its prompt's tokens.
        settings: the sampling settings that labels are computed for.
        config: of the roots and labels.
        micro_batch: how many super-trees go through the models at once. It does not change the
            result.
        seed: of the super-trees.

    Returns:
        Columns of R rows; none if the target ended its text at once after every prompt. prompt_id,
        kind, split [R]; temperature, top_p, context (tokens up to and with the root) [R];
        h_p_previous [R, H_p], h_q_previous and h_q_root [R, H_q]; the scalars of
        `nde_talf.decoding.features`; and for every verifier its estimates of E[tau + 1], the
        expected block efficiency, for the trees of `nde_talf.decoding.actions.TREES` [R, samples,
        233].
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = [(setting, draft_setting(setting, config)) for setting in settings]
    parts: list[dict[str, list | Tensor]] = []
    for prompt, trajectory in zip(prompts, trajectories, strict=True):
        roots = root_positions(prompt.tokens, trajectory, config.stride)
        if roots:  # else the target ended its text at once
            named = {
                name: [value] * len(roots)
                for name, value in zip(NAMES, (prompt.id, prompt.kind, prompt.split), strict=True)
            }
            tables = _trace(target, draft, trajectory, roots, pairs, config, micro_batch, generator)
            parts += [named | columns for columns in tables]
    columns = {name: [part[name] for part in parts] for name in (parts[0] if parts else ())}
    return {
        name: list(chain(*each)) if name in NAMES else torch.cat(cast("list[Tensor]", each))
        for name, each in columns.items()
    }


@torch.inference_mode()
def _trace(
    target, draft, trajectory, positions, pairs, config, micro_batch, generator
) -> list[dict[str, Tensor]]:
    """Compute one trajectory's columns of numbers for each pair of target's and draft's setting."""
    tokens, positions = (
        torch.tensor(each, device=target.device) for each in (trajectory, positions)
    )
    layout = super_tree_layout()
    chunk = chunk_rows(target.vocab_size, layout)
    p_prefix = Prefix(target, tokens)
    q_prefix = draft_prefix(draft, p_prefix)
    roots = positions.repeat_interleave(config.samples)
    uniforms = torch.rand(len(roots), len(layout), generator=generator, dtype=torch.float64)

    def labelled(part: slice) -> list[dict[str, Tensor]]:
        trees = super_trees(
            p_prefix, q_prefix, roots[part], layout, pairs[0][1], uniforms[part], chunk
        )
        return labels(trees, target, draft, pairs, config.verifiers, layout, chunk)

    batches = micro_batch.run(len(roots), labelled)
    h_p, h_q, h_root = (
        p_prefix.hidden[positions - 1],
        q_prefix.hidden[positions - 1],
        q_prefix.hidden[positions],
    )
    tables = []
    for i, (p_setting, q_setting) in enumerate(pairs):
        p_look, q_look = feature_setting(p_setting), feature_setting(q_setting)
        scalars = [
            scalar_features(
                warp(target.logits(a), p_look), *(warp(draft.logits(h), q_look) for h in (b, c))
            )
            for a, b, c in zip(h_p.split(chunk), h_q.split(chunk), h_root.split(chunk), strict=True)
        ]
        columns = {
            name: torch.full((len(positions),), getattr(p_setting, name))
            for name in ("temperature", "top_p")
        }
        columns |= {
            "context": positions + 1,
            "h_p_previous": h_p,
            "h_q_previous": h_q,
            "h_q_root": h_root,
        }
        columns |= zip(SCALARS, torch.cat(scalars).unbind(-1), strict=True)
        for name in config.verifiers:
            columns[name] = torch.cat([batch[i][name] for batch in batches]).view(
                len(positions), config.samples, -1
            )
        tables.append(
            {
                name: x.float().cpu() if x.is_floating_point() else x.cpu()
                for name, x in columns.items()
            }
        )
    return tables
