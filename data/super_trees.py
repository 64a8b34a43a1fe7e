"""Drawing super-trees from the draft and scoring them with the target, for many roots of one trajectory at once.

Both models run the trajectory once; its cache is then shared by all super-trees of a micro-batch, each seeing the prefix
up to its own root through the mask. The target takes one pass for all inner rows, the draft one a level.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.cache import SlotCache
from decoding.model import CausalModel
from decoding.sampling import SamplingSetting, warp
from decoding.super_tree import SuperTreeLayout


class Scored(NamedTuple):
    """A micro-batch of T super-trees: roots [T] (index into the trajectory's roots), tokens [T, N], and p, q
    [T, N_inner, V]."""

    roots: Tensor
    tokens: Tensor
    p: Tensor
    q: Tensor


class Prefix:
    """A trajectory inside one model: hidden states [L, H] at every position and the cache behind them."""

    def __init__(self, model: CausalModel, tokens: Tensor):
        self.model, self.cache, self.length = model, SlotCache(), len(tokens)
        positions = torch.arange(len(tokens), device=model.device)[None]
        self.hidden = model.hidden(tokens.to(model.device)[None], positions, None, self.cache)[0]

    def branch(self, copies: int) -> SlotCache:
        """An independent cache holding the prefix `copies` times."""
        branched = SlotCache()
        for index, layer in enumerate(self.cache.layers):
            keys, values = (x[:, :, : self.length].expand(copies, -1, -1, -1) for x in (layer.keys, layer.values))
            branched.update(keys, values, index)
        return branched


class SuperTreeRows:
    """A micro-batch of super-trees inside one model: runs layout rows, in order, for all of them."""

    def __init__(self, prefix: Prefix, roots: Tensor, layout: SuperTreeLayout):
        self.model, self.roots, self.layout = prefix.model, roots, layout
        self.cache = prefix.branch(len(roots))
        blocked = torch.finfo(self.model.dtype).min
        columns = torch.arange(prefix.length, device=self.model.device)
        # The root is a row of the tree: the prefix that a tree sees ends before it.
        self._prefix = torch.where(columns < roots[:, None], 0.0, blocked).to(self.model.dtype)
        self._tree = torch.where(layout.ancestors, 0.0, blocked).to(self.model.device, self.model.dtype)
        self.rows = 0

    def run(self, tokens: Tensor) -> Tensor:
        """Hidden states [T, n, H] of the next n rows, whose tokens are given [T, n]."""
        n = tokens.shape[1]
        rows = slice(self.rows, self.rows + n)
        trees = self._tree[rows, : rows.stop].expand(len(tokens), n, rows.stop)
        mask = torch.cat([self._prefix[:, None].expand(-1, n, -1), trees], -1)[:, None]
        positions = self.roots[:, None] + self.layout.depth[rows].to(self.model.device)
        self.rows = rows.stop
        return self.model.hidden(tokens, positions, mask, self.cache)


def draw_super_trees(
    draft: Prefix, root_tokens: Tensor, roots: Tensor, layout: SuperTreeLayout, setting: SamplingSetting, generator
) -> tuple[Tensor, Tensor]:
    """Draw a super-tree at each of `roots` [T] (positions) from the draft: tokens [T, N] and q [T, N_inner, V]."""
    rows = SuperTreeRows(draft, roots, layout)
    count, model = len(roots), draft.model
    tokens = torch.empty(count, len(layout), dtype=torch.long, device=model.device)
    q = torch.empty(count, layout.inner, model.vocab_size, device=model.device)
    tokens[:, 0] = root_tokens
    # Groups of rows whose parents are all in earlier groups: the root, each trunk token, each level of branches.
    groups = [range(row, row + 1) for row in range(layout.l1 + 1)]
    groups += [range(int(level[0]), int(level[-1]) + 1) for level in layout.paths.permute(2, 0, 1).flatten(1)]
    for group in groups:
        span = slice(group.start, group.stop)
        if group.start:
            parents = layout.parents[span].to(model.device)
            tokens[:, span] = draw_rows(q[:, parents], generator)
        if group.start < layout.inner:
            q[:, span] = warp(model.logits(rows.run(tokens[:, span])), setting)
    return tokens, q


def draw_rows(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One index [...] from each row of `weights` [..., V], by inverse cdf; never one of weight 0."""
    cdf = weights.cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(cdf.shape[:-1], generator=generator, dtype=torch.float64).to(cdf.device)
    index = torch.searchsorted(cdf, (uniform * cdf[..., -1])[..., None], right=True)[..., 0]
    return index.clamp_(max=cdf.shape[-1] - 1)


@torch.inference_mode()
def scored_super_trees(
    target: Prefix,
    draft: Prefix,
    trajectory: Tensor,
    positions: Tensor,
    samples: int,
    layout: SuperTreeLayout,
    setting: SamplingSetting,
    draft_setting: SamplingSetting,
    micro_batch: int,
    generator: torch.Generator,
) -> Iterator[Scored]:
    """`samples` super-trees at each root position [R] of the trajectory [L], `micro_batch` trees at a time."""
    index = torch.arange(len(positions)).repeat_interleave(samples)
    for chosen in index.split(micro_batch):
        roots = positions[chosen]
        tokens, q = draw_super_trees(draft, trajectory[roots], roots, layout, draft_setting, generator)
        hidden = SuperTreeRows(target, roots, layout).run(tokens[:, : layout.inner])
        yield Scored(chosen, tokens, warp(target.model.logits(hidden), setting), q)
