"""Super-trees, drawn and run through both models at many roots at once, and their labels.

Both models run over the trajectory once. All super-trees of a micro-batch share that cache, and
each sees the prefix up to its own root through the mask. The target takes one pass for all inner
rows, the draft one pass a level. Only hidden states are stored; distributions are computed from
them, a chunk at a time.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nde_talf.decoding.models.cache import KVCache
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.rules.labels.branching import Bundle
from nde_talf.decoding.rules.labels.pooling import branch_gains, pooled, trunk_reach
from nde_talf.decoding.sampling.device_rng import inverse_cdf
from nde_talf.decoding.sampling.rng import SamplingSetting, warp
from nde_talf.decoding.super_tree import SuperTreeLayout


class Draft(Protocol):
    """A drafter of super-trees that is no `CausalModel`: a draft head."""

    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device

    def prefix(self, target: "Prefix") -> "Prefix":
        """Run the trajectory of `target` inside the draft."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Read hidden states [..., H] out: [..., V]."""


class SuperTrees(NamedTuple):
    """A micro-batch of T super-trees.

    Attributes:
        tokens: [T, N], in the layout's order of rows, the root first.
        h_p: the target's hidden states at the inner rows [T, N_inner, H_p].
        h_q: the draft's hidden states at the inner rows [T, N_inner, H_q].
    """

    tokens: Tensor
    h_p: Tensor
    h_q: Tensor


class Prefix:
    """A trajectory inside one model: hidden states [L, H] at all its tokens, and the cache.

    Attributes:
        slots: of the cache that the trajectory takes; the token at position i is in slot i, or in
            slot i - (L - slots).
    """

    def __init__(self, model: CausalModel, tokens: Tensor):
        self.model, self.slots, self.tokens = model, len(tokens), tokens.to(model.device)
        if model.form == "masks":
            self.cache = KVCache()
            positions = torch.arange(len(tokens), device=model.device)[None]
            self.hidden = model.hidden(self.tokens[None], positions, None, self.cache)[0]
        else:
            self.hidden = model.session().append(self.tokens.tolist())
            self._session: Any = model.session()  # of the text before the last root

    def rows(self, roots: Tensor, layout: SuperTreeLayout) -> "SuperTreeRows | BranchRows":
        """Begin super-trees at the positions `roots` [T]."""
        if self.model.form == "masks":
            return SuperTreeRows(self, roots, layout)
        text, session = self.tokens.tolist(), self._session
        return BranchRows([session.at(text, root) for root in roots.tolist()], layout)


def draft_prefix(draft: CausalModel | Draft, target: Prefix) -> Prefix:
    """Run the trajectory of `target` inside the draft."""
    return Prefix(draft, target.tokens) if isinstance(draft, CausalModel) else draft.prefix(target)


def _copies(cache: KVCache, count: int, length: int) -> KVCache:
    """Copy the first `length` slots of a cache of one sequence, `count` times, into a new cache."""
    copied = KVCache()
    for index, layer in enumerate(cache.layers):
        keys, values = (
            x[:, :, :length].expand(count, -1, -1, -1) for x in (layer.keys, layer.values)
        )
        copied.update(keys, values, index)
    if cache.positions is not None:
        copied.positions = cache.positions[:, :length].expand(count, -1)
    return copied


