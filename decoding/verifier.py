"""A verification rule as the loop calls it, and which trees it takes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nde_talf.decoding.common.arguments import checked
from nde_talf.decoding.common.errors import ArgumentError, UserError
from nde_talf.decoding.registry import EVERY, VERIFIERS
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.tree import DraftTree, Verdict


@dataclass(frozen=True)
class Verifier:
    """A verification rule, called with a tree and random numbers.

    It gives the last accepted node and the token after it.

    Attributes:
        name: how errors and tables call it.
        rule: the function of a tree and random numbers.
        trees: the kinds of tree (`TreePolicy.trees`) on which it is lossless and meant to be used:
            PATHS, DELAYED, IID, DISTINCT or EVERY of `nde_talf.decoding.registry`; greedy only at
            temperature 0.
        labels: what estimates E[tau + 1] for it (`rules.labels`): a `Rule`, or a
            function (levels, start); None: nothing does.
        table: for a rule whose numbers one table holds (`rules.verification_table`), the number of
            draws that it looks at, None for all, and whether it goes bottom-up.

    Raises:
        ArgumentError: for a kind of tree that there is not.
    """

    name: str
    rule: Callable[[DraftTree, Rng], Verdict]
    trees: frozenset[str]
    labels: Any = None
    table: tuple[int | None, bool] | None = None

    def __post_init__(self) -> None:
        check_kinds(self.trees)

    def __call__(self, tree: DraftTree, rng: Rng) -> Verdict:
        """Verify one tree."""
        return self.rule(tree, rng)


def check_kinds(kinds: Iterable[str]) -> None:
    """Raise ArgumentError for a kind of tree that there is not."""
    if unknown := {*kinds} - EVERY:
        raise ArgumentError(
            f"trees: there is no kind {', '.join(map(repr, unknown))}; choose from"
            f" {', '.join(sorted(EVERY))}."
        )


def check_compatible(trees: str, rule: Verifier) -> None:
    """Raise UserError unless `rule` is lossless (and meant) for a policy's kind of `trees`."""
    check_kinds([trees])
    if trees not in rule.trees:
        others = (
            name for name, other in VERIFIERS.items() if trees in other.trees and name != "greedy"
        )
        raise UserError(
            f"verifier={rule.name} takes trees of kind {', '.join(sorted(rule.trees))}, but the"
            f" policy drafts '{trees}' trees. Verifiers for these: {', '.join(others)}."
        )


@checked
def verifier(name: str) -> Verifier:
    """Look up the verification rule `name`. Raises UserError for an unknown one."""
    rule: Verifier = VERIFIERS[name]
    return rule
