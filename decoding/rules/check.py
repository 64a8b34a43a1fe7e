"""Is this a distribution, is this a draft tree? ValueError says what is wrong.

The decode loop calls `check_policys_tree` for every tree that a policy drafts. So a policy that
breaks its promise gets an error instead of a wrong output law.
"""

import math
from typing import Any

from torch import Tensor

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.tree import DraftTree

TOLERANCE = 1e-3
"""Largest error of a distribution's sum."""


def _check_row(row: Tensor, node: int) -> None:
    """Raise ValueError unless q [V] of `node` is finite, not negative and sums to 1."""
    mass, least = float(row.sum()), float(row.min())
    if not (abs(mass - 1) <= TOLERANCE and least >= 0):  # neither is true of NaN
        raise ValueError(
            f"tree.q: node {node} is no distribution: its sum is {mass:.6g}, its smallest number"
            f" {least:.6g}."
        )


def _check_topology(tree: DraftTree, vocabulary: int) -> None:
    """Check tokens, parents and children of every node."""
    below: list[set[int]] = [set() for _ in tree.tokens]
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"tree.tokens: node {node} is token {token}, outside the vocabulary of"
                f" {vocabulary}."
            )
        if not (0 <= parent < node if node else parent == -1):
            raise ValueError(
                f"tree.parents: node {node} has parent {parent}; parents precede children, the root"
                " has -1."
            )
        if node:
            below[parent].add(node)
    for node, (children, left) in enumerate(zip(tree.children, tree.left, strict=True)):
        if set(children) != below[node] or len(left) != len(children):
            raise ValueError(
                f"tree.children: node {node} lists {children} with {len(left)} masses in tree.left;"
                f" it is the parent of {sorted(below[node])}. `DraftTree.add` keeps these together."
            )


def _check_draws(tree: DraftTree, vocabulary: int, drawn: bool) -> None:
    """Check that a node with children has a distribution q [V], with mass at every child.

    drawn: False for children that were picked: they need no mass, their parent no q.
    """
    for node, children in enumerate(tree.children):
        row = tree.q[node] if children else None
        if row is not None:
            if row.shape != (vocabulary,):
                raise ValueError(
                    f"tree.q: node {node} has shape {tuple(row.shape)}; expected [{vocabulary}]."
                )
            _check_row(row, node)
        if not children or not drawn:
            continue
        if row is None:
            raise ValueError(
                f"tree.q: node {node} has children, but no distribution that they were drawn from."
            )
        tokens = [tree.tokens[child] for child in children]
        for token, mass in zip(tokens, row[tokens].tolist(), strict=True):
            if not mass > 0:
                raise ValueError(
                    f"tree.q: node {node} cannot have drawn token {token}: it has no mass there."
                )


def _check_kind(kind: str, tree: DraftTree) -> None:
    """Check what a kind of tree (`TreePolicy.trees`) promises of every node."""
    most = {"none": 0, "path": 1}.get(kind, math.inf)  # equal draws share a node
    for node, children in enumerate(tree.children):
        if len(children) > most:
            raise ValueError(
                f"tree.children: node {node} has {len(children)} draws; one of kind '{kind}' has at"
                f" most {most}."
            )
        distinct = {tree.tokens[child] for child in children}
        if kind == "without_replacement" and len(distinct) < len(children):
            raise ValueError(
                f"tree.children: node {node} drew a token twice; children of kind"
                " 'without_replacement' differ."
            )
    if kind == "delayed":
        _check_delayed(tree)


def _check_delayed(tree: DraftTree) -> None:
    """Check for a trunk, then paths of one length.

    A draw again is one node, through which so many paths go.
    """
    paths, branch, deepest = [1] + [0] * (len(tree) - 1), None, max(tree.depth)
    for node, children in enumerate(tree.children):
        for child in children:
            paths[child] += 1
        if not children and tree.depth[node] < deepest:
            raise ValueError(
                f"tree: node {node} ends {tree.depth[node]} deep and another path {deepest}; those"
                " of kind 'delayed' are of one length."
            )
        if children and len(children) != paths[node]:
            if branch is not None or paths[node] > 1:
                raise ValueError(
                    f"tree.children: node {node} has {len(children)} draws and {paths[node]} paths"
                    " go through it; a tree of kind 'delayed' branches at one node alone."
                )
            branch = node


def check_policys_tree(policy: Any, tree: DraftTree, state: Any, vocabulary: int) -> None:
    """Raise UserError for a tree that a policy should not have drafted at `state`.

    The topology is checked, the root, the room that is left, and what the kind of tree
    (`TreePolicy.trees`) promises; of a sequence's first tree the distributions too.
    """
    try:
        if not isinstance(tree, DraftTree):
            raise ValueError(f"draft() returned {tree!r}; it has to return the DraftTree.")
        _check_topology(tree, vocabulary)
        _check_kind(policy.trees, tree)
        if tree.tokens[0] != state.root:
            raise ValueError(
                f"tree.tokens: node 0 is token {tree.tokens[0]}; the root is the last committed"
                f" token, {state.root}."
            )
        if (deepest := max(tree.depth)) > state.room:
            raise ValueError(
                f"tree: node {tree.depth.index(deepest)} lies {deepest} deep, and the context has"
                f" room for {state.room}."
            )
        if state.tau is None:
            _check_draws(tree, vocabulary, drawn=policy.trees != "top_k")
    except ValueError as error:
        raise UserError(
            f"policy {type(policy).__name__} drafted a tree of kind '{policy.trees}' that no"
            f" verifier can take: {error} See docs/write_a_policy.md."
        ) from error