class SuperTreeRows:
    """A micro-batch of super-trees inside one model, which runs their rows in order."""

    def __init__(self, prefix: Prefix, roots: Tensor, layout: SuperTreeLayout):
        self.model, self.layout = prefix.model, layout
        self.roots = roots - (len(prefix.tokens) - prefix.slots)
        self.cache = _copies(prefix.cache, len(roots), prefix.slots)
        blocked = torch.finfo(self.model.dtype).min
        columns = torch.arange(prefix.slots, device=self.model.device)
        # The root is a row of the tree: the prefix that a tree sees ends before it.
        self._prefix = torch.where(columns < self.roots[:, None], 0.0, blocked).to(self.model.dtype)
        self._tree = torch.where(layout.ancestors, 0.0, blocked).to(
            self.model.device, self.model.dtype
        )
        self._count = 0

    def run(self, tokens: Tensor, above: Tensor | None = None) -> Tensor:
        """Run the next n rows: hidden states [T, n, H].

        Args:
            tokens: [T, n].
            above: the hidden states [T, n, H] of the rows' parents, for a draft whose rows take
                them; None at the root.
        """
        return self.model.hidden(*self._place(tokens), self.cache)

    def _place(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, positions and mask of the next rows."""
        n = tokens.shape[1]
        rows = slice(self._count, self._count + n)
        trees = self._tree[rows, : rows.stop].expand(len(tokens), n, rows.stop)
        mask = torch.cat([self._prefix[:, None].expand(-1, n, -1), trees], -1)[:, None]
        positions = self.roots[:, None] + self.layout.depth[rows].to(self.model.device)
        self._count = rows.stop
        return tokens, positions, mask


class BranchRows:
    """A micro-batch of super-trees of a model that scores them branch by branch, one after another.

    Run as `SuperTreeRows` is.
    """

    def __init__(self, sessions: list[Any], layout: SuperTreeLayout):
        self.sessions, self._parents, self._count = sessions, layout.parents.tolist(), 0

    def run(self, tokens: Tensor, above: Tensor | None = None) -> Tensor:
        """See `SuperTreeRows.run`."""
        parents = self._parents[self._count : self._count + tokens.shape[1]]
        self._count += len(parents)
        pairs = zip(self.sessions, tokens.tolist(), strict=True)
        return torch.stack([session.grow(rows, parents) for session, rows in pairs])


@torch.inference_mode()
def super_trees(
    target: Prefix,
    draft: Prefix,
    roots: Tensor,
    layout: SuperTreeLayout,
    setting: SamplingSetting,
    uniforms: Tensor,
    chunk: int,
) -> SuperTrees:
    """Draw super-trees from the draft, and run the target along them.

    Args:
        target: the trajectory inside the target.
        draft: the trajectory inside the draft.
        roots: positions of the roots [T].
        layout: of the trees.
        setting: of the draft.
        uniforms: [T, N] in [0, 1), which decide the draws by inverse cdf.
        chunk: rows of [V] numbers in memory at once.
    """
    model, rows, uniforms = draft.model, draft.rows(roots, layout), uniforms.to(draft.model.device)
    tokens = torch.empty(len(roots), len(layout), dtype=torch.long, device=model.device)
    hidden = torch.empty(
        len(roots), layout.inner, model.hidden_size, device=model.device, dtype=model.dtype
    )
    tokens[:, 0] = draft.tokens[roots]
    # Groups of rows whose parents are all in earlier groups: the root, each trunk token, each level
    # of branches.
    groups = [slice(row, row + 1) for row in range(layout.l1 + 1)]
    groups += [
        slice(int(level[0]), int(level[-1]) + 1)
        for level in layout.paths.permute(2, 0, 1).flatten(1)
    ]
    for group in groups:
        above = None
        if group.start:
            parents = layout.parents[group].to(model.device)
            above = hidden[:, parents]
            # Each parent has equally many children.
            states = hidden[:, parents.unique_consecutive()].flatten(0, 1)
            levels = uniforms[:, group].reshape(len(states), -1)
            parts = zip(states.split(chunk), levels.split(chunk), strict=True)
            drawn = [inverse_cdf(warp(model.logits(some), setting), u) for some, u in parts]
            tokens[:, group] = torch.cat(drawn).view(len(roots), -1)
        if group.start < layout.inner:
            hidden[:, group] = rows.run(tokens[:, group], above)
    return SuperTrees(tokens, target.rows(roots, layout).run(tokens[:, : layout.inner]), hidden)


@torch.inference_mode()
def labels(
    trees: SuperTrees,
    target: CausalModel,
    draft: CausalModel | Draft,
    setting: SamplingSetting,
    verifiers: list[str],
    layout: SuperTreeLayout,
    chunk: int,
) -> dict[str, Tensor]:
    """Estimate E[tau + 1] [T, A] by verifier, in float32.

    Below a drafted end of the text nothing is accepted, as no decoder counts it: the target's row
    there is all on a token that the draft holds least likely. What remains is the token after an
    accepted end, which counts here and not in a decoder: at most one, in the last step of a text.

    Args:
        trees: with the hidden states of both models.
        target: reads its states out.
        draft: reads its states out.
        setting: of both models.
        verifiers: names of rules.
        layout: of the trees.
        chunk: rows of distributions at a time, at least a tree's.
    """
    device, l1, paths = trees.tokens.device, layout.l1, layout.paths.to(trees.tokens.device)
    ends = torch.tensor(sorted(target.ends), dtype=torch.long, device=device)

    def together(tokens: Tensor, h_p: Tensor, h_q: Tensor) -> dict[str, Tensor]:
        count = len(tokens)
        # A row's draws: on the trunk the next token, below a branch point the K paths' tokens.
        trunk = tokens[:, 1 : l1 + 1].flatten()[:, None, None]
        steps = torch.arange(len(trunk), device=device)[:, None, None]
        first = layout.inner * torch.arange(count, device=device)[:, None, None, None]
        nodes = (layout.parents.to(device)[paths] + first).flatten(0, 1)
        p_logits = target.logits(h_p.flatten(0, 1)).float()
        q_logits = draft.logits(h_q.flatten(0, 1)).float()
        ended = torch.isin(tokens[:, : layout.inner], ends)
        ended[:, 0] = False  # a root does not end the text
        ended = ended.flatten()
        p_logits[ended] = -torch.inf
        p_logits[ended, q_logits[ended].argmin(-1)] = 0.0
        laws = warp(p_logits, setting), warp(q_logits, setting)
        p, q = (law.view(count, layout.inner, -1)[:, :l1].flatten(0, 1) for law in laws)
        trunks = Bundle(p, q, trunk, steps)
        branches = Bundle(*laws, tokens[:, paths].flatten(0, 1), nodes)
        estimates = {}
        for rule in verifiers:
            reach, alone = trunk_reach(trunks, count, rule)
            gains = branch_gains(branches, reach.flatten(), rule)
            estimates[rule] = pooled(reach, alone, gains, layout).float()
        return estimates

    chunks = zip(*(part.split(max(1, chunk // layout.inner)) for part in trees), strict=True)
    parts = [together(*some) for some in chunks]
    return {name: torch.cat([part[name] for part in parts]) for name in verifiers}
