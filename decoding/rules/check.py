"""Is this a distribution, is this a draft tree? ValueError says what is wrong.

The decode loop calls `check_policys_tree` for every tree that a policy drafts on the host. So a
policy that breaks its promise gets an error instead of a wrong output law. Trees on a device are
not checked.
"""

import math
from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.tree import DraftTree

TOLERANCE = 1e-3
"""Of the sum of a distribution."""


def check_rows(name: str, rows: Tensor, nodes: list[int] | None = None) -> None:
    """Raise ValueError unless `rows` [n, V] are finite, not negative and sum to 1.

    nodes: numbers of the nodes that the rows belong to, where these are not 0, 1, ...
    """
    for at, (mass, least) in enumerate(
        zip(rows.sum(-1).tolist(), rows.amin(-1).tolist(), strict=True)
    ):
        if abs(mass - 1) <= TOLERANCE and least >= 0:  # neither is true of NaN
            continue
        wrong = "holds negative values" if least < 0 else "does not sum to 1"
        if not math.isfinite(mass):
            wrong = "holds NaN or infinite values"
        node = nodes[at] if nodes else at
        raise ValueError(f"{name}: node {node} {wrong} (sum {mass:.6g}, smallest {least:.6g}).")


def check_pair_of_rows(p: Tensor, q: Tensor) -> None:
    """Raise ValueError unless p and q are distributions [n, V] of the same shape."""
    if p.shape != q.shape or p.dim() != 2 or not p.shape[1]:
        raise ValueError(
            f"q: its shape is {tuple(q.shape)}, but p has {tuple(p.shape)}; they need the same"
            " nodes and vocabulary."
        )
    check_rows("p", p)
    check_rows("q", q)


def check_tree(tree: DraftTree) -> None:
    """Raise ValueError for a tree that no verifier can walk, naming the node."""
    if len(tree.p) != len(tree):
        raise ValueError(
            f"tree.p: it has {len(tree.p)} rows for {len(tree)} nodes; give p at every node."
        )
    vocabulary = len(tree.p[0])
    check_topology(tree, vocabulary)
    _check_nodes("tree.p", {node: tree.p[node] for node in range(len(tree))}, vocabulary)
    check_draws(tree, vocabulary)


def check_topology(tree: DraftTree, vocabulary: int) -> list[int]:
    """Return the depth of every node. Looks at no distribution.

    Raises ValueError, naming the node, unless tokens lie in the vocabulary, parents come before
    their children, and every node below the root is a child of its parent.
    """
    count = len(tree)
    if any(len(x) != count for x in (tree.parents, tree.depth, tree.children, tree.left, tree.q)):
        raise ValueError(
            f"tree: it has {count} tokens, and parents, depth, children, left or q for another"
            " number of nodes."
        )
    for node, token in enumerate(tree.tokens):
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"tree.tokens: node {node} is token {token}, outside the vocabulary of"
                f" {vocabulary}."
            )
    depth = [0] * count
    for node, parent in enumerate(tree.parents):
        if 0 <= parent < node:
            depth[node] = depth[parent] + 1
        elif node or parent != -1:
            raise ValueError(
                f"tree.parents: node {node} has parent {parent}; parents precede children, the root"
                " has -1."
            )
    _check_children(tree)
    return depth


def _check_children(tree: DraftTree) -> None:
    parents, missing = tree.parents, set(range(1, len(tree)))
    for node, children in enumerate(tree.children):
        for child in children:
            if not 0 < child < len(parents) or parents[child] != node:
                raise ValueError(
                    f"tree.children: node {node} lists {child}, which is not its child."
                )
        missing.difference_update(children)
    if missing:
        node = min(missing)
        raise ValueError(
            f"tree.children: node {node} is missing from those of its parent, node {parents[node]}."
        )
    for node, (children, masses) in enumerate(zip(tree.children, tree.left, strict=True)):
        if len(masses) != len(children):
            raise ValueError(
                f"tree.left: node {node} has {len(masses)} masses for {len(children)} children."
            )


