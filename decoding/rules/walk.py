"""The top-down walk that solvers of optimal transport share (section 3.2, NDE paper).

A rule is a solver f(p, q, X) of optimal transport with list information: given the draws X of a
node it returns a token whose law is p, and which is one of X as often as possible. It tries the
draws one after another. `chance` is the probability that the next one is accepted, `reject` gives
the state after its rejection, and `residual` is what the token is drawn from when none was
accepted:

    state = rule.start(node)
    for each draw x in draft order:
        accept x with probability rule.chance(p(x), q(x), state)
        state = rule.reject(node, state)
    otherwise draw from rule.residual(node, state)

Two drivers use these four methods: `walk` here, and `branching.Branching` for the branching
probabilities that labels are made of. So both use the same formulas.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.rules.labels.branching import Branching, states_after
from nde_talf.decoding.rules.residual import Node, Residual, node_of
from nde_talf.decoding.rules.verification_table import nodes_of
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.tree import DraftTree, Verdict
from nde_talf.decoding.verifier import Verifier

T = TypeVar("T")


class Rule:
    """A solver, one draw after another.

    Attributes:
        offered: how many draws are offered at most; None: all of them.
        by_count: the state depends on how many draws a node has, and not on how many were rejected.
        can_hit_draft: a token that is drawn from the residual may be one of the node's draws, where
            all of them were offered. Labels count such hits.
        tabled: the states are `Residual`s, so that a GPU finds all numbers in one go
            (`verification_table`).
    """

    offered: ClassVar[int | None] = None
    by_count: ClassVar[bool] = False
    can_hit_draft: ClassVar[bool] = True
    tabled: ClassVar[bool] = False

    def target(self, p: Tensor) -> Tensor:
        """Return what the token is drawn from at a leaf: p. `Greedy` checks it here."""
        return p

    def select(self, node: Node, rng: Rng) -> Node:
        """Return the node to be solved: Khisti first turns its draws into one."""
        return node

    def start(self, node: Any) -> Any:
        """Return the state before the first draw."""
        return Residual()

    def chance(self, px: Any, qx: Any, state: Any, left: Any = None) -> Any:
        """Return the probability that the next draw x is accepted if all before it were rejected.

        Args:
            px: p(x); a number in a walk, [B, S, K] for labels.
            qx: q(x) likewise.
            state: what the rejections so far have left, as `start` and `reject` return it.
            left: for a draw without replacement, the mass of q that it was drawn from.
        """
        raise NotImplementedError

    def reject(self, node: Any, state: Any, left: Any = None) -> Any:
        """Return the state after one more rejected draw."""
        return state

    def residual(self, node: Any, state: Any) -> Any:
        """Return the weights of the token when no draw was accepted, not normalised.

        They have the shape of node.p, which is a row [V] or numbers at single tokens.
        """
        raise NotImplementedError

    def alpha(self, p: Tensor, q: Tensor, draws: Tensor, states: Any) -> Tensor:
        """Return acceptance rates [R, max(draws) + 1] by row of p, q [R, V] and number of draws."""
        raise NotImplementedError

    def table(self, p: Tensor, q: Tensor, draws: Tensor) -> Any:
        """Return the states at rows of p, q [R, V] that have up to draws [R] draws.

        Each field is a tensor [R, n], of which column j is the state after j rejections
        (`by_count`: with j draws).
        """
        return states_after(self, p, q, draws)

    def branching(self, p: Tensor, q: Tensor, draws: Tensor) -> Any:
        """Return the branching probabilities at rows of p, q [R, V] with up to draws [R] draws."""
        return Branching(self, p, q, draws)


def solve(rule: Rule, node: Node, rng: Rng) -> int:
    """Return a token of law p, given draws from q. Stops at the first draw that is accepted."""
    node = rule.select(node, rng)
    state = rule.start(node)
    for draw, token in enumerate(node.drafted[: rule.offered]):
        left = node.left[draw] if node.left else None
        if rng.bernoulli(rule.chance(node.px(draw), node.qx(draw), state, left)):
            return token
        state = rule.reject(node, state, left)
    return node.draw(rule.residual(node, state), rng)


def walk(rule: Rule, tree: DraftTree, rng: Rng, without_replacement: bool = False) -> Verdict:
    """Return the last accepted node of `tree`, 0 for the root, and the token after it."""
    if rule.tabled and not without_replacement:
        nodes = nodes_of(tree, rng, rule.offered)
    else:
        nodes = partial(node_of, tree, without_replacement=without_replacement)
    end, node = 0, nodes(0)
    while children := tree.children[end]:
        token = solve(rule, node, rng)
        if token not in node.drafted:
            return Verdict(end, token)
        end = children[node.drafted.index(token)]
        node = nodes(end)
    return Verdict(end, node.draw(rule.target(node.p), rng))


def verifier_of(name: str, rule: Rule, trees: frozenset[str], labels: bool = False) -> Verifier:
    """Make the verifier that walks with a rule, for example `verifier_of("mine", Mine(), IID)`.

    labels: whether the rule's own branching probabilities make labels.
    """
    # A tree of kind top_k has no masses to look at, whatever the rule.
    masses = "without_replacement" in trees and "iid" not in trees
    walking = partial(walk, rule, without_replacement=masses)
    table = (rule.offered, False) if rule.tabled and not masses else None
    return Verifier(name, walking, trees, rule if labels else None, table)


def rule(
    name: str,
    trees: Iterable[str],
    labels: Any = None,
    table: tuple[int | None, bool] | None = None,
    **options: Any,
) -> Callable[[T], T]:
    """Register a verification rule: a `Rule` class, or a function of (tree, rng).

    Args:
        name: by which a configuration selects it.
        trees: kinds of tree on which it is lossless and meant to be used: PATHS, DELAYED, IID,
            DISTINCT or EVERY.
        labels: what estimates E[tau + 1] of every tree for it: True for a `Rule` class, which says
            so itself, a function (levels, start) for others; None: it has no labels.
        table: see `Verifier`; a `Rule` class says so itself.
        options: further arguments of the function.
    """

    def decorate(thing: T) -> T:
        made: Any = thing
        if isinstance(thing, type):
            verifier = verifier_of(name, made(), frozenset(trees), labels)
        else:
            verifier = Verifier(name, partial(made, **options), frozenset(trees), labels, table)
        VERIFIERS.add(name)(verifier)
        return thing

    return decorate
