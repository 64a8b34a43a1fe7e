"""Verification of many sequences' trees at once, for engines that decode in batches."""

from typing import NamedTuple

import torch
from torch import Tensor

from nde_talf.decoding.device_tree import path_of
from nde_talf.decoding.rules.batch import Rows, Trees
from nde_talf.decoding.sampling import Rng, SamplingSetting, warp
from nde_talf.decoding.verifier import Verifier


class Verified(NamedTuple):
    """Verdicts of `verify_batch` on B trees.

    Attributes:
        end: [B]. The last accepted node, 0 for the root.
        token: [B]. The token after it; -1 where a distribution had no positive, finite sum.
        tokens: [B, depth + 1]. The accepted tokens, then `token`, then -1.
        length: [B]. How many of `tokens` count: tau + 1.
    """

    end: Tensor
    token: Tensor
    tokens: Tensor
    length: Tensor


def verify_batch(
    verifier: Verifier,
    tokens: Tensor,
    parents: Tensor,
    p: Tensor | Rows,
    q: Tensor | Rows,
    rng: Rng,
    left: Tensor | None = None,
    sizes: tuple[int, int] | None = None,
) -> Verified:
    """Verify B trees of different shapes, padded to N nodes.

    Nothing is read back from the device if `sizes` are given. Every tree's output has the target's
    law, as with the verifier on one tree.

    For example two trees, a path of two tokens and a root with three draws, of which one repeats
    another:

        verify_batch(
            verifier("specinfer"),
            tokens=torch.tensor([[5, 8, 2, 0], [7, 1, 4, 1]]),
            parents=torch.tensor([[-1, 0, 1, -2], [-1, 0, 0, 0]]),
            p=rows_of(target_logits, setting),
            q=rows_of(draft_logits, draft_setting),
            rng=Rng.seeded(0),
        )

    Args:
        verifier: of `nde_talf.decoding.verifier.verifier(name)`, fitting to how the children were
            drawn.
        tokens: [B, N] token ids; node 0 is the root, the last committed token.
        parents: [B, N]; parents precede their children, the root has -1, padding -2. Siblings are
            in draft order. A token that was drawn again is another node, which may have children
            too.
        p: the target's distributions [B, N, V], or a function that gives the rows [B, V] at one
            node [B] of each tree (`rows_of`). Top-down rules ask for depth + 1 rows of each tree,
            bottom-up rules for one a draw.
        q: the draft's, in the same form. They are asked for at nodes with children only.
        rng: the random numbers of all trees.
        left: [B, N] float64, for draws without replacement the mass of q that each was drawn from.
        sizes: the largest depth of a node, and the largest number of draws at one. None: read from
            `parents`, which waits for the device.

    Raises:
        ValueError: shapes that do not fit; without sizes also parents that do not precede their
            children.
    """
    shapes = {tuple(x.shape) for x in (tokens, parents, left) if x is not None}
    shapes |= {tuple(x.shape[:-1]) for x in (p, q) if isinstance(x, Tensor)}
    if len(shapes) > 1 or tokens.dim() != 2:
        raise ValueError(
            f"tokens, parents, left, p, q: their shapes begin with {sorted(shapes)}; expected one"
            " [B, N]."
        )
    if verifier.on_device is None:
        raise ValueError(f"verifier={verifier.name} verifies one tree at a time, on the host.")
    depth, max_draws = sizes or _sizes(parents)
    tokens = torch.where(parents >= -1, tokens, 0)  # padding may hold any number
    trees = Trees(tokens, parents, _rows(p), _rows(q), depth, max_draws, left)
    for _ in range(depth):  # what hangs from a repeated draw hangs from its first
        first = trees.first().gather(1, trees.parents.clamp(min=0))
        trees.parents = torch.where(trees.parents >= 0, first, trees.parents)
    end, token = verifier.on_device(trees, rng)
    _, tokens, tau = path_of(trees.tokens, trees.ancestors(), depth, end, token)
    place = torch.arange(tokens.shape[1], device=tokens.device)
    tokens = torch.where(place < tau[:, None], tokens, -1)
    tokens = torch.where(place == tau[:, None], token[:, None], tokens)
    return Verified(end, token, tokens, tau + 1)


def rows_of(logits: Tensor | Rows, setting: SamplingSetting) -> Rows:
    """Return a function that makes rows of warp(logits) when they are asked for.

    So [B, N, V] probabilities are never held. logits: [B, N, V], or a function of nodes [B] that
    gives [B, V].
    """
    rows = _rows(logits)
    return lambda at: warp(rows(at), setting)


def _rows(rows: Tensor | Rows) -> Rows:
    if not isinstance(rows, Tensor):
        return rows
    every = torch.arange(len(rows), device=rows.device)
    return lambda at: rows[every, at]


def _sizes(parents: Tensor) -> tuple[int, int]:
    """Return the largest depth, and the most draws at a node and its repeats together."""
    deepest, most = 0, 0
    for tree, line in enumerate(parents.tolist()):
        depth: list[int] = []
        for node, parent in enumerate(line):
            if not (parent == -1 if node == 0 else parent == -2 or 0 <= parent < node):
                raise ValueError(
                    f"parents: node {node} of tree {tree} has parent {parent}; parents precede"
                    " their children."
                )
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        deepest = max(deepest, *depth)
        most = max(most, *(depth.count(level) for level in range(1, len(line) + 1)))
    return deepest, most
