"""Orders of a tree's nodes, and how many blocks of its attention mask are not empty (DySpec paper,
Appendix C).

A kernel that works block by block skips an empty one. Depth-first order puts a path's nodes next to
each other.
"""

from collections.abc import Sequence

import torch


def depth_first(parents: Sequence[int]) -> list[int]:
    """Nodes of a tree (parents[n] < n, -1 for the root) in depth-first order, a parent before its
    children and these in the order they have: order[i] is the node that comes i-th.
    """
    children = _children(parents)
    return _walk(children)


def heavy_first(parents: Sequence[int]) -> list[int]:
    """The same with the child of the largest subtree first (heavy path decomposition, to Appendix C
    near the best).
    """
    children, size = _children(parents), [1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        size[parents[node]] += size[node]
    return _walk([sorted(own, key=lambda child: -size[child]) for own in children])


def reordered(parents: Sequence[int], order: Sequence[int]) -> list[int]:
    """The parents once node order[i] is called i.

    Raises ValueError if a node would come before its parent.
    """
    place = {node: index for index, node in enumerate(order)}
    found = [place[parents[node]] if parents[node] >= 0 else -1 for node in order]
    if any(parent >= index for index, parent in enumerate(found)):
        raise ValueError("order: a node comes before its parent")
    return found


def nonzero_blocks(parents: Sequence[int], block: int) -> int:
    """How many block x block tiles of the tree's mask [N, N] hold an entry: row n sees its
    ancestors and itself.
    """
    tiles: list[set[int]] = []  # of each node: column tiles it sees
    found: set[tuple[int, int]] = set()
    for node, parent in enumerate(parents):
        own = {node // block} | (tiles[parent] if parent >= 0 else set())
        tiles.append(own)
        found |= {(node // block, tile) for tile in own}
    return len(found)


def random_trees(nodes: int, count: int) -> list[list[int]]:
    """Parents of random trees: every node's parent is one of those before it, all equally likely."""
    generator = torch.Generator().manual_seed(nodes)
    drawn = (torch.rand(count, nodes, generator=generator) * torch.arange(nodes)).int()
    return [[-1, *row[1:]] for row in drawn.tolist()]


def _children(parents: Sequence[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    return children


def _walk(children: list[list[int]]) -> list[int]:
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += reversed(children[node])
    return order