def check_draws(tree: DraftTree, vocabulary: int, drawn: bool = True) -> None:
    """Raise ValueError, naming the node, unless children can have been drawn at their parents.

    A node with children needs a distribution q [V], with mass at every child.

    drawn: False for children that were picked: they need no mass, their parent no q.
    """
    rows: dict[int, Tensor] = {}
    for node, children in enumerate(tree.children):
        row = tree.q[node]
        if children and row is not None:
            rows[node] = row
        elif children and drawn:
            raise ValueError(
                f"tree.q: node {node} has children, but no distribution that they were drawn from."
            )
    _check_nodes("tree.q", rows, vocabulary)
    for node, row in rows.items() if drawn else ():
        tokens = [tree.tokens[child] for child in tree.children[node]]
        for token, mass in zip(tokens, row[tokens].tolist(), strict=True):
            if not mass > 0:
                raise ValueError(
                    f"tree.q: node {node} cannot have drawn token {token}: it has no mass there."
                )


def _check_nodes(name: str, rows: dict[int, Tensor], vocabulary: int) -> None:
    """Raise ValueError unless the rows [V] of these nodes are distributions."""
    for node, row in rows.items():
        if row.shape != (vocabulary,):
            raise ValueError(
                f"{name}: node {node} has shape {tuple(row.shape)}; expected [{vocabulary}]."
            )
    if rows:
        check_rows(name, torch.stack(list(rows.values())), list(rows))


def _check_none(tree: DraftTree, depth: list[int]) -> None:
    if len(tree) > 1:
        raise ValueError("tree: node 1 was drafted, and trees of kind 'none' have the root alone.")


def _check_path(tree: DraftTree, depth: list[int]) -> None:
    for node, children in enumerate(tree.children):
        if len(children) > 1:
            raise ValueError(
                f"tree.children: node {node} has {len(children)} draws; one of kind 'path' has one,"
                " or none."
            )


def _check_distinct(tree: DraftTree, depth: list[int]) -> None:
    for node, children in enumerate(tree.children):
        if len({tree.tokens[child] for child in children}) < len(children):
            raise ValueError(
                f"tree.children: node {node} drew a token twice; children of kind"
                " 'without_replacement' differ."
            )


def _check_delayed(tree: DraftTree, depth: list[int]) -> None:
    """Check for a trunk, then paths of one length.

    A draw again is one node, through which so many paths go.
    """
    paths, branch, deepest = [1] + [0] * (len(tree) - 1), None, max(depth)
    for node, children in enumerate(tree.children):
        for child in children:
            paths[child] += 1
        if not children and depth[node] < deepest:
            raise ValueError(
                f"tree: node {node} ends {depth[node]} deep and another path {deepest}; those of"
                " kind 'delayed' are of one length."
            )
        if children and len(children) != paths[node]:
            if branch is not None or paths[node] > 1:
                raise ValueError(
                    f"tree.children: node {node} has {len(children)} draws and {paths[node]} paths"
                    " go through it; a tree of kind 'delayed' branches at one node alone."
                )
            branch = node


_KINDS = {
    "none": _check_none,
    "path": _check_path,
    "delayed": _check_delayed,
    "without_replacement": _check_distinct,
}


def check_policys_tree(policy: Any, tree: DraftTree, state: Any, vocabulary: int) -> None:
    """Raise UserError for a tree that a policy should not have drafted at `state`.

    The topology is checked, the root, the room that is left, and what the kind of tree
    (`TreePolicy.trees`) promises; of a sequence's first tree the distributions too.
    """
    try:
        depth = check_topology(tree, vocabulary)
        if policy.trees in _KINDS:
            _KINDS[policy.trees](tree, depth)
        if tree.tokens[0] != state.root:
            raise ValueError(
                f"tree.tokens: node 0 is token {tree.tokens[0]}; the root is the last committed"
                f" token, {state.root}."
            )
        if max(depth) > state.room:
            raise ValueError(
                f"tree: node {depth.index(max(depth))} lies {max(depth)} deep, and the context has"
                f" room for {state.room}."
            )
        if state.tau is None:
            check_draws(tree, vocabulary, drawn=policy.trees != "top_k")
    except ValueError as error:
        raise UserError(
            f"policy {type(policy).__name__} drafted a tree of kind '{policy.trees}' that no"
            f" verifier can take: {error} See docs/write_a_policy.md."
        ) from error
