"""Labels of a micro-batch of super-trees, never holding more than a chunk of next-token distributions.

Trunk and branch points are independent once the trunk's reach is known, so that only one branch point's rows have to be
there together.
"""

import torch
from torch import Tensor

from data.super_trees import SuperTrees
from decoding.model import CausalModel
from decoding.sampling import SamplingSetting, warp
from decoding.super_tree import SuperTreeLayout
from decoding.verification.bundles import Bundle
from decoding.verification.expected import branch_gains, pooled, trunk_reach

_NUMBERS = 1 << 26  # of one matrix of a chunk, when the number of rows is not given
# What one chunk takes at its peak, in float32 matrices: both models' logits, p, q, and temporaries.
MATRICES = 7


def chunk_rows(vocabulary: int, asked: int, layout: SuperTreeLayout) -> int:
    """Rows of [V] numbers in one chunk: as asked, or (asked = 0) 256 MB a matrix; enough for one branch point."""
    return asked or max(_NUMBERS // vocabulary, rows_together(layout))


def rows_together(layout: SuperTreeLayout) -> int:
    """Rows that have to be held together: a branch point and what hangs from it."""
    return 1 + layout.k * max(layout.l2 - 1, 0)


@torch.inference_mode()
def labels(
    trees: SuperTrees,
    target: CausalModel,
    draft: CausalModel,
    settings: list[tuple[SamplingSetting, SamplingSetting]],
    verifiers: list[str],
    layout: SuperTreeLayout,
    chunk: int,
) -> list[dict[str, Tensor]]:
    """For every (target's, draft's) sampling setting the estimates [T, A] of E[tau + 1] by verifier; float32.

    chunk: rows of distributions at a time, at least `rows_together(layout)`.
    """
    count, device, points = len(trees.tokens), trees.tokens.device, layout.l1 + 1

    def of_trunks(tree: Tensor) -> list[list[tuple[Tensor, Tensor]]]:
        """Reach and bare-trunk labels of these trees, by setting and verifier."""
        tokens, rows = trees.tokens[tree, 1:points], torch.arange(layout.l1, device=device).expand(len(tree), -1)
        nodes = torch.arange(tokens.numel(), device=device)[:, None, None]
        found = []
        for p, q in _distributions(trees, target, draft, settings, tree, rows):
            bundle = Bundle(p, q, tokens.flatten()[:, None, None], nodes)
            found.append([trunk_reach(bundle, len(tree), name) for name in verifiers])
        return found

    # A branch point's rows: its own and its branches' inner nodes. A draw's node among them: the branch point for the first
    # level, else the draw before it on its path.
    own = torch.cat([torch.arange(points)[:, None], layout.paths[:, :, :-1].flatten(1)], -1).to(device)
    below = max(layout.l2 - 1, 0)
    local = torch.arange(1, 1 + layout.k * below).view(layout.k, below)
    local = torch.cat([torch.zeros(layout.k, 1, dtype=torch.long), local], -1)[:, : layout.l2].to(device)
    paths = layout.paths.to(device)

    def of_branches(at: Tensor) -> list[list[Tensor]]:
        """Gains of these branch points (of all trees, one after the other), by setting and verifier."""
        tree, point = at // points, at % points
        tokens = trees.tokens[tree[:, None, None], paths[point]]
        nodes = torch.arange(len(at), device=device).view(-1, 1, 1) * own.shape[1] + local
        found = []
        for i, (p, q) in enumerate(_distributions(trees, target, draft, settings, tree, own[point])):
            bundle = Bundle(p, q, tokens, nodes)
            found.append([branch_gains(bundle, reach[i][j].flatten()[at], name) for j, name in enumerate(verifiers)])
        return found

    cases = [[(i, j) for j in range(len(verifiers))] for i in range(len(settings))]
    trunks = [of_trunks(tree) for tree in torch.arange(count, device=device).split(max(1, chunk // max(layout.l1, 1)))]
    reach = [[torch.cat([part[i][j][0] for part in trunks]) for i, j in row] for row in cases]
    bare = [[torch.cat([part[i][j][1] for part in trunks]) for i, j in row] for row in cases]
    every = torch.arange(count * points, device=device)
    branches = [of_branches(at) for at in every.split(max(1, chunk // rows_together(layout)))]
    return [
        {
            name: pooled(reach[i][j], bare[i][j], torch.cat([part[i][j] for part in branches]), layout).float()
            for j, name in enumerate(verifiers)
        }
        for i in range(len(settings))
    ]


def _distributions(trees, target, draft, settings, tree, rows):
    """p, q [n, V] at `rows` [B, m] of trees number `tree` [B], setting by setting."""
    p_logits = target.logits(trees.h_p[tree[:, None], rows].flatten(0, 1)).float()
    q_logits = draft.logits(trees.h_q[tree[:, None], rows].flatten(0, 1)).float()
    before, q = None, None
    for setting, draft_setting in settings:
        if draft_setting != before:
            before, q = draft_setting, warp(q_logits, draft_setting)
        yield warp(p_logits, setting), q
