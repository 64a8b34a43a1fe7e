"""Is this a distribution, is this a draft tree? For input that was not made by this package; ValueError says what is wrong.

The decode loop does not call it: its rows come from a softmax and its trees from `DraftTree.add`.
"""

import torch
from torch import Tensor

from decoding.tree import DraftTree


def check_rows(name: str, rows: Tensor, tolerance: float = 1e-3) -> None:
    """Raise ValueError unless `rows` [..., V] are distributions: finite, not negative, summing to 1 within `tolerance`."""
    if rows.dim() < 1 or rows.shape[-1] < 1:
        raise ValueError(f"{name}: its shape is {tuple(rows.shape)}; expected [..., V] with V >= 1.")
    flat = rows.reshape(-1, rows.shape[-1])
    sums, lowest = flat.sum(-1), flat.amin(-1)
    for wrong, what in (
        (~torch.isfinite(sums), "holds NaN or infinite values"),
        (lowest < 0, "holds negative values"),
        ((sums - 1).abs() > tolerance, "does not sum to 1"),
    ):
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            where = f"node {row}" if rows.dim() > 1 else "the distribution"
            raise ValueError(f"{name}: {where} {what} (sum {float(sums[row]):.6g}, smallest {float(lowest[row]):.6g}).")


def check_pair_of_rows(p: Tensor, q: Tensor) -> None:
    """Raise ValueError unless p and q are distributions of the same shape."""
    if p.shape != q.shape:
        raise ValueError(
            f"q: its shape is {tuple(q.shape)}, but p has {tuple(p.shape)}; they need the same nodes and vocabulary."
        )
    check_rows("p", p)
    check_rows("q", q)


def check_tree(tree: DraftTree) -> None:
    """Raise ValueError for a tree that no verifier can walk, naming the node: parents behind their children, missing or wrong
    distributions, tokens outside the vocabulary, a drafted token without draft mass."""
    if tree.p is None or len(tree.p) != len(tree):
        rows = 0 if tree.p is None else len(tree.p)
        raise ValueError(f"tree.p: it has {rows} rows for {len(tree)} nodes; give p at every node.")
    vocabulary = len(tree.p[0])
    for node, parent in enumerate(tree.parents):
        if not (parent == -1 if node == 0 else 0 <= parent < node):
            raise ValueError(f"tree.parents: node {node} has parent {parent}; parents precede children, the root has -1.")
        if node and not 0 <= tree.tokens[node] < vocabulary:
            raise ValueError(f"tree.tokens: node {node} is token {tree.tokens[node]}, outside the vocabulary of {vocabulary}.")
    for node in range(len(tree)):
        for child in tree.children[node]:
            if not 0 < child < len(tree) or tree.parents[child] != node:
                raise ValueError(f"tree.children: node {node} lists {child}, which is not its child.")
        if len(tree.left[node]) != len(tree.children[node]):
            raise ValueError(
                f"tree.left: node {node} has {len(tree.left[node])} masses for {len(tree.children[node])} children."
            )
        _check_node("tree.p", node, tree.p[node], vocabulary)
        if tree.children[node]:
            if tree.q[node] is None:
                raise ValueError(f"tree.q: node {node} has children, but no distribution that they were drawn from.")
            _check_node("tree.q", node, tree.q[node], vocabulary)
            for child in tree.children[node]:
                if not float(tree.q[node][tree.tokens[child]]) > 0:
                    raise ValueError(f"tree.q: node {node} cannot have drawn token {tree.tokens[child]}: it has no mass there.")


def _check_node(name: str, node: int, row: Tensor, vocabulary: int) -> None:
    if row.shape != (vocabulary,):
        raise ValueError(f"{name}: node {node} has shape {tuple(row.shape)}; expected [{vocabulary}], as at the root.")
    try:
        check_rows(name, row)
    except ValueError as error:
        raise ValueError(str(error).replace("the distribution", f"node {node}")) from None
