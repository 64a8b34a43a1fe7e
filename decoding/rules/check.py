"""Is this a distribution, is this a draft tree?

For input that was not made by this package; ValueError says what is wrong.

The decode loop calls `check_drafted` for every tree that a policy drafts on the host, and
`check_draws` for a sequence's first tree. So a policy that breaks its promise gets an error instead
of a wrong output law. Trees on a device are not checked.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.device import integers, upload
from nde_talf.decoding.tree import DraftTree

Listed = tuple[tuple[int, ...], ...]
"""The children of each node."""
_SMALL = 64
"""Shapes of trees of up to so many nodes are remembered."""


def check_rows(
    name: str, rows: Tensor, tolerance: float = 1e-3, names: list[int] | None = None
) -> None:
    """Raise ValueError unless `rows` [..., V] are distributions: finite, not negative, summing to 1
    within `tolerance`. names: the nodes that the rows belong to, where these are not 0, 1, ...
    """
    if rows.dim() < 1 or rows.shape[-1] < 1:
        raise ValueError(
            f"{name}: its shape is {tuple(rows.shape)}; expected [..., V] with V >= 1."
        )
    flat = rows.reshape(-1, rows.shape[-1])
    sums, lowest = flat.sum(-1), flat.amin(-1)
    if all(abs(found - 1) <= tolerance for found in sums.tolist()) and all(
        found >= 0 for found in lowest.tolist()
    ):
        return  # neither is true of NaN
    for wrong, what in (
        (~torch.isfinite(sums), "holds NaN or infinite values"),
        (lowest < 0, "holds negative values"),
        ((sums - 1).abs() > tolerance, "does not sum to 1"),
    ):
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            where = f"node {names[row] if names else row}" if rows.dim() > 1 else "the distribution"
            raise ValueError(
                f"{name}: {where} {what} (sum {float(sums[row]):.6g}, smallest"
                f" {float(lowest[row]):.6g})."
            )


def check_pair_of_rows(p: Tensor, q: Tensor) -> None:
    """Raise ValueError unless p and q are distributions of the same shape."""
    if p.shape != q.shape:
        raise ValueError(
            f"q: its shape is {tuple(q.shape)}, but p has {tuple(p.shape)}; they need the same"
            " nodes and vocabulary."
        )
    check_rows("p", p)
    check_rows("q", q)


def check_tree(tree: DraftTree) -> None:
    """Raise ValueError for a tree that no verifier can walk, naming the node: parents after their
    children, missing or wrong distributions, tokens outside the vocabulary, a drafted token without
    draft mass.
    """
    if tree.p is None or len(tree.p) != len(tree):
        rows = 0 if tree.p is None else len(tree.p)
        raise ValueError(f"tree.p: it has {rows} rows for {len(tree)} nodes; give p at every node.")
    vocabulary = len(tree.p[0])
    check_topology(tree, vocabulary)
    for node in range(len(tree)):
        _check_node("tree.p", node, tree.p[node], vocabulary)
    _check_left(tree)
    check_draws(tree, vocabulary)


def check_topology(tree: DraftTree, vocabulary: int, kind: str = "") -> list[int]:
    """The depth of every node.

    Raises ValueError, naming the node, unless tokens lie in the vocabulary, parents come before
    their children, every node below the root is a child of its parent, and the shape is one of
    `kind`. Looks at no distribution.
    """
    count = len(tree)
    if (
        not len(tree.parents)
        == len(tree.depth)
        == len(tree.children)
        == len(tree.left)
        == len(tree.q)
        == count
    ):
        raise ValueError(
            f"tree: it has {count} tokens, and parents, depth, children, left or q for another"
            " number of nodes."
        )
    drafted = tree.tokens[1:]
    if drafted and not 0 <= min(drafted) <= max(drafted) < vocabulary:
        node = next(node for node, token in enumerate(drafted, 1) if not 0 <= token < vocabulary)
        raise ValueError(
            f"tree.tokens: node {node} is token {tree.tokens[node]}, outside the vocabulary of"
            f" {vocabulary}."
        )
    shape = tuple(tree.parents), tuple(map(tuple, tree.children)), kind
    return _depths(*shape) if count <= _SMALL else _depths.__wrapped__(*shape)


@lru_cache(1024)
def _depths(parents: tuple[int, ...], listed: Listed, kind: str) -> list[int]:
    """The depth of every node of a tree with these parents and children.

    Raises ValueError for what no tree, or none of `kind`, looks like. Shapes come again and again:
    each is looked at once.
    """
    count, depth = len(parents), [0] * len(parents)
    for node, parent in enumerate(parents):
        if 0 <= parent < node:
            depth[node] = depth[parent] + 1
        elif node or parent != -1:
            raise ValueError(
                f"tree.parents: node {node} has parent {parent}; parents precede children, the root"
                " has -1."
            )
    seen = bytearray(count)
    for node, children in enumerate(listed):
        for child in children:
            if not 0 < child < count or parents[child] != node:
                raise ValueError(
                    f"tree.children: node {node} lists {child}, which is not its child."
                )
            seen[child] = 1
    if count > 1 and (missing := seen.find(0, 1)) > 0:
        raise ValueError(
            f"tree.children: node {missing} is missing from those of its parent, node"
            f" {parents[missing]}."
        )
    if kind in _KINDS:
        _KINDS[kind](listed, depth)
    return depth


def check_drafted(tree: DraftTree, kind: str, root: int, room: int, vocabulary: int) -> None:
    """Raise ValueError, naming the node, unless a policy of `kind` (`TreePolicy.trees`) may have
    drafted `tree` after the token `root`, with `room` tokens of context left: its topology, and
    what its kind says of it.

    Looks at no distribution.
    """
    depth = check_topology(tree, vocabulary, kind)
    if tree.tokens[0] != root:
        raise ValueError(
            f"tree.tokens: node 0 is token {tree.tokens[0]}; the root is the last committed token,"
            f" {root}."
        )
    if (deepest := max(depth)) > room:
        raise ValueError(
            f"tree: node {depth.index(deepest)} lies {deepest} deep, and the context has room for"
            f" {room}."
        )
    if kind == "without_replacement":
        _distinct(tree)
    _check_left(tree)


def _check_left(tree: DraftTree) -> None:
    masses, draws = list(map(len, tree.left)), list(map(len, tree.children))
    if masses != draws:
        node = next(node for node, count in enumerate(draws) if masses[node] != count)
        raise ValueError(
            f"tree.left: node {node} has {masses[node]} masses for {draws[node]} children."
        )


def _no_tree(listed: Listed, depth: list[int]) -> None:
    if len(depth) > 1:
        raise ValueError("tree: node 1 was drafted, and trees of kind 'none' have the root alone.")


def _path(listed: Listed, depth: list[int]) -> None:
    for node, children in enumerate(listed):
        if len(children) > 1:
            raise ValueError(
                f"tree.children: node {node} has {len(children)} draws; one of kind 'path' has one,"
                " or none."
            )


def _distinct(tree: DraftTree) -> None:
    for node, children in enumerate(tree.children):
        if len({tree.tokens[child] for child in children}) < len(children):
            raise ValueError(
                f"tree.children: node {node} drew a token twice; children of kind"
                " 'without_replacement' differ."
            )


def _delayed(listed: Listed, depth: list[int]) -> None:
    """A trunk, then paths of one length: a draw again is one node, through which so many paths go."""
    paths, branch, deepest = [1] + [0] * (len(depth) - 1), None, max(depth)
    for node, children in enumerate(listed):
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


_KINDS = {"none": _no_tree, "path": _path, "delayed": _delayed}


def check_draws(tree: DraftTree, vocabulary: int, drawn: bool = True) -> None:
    """Raise ValueError, naming the node, unless every node with children has a distribution q [V],
    finite and summing to 1, with mass at every child (drawn: its children were drawn from it, not
    picked; picked ones may have none).
    """
    nodes = [
        node
        for node, children in enumerate(tree.children)
        if children and (drawn or tree.q[node] is not None)
    ]
    found = []
    for node in nodes:
        row = tree.q[node]
        if row is None:
            raise ValueError(
                f"tree.q: node {node} has children, but no distribution that they were drawn from."
            )
        if row.shape != (vocabulary,):
            raise ValueError(
                f"tree.q: node {node} has shape {tuple(row.shape)}; expected [{vocabulary}]."
            )
        found.append(row)
    if not nodes:
        return
    rows = torch.stack(found)
    check_rows("tree.q", rows, names=nodes)
    if drawn:
        draws = [
            (row, node, tree.tokens[child])
            for row, node in enumerate(nodes)
            for child in tree.children[node]
        ]
        at = upload(integers([row * vocabulary + token for row, _, token in draws]), rows.device)
        for (_, node, token), mass in zip(draws, rows.take(at).tolist(), strict=True):
            if not mass > 0:
                raise ValueError(
                    f"tree.q: node {node} cannot have drawn token {token}: it has no mass there."
                )


def _check_node(name: str, node: int, row: Tensor, vocabulary: int) -> None:
    if row.shape != (vocabulary,):
        raise ValueError(
            f"{name}: node {node} has shape {tuple(row.shape)}; expected [{vocabulary}], as at the"
            " root."
        )
    try:
        check_rows(name, row)
    except ValueError as error:
        raise ValueError(str(error).replace("the distribution", f"node {node}")) from None


def check_policys_tree(policy: Any, tree: DraftTree, state: Any, vocabulary: int) -> None:
    """Raise UserError for a tree that a policy should not have drafted at `state`.

    Of a sequence's first tree the distributions are looked at too.
    """
    try:
        check_drafted(tree, policy.trees, state.root, state.room, vocabulary)
        if state.tau is None:
            check_draws(tree, vocabulary, drawn=policy.trees != "top_k")
    except ValueError as error:
        raise UserError(
            f"policy {type(policy).__name__} drafted a tree of kind '{policy.trees}' that no"
            f" verifier can take: {error} See docs/write_a_policy.md."
        ) from error
