"""Stage traces: from trajectories to a table of roots, with their features and their labels.

Any engine may have sampled the trajectories; `worker` stores the tables.
"""

from itertools import chain
from typing import cast

import torch
from torch import Tensor

from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.settings import TracesConfig
from nde_talf.data.traces.super_trees import Draft, Prefix, draft_prefix, labels, super_trees
from nde_talf.data.traces.text_labels import DEPTH, TextRows, text_labels, text_rows
from nde_talf.decoding.common.micro_batch import MicroBatch
from nde_talf.decoding.features import SCALARS, scalar_features
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.sampling.rng import SamplingSetting, warp
from nde_talf.decoding.sampling.sampling_setting import feature_setting
from nde_talf.decoding.super_tree import super_tree_layout

NAMES = ("prompt_id", "kind", "split")
"""Columns that are text: of the prompt."""
STATES = ("h_p_previous", "h_q_previous", "h_q_root")
"""Columns that are hidden states."""
NUMBERS = 1 << 26
"""Numbers in one matrix of a chunk: 256 MB of float32. At its peak a chunk takes some five."""


@torch.inference_mode()
def trace_trajectories(
    target: CausalModel,
    draft: CausalModel | Draft,
    prompts: list[Prompt],
    trajectories: list[list[int]],
    setting: SamplingSetting,
    config: TracesConfig,
    micro_batch: MicroBatch,
    seed: int,
) -> dict[str, list | Tensor]:
    """Trace trajectories: a table with a row for each root.

    Args:
        target: scores.
        draft: drafts; a head comes as a `Draft`.
        prompts: [P].
        trajectories: [P]; each begins with its prompt's tokens.
        setting: the sampling setting of target and draft.
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
    parts: list[dict[str, list | Tensor]] = []
    for prompt, trajectory in zip(prompts, trajectories, strict=True):
        text = config.labels == "text" and prompt.split == "train"
        cut = text and len(trajectory) == len(prompt.tokens) + config.new_tokens
        # The first generated token, and one every stride after it.
        first, end = len(prompt.tokens), len(trajectory) - cut * DEPTH
        roots = list(range(first, end, config.distance(prompt.split)))
        if not roots:  # the target ended its text at once
            continue
        tokens, at = (torch.tensor(each, device=target.device) for each in (trajectory, roots))
        p = Prefix(target, tokens)
        where = p, draft_prefix(draft, p), at, setting
        if text:
            labelled = _from_text(*where, config.verifiers)
        else:
            labelled = _from_trees(*where, config, micro_batch, generator)
        named = zip(NAMES, (prompt.id, prompt.kind, prompt.split), strict=True)
        texts = {name: [value] * len(roots) for name, value in named}
        parts.append(texts | _table(*where, labelled))
    return _joined(parts)


def _joined(parts: list[dict[str, list | Tensor]]) -> dict[str, list | Tensor]:
    """Join the rows of tables; no columns without any."""
    columns = {name: [part[name] for part in parts] for name in (parts[0] if parts else ())}
    return {
        name: list(chain(*each)) if name in NAMES else torch.cat(cast("list[Tensor]", each))
        for name, each in columns.items()
    }


def _from_trees(
    p: Prefix,
    q: Prefix,
    at: Tensor,
    setting: SamplingSetting,
    config: TracesConfig,
    micro_batch: MicroBatch,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return labels [R, samples, 233] by rule from super-trees.

    Args:
        p: the trajectory inside the target.
        q: the trajectory inside the draft.
        at: positions of the roots [R].
        setting: the sampling setting.
        config: of the labels.
        micro_batch: super-trees in one pass.
        generator: of the draws.
    """
    layout, roots = super_tree_layout(), at.repeat_interleave(config.samples)
    chunk = NUMBERS // p.model.vocab_size
    uniforms = torch.rand(len(roots), len(layout), generator=generator, dtype=torch.float64)

    def labelled(part: slice) -> dict[str, Tensor]:
        trees = super_trees(p, q, roots[part], layout, setting, uniforms[part], chunk)
        return labels(trees, p.model, q.model, setting, config.verifiers, layout, chunk)

    parts, size = [*micro_batch.run(len(roots), labelled)], (len(at), config.samples, -1)
    return {name: torch.cat([part[name] for part in parts]).view(size) for name in parts[0]}


def _from_text(
    p: Prefix, q: Prefix, at: Tensor, setting: SamplingSetting, rules: list[str]
) -> dict[str, Tensor]:
    """Return labels [R, 1, 233] by rule from the text itself."""
    first = int(at[0])
    states = p.hidden, q.hidden, p.tokens.roll(-1)
    chunks = [x[first:].split(NUMBERS // p.model.vocab_size) for x in states]
    parts = [
        text_rows(
            warp(p.model.logits(h_p).float(), setting),
            warp(q.model.logits(h_q).float(), setting),
            following,
        )
        for h_p, h_q, following in zip(*chunks, strict=True)
    ]
    rows = TextRows(*map(torch.cat, zip(*parts, strict=True)))
    rows.given[-1], rows.ratio[-1] = 0, 0  # no token of the text follows
    estimates = text_labels(rows, at - first)
    return {name: estimates[name][:, None] for name in rules}


def _table(
    p: Prefix, q: Prefix, at: Tensor, setting: SamplingSetting, labelled: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the columns of numbers, labels included."""
    states = p.hidden[at - 1], q.hidden[at - 1], q.hidden[at]
    chunks = [x.split(NUMBERS // p.model.vocab_size) for x in states]
    look = feature_setting(setting)
    scalars = [
        scalar_features(
            warp(p.model.logits(a), look), *(warp(q.model.logits(h), look) for h in others)
        )
        for a, *others in zip(*chunks, strict=True)
    ]
    columns = {
        name: torch.full((len(at),), getattr(setting, name)) for name in ("temperature", "top_p")
    }
    columns["context"] = at + 1
    columns |= zip(STATES, states, strict=True)
    columns |= zip(SCALARS, torch.cat(scalars).unbind(-1), strict=True)
    return {
        name: x.float().cpu() if x.is_floating_point() else x.cpu()
        for name, x in (columns | labelled).items()
    }
