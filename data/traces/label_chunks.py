"""Labels of a micro-batch of super-trees, never holding more than a chunk of next-token
distributions.

Branch points are independent given the trunk's reach, so that only the rows of one branch point
have to be in memory together.
"""

import torch
from torch import Tensor

from nde_talf.data.traces.super_trees import SuperTrees
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.names import ON_PATHS
from nde_talf.decoding.rules.bundles import Bundle
from nde_talf.decoding.rules.gains import branch_gains, of_first_path, pooled, trunk_reach
from nde_talf.decoding.sampling import SamplingSetting, warp
from nde_talf.decoding.super_tree import SuperTreeLayout

_NUMBERS = 1 << 26  # of one matrix of a chunk, when the number of rows is not given
# What one chunk takes at its peak, in float32 matrices: both models' logits, p, q, and temporaries.
MATRICES = 5


def chunk_rows(vocabulary: int, asked: int, layout: SuperTreeLayout) -> int:
    """Rows of [V] numbers in one chunk: as asked, or (asked = 0) 256 MB a matrix; enough for one
    branch point.
    """
    return asked or max(_NUMBERS // vocabulary, rows_together(layout))


def rows_together(layout: SuperTreeLayout) -> int:
    """Rows that have to be held together: a branch point and the inner rows below it."""
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
    """For every (target's, draft's) sampling setting the estimates [T, A] of E[tau + 1] by
    verifier; float32.

    chunk: rows of distributions at a time, at least `rows_together(layout)`.
    """
    count, device, points = len(trees.tokens), trees.tokens.device, layout.l1 + 1
    rules = list(dict.fromkeys(ON_PATHS.get(name, name) for name in verifiers))
    paths, (own, local) = layout.paths.to(device), (x.to(device) for x in _branch_rows(layout))

    def of_trunks(tree: Tensor) -> dict[tuple[int, str], Tensor]:
        """Reach and bare-trunk labels [2, T', L1 + 1] of these trees, by setting and verifier."""
        tokens, rows = (
            trees.tokens[tree, 1:points],
            torch.arange(layout.l1, device=device).expand(len(tree), -1),
        )
        nodes = torch.arange(tokens.numel(), device=device)[:, None, None]
        found = {}
        for i, (p, q) in enumerate(_distributions(trees, target, draft, settings, tree, rows)):
            bundle = Bundle(p, q, tokens.flatten()[:, None, None], nodes)
            found |= {
                (i, name): torch.stack(trunk_reach(bundle, len(tree), name)) for name in rules
            }
        return found

    def of_branches(at: Tensor) -> dict[tuple[int, str], Tensor]:
        """Gains of these branch points (numbered tree by tree), by setting and verifier."""
        tree, point = at // points, at % points
        tokens = trees.tokens[tree[:, None, None], paths[point]]
        nodes = torch.arange(len(at), device=device)[:, None, None] * own.shape[1] + local
        found = {}
        for i, (p, q) in enumerate(
            _distributions(trees, target, draft, settings, tree, own[point])
        ):
            bundle = Bundle(p, q, tokens, nodes)
            found |= {
                (i, name): branch_gains(bundle, trunks[i, name][0].flatten()[at], name)
                for name in rules
            }
        return found

    # Functions, so that a chunk's distributions are gone before the next one's are made.
    size = max(1, chunk // max(layout.l1, 1))
    parts = [of_trunks(tree) for tree in torch.arange(count, device=device).split(size)]
    trunks = {key: torch.cat([part[key] for part in parts], 1) for key in parts[0]}
    size = max(1, chunk // rows_together(layout))
    parts = [of_branches(at) for at in torch.arange(count * points, device=device).split(size)]
    gains = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    found = [
        {name: pooled(*trunks[i, name], gains[i, name], layout).float() for name in rules}
        for i in range(len(settings))
    ]
    return [
        {
            name: of_first_path(by_rule[ON_PATHS[name]]) if name in ON_PATHS else by_rule[name]
            for name in verifiers
        }
        for by_rule in found
    ]


def _branch_rows(layout: SuperTreeLayout) -> tuple[Tensor, Tensor]:
    """[points, 1 + K (L2 - 1)]: each branch point's row and its branches' inner rows; [K, L2]: at
    which of them each draw was drawn, the branch point for the first level, else the draw before it
    on its path.
    """
    own = torch.cat([torch.arange(layout.l1 + 1)[:, None], layout.paths[:, :, :-1].flatten(1)], -1)
    below = max(layout.l2 - 1, 0)
    inner = torch.arange(1, 1 + layout.k * below).view(layout.k, below)
    return own, torch.cat([torch.zeros(layout.k, 1, dtype=torch.long), inner], -1)[:, : layout.l2]


def _distributions(trees, target, draft, settings, tree, rows):
    """p, q [n, V] at `rows` [B, m] of trees number `tree` [B], setting by setting."""
    p_logits = target.logits(trees.h_p[tree[:, None], rows].flatten(0, 1)).float()
    q_logits = draft.logits(trees.h_q[tree[:, None], rows].flatten(0, 1)).float()
    before, q = None, None
    for setting, draft_setting in settings:
        if draft_setting != before:
            before, q = draft_setting, warp(q_logits, draft_setting)
        yield warp(p_logits, setting), q
