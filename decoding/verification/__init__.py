"""Lossless verification of draft trees, by name: pure functions of (tree, coins), and which trees each takes."""

from collections.abc import Callable
from dataclasses import dataclass

from decoding.errors import UserError
from decoding.sampling import Coins
from decoding.tree import DraftTree, Verdict
from decoding.verification.naive import naivetree
from decoding.verification.specinfer import specinfer
from decoding.verification.traversal import traversal

PATHS = frozenset({"none", "path"})
IID = frozenset({"none", "path", "iid"})


@dataclass(frozen=True)
class Verifier:
    """A verification rule. trees: the kinds of tree (`TreePolicy.trees`) on which it is lossless and meant to be used."""

    name: str
    rule: Callable[[DraftTree, Coins], Verdict]
    trees: frozenset[str]

    def __call__(self, tree: DraftTree, coins: Coins) -> Verdict:
        return self.rule(tree, coins)


VERIFIERS: dict[str, Verifier] = {
    rule.name: rule
    for rule in (
        Verifier("naive", naivetree, PATHS),
        Verifier("bv", traversal, PATHS),
        Verifier("specinfer", specinfer, IID),
        Verifier("naivetree", naivetree, IID),
        Verifier("traversal", traversal, IID),
    )
}


def verifier(name: str) -> Verifier:
    """The verifier called `name`. Raises UserError for an unknown one."""
    if name not in VERIFIERS:
        raise UserError(f"verifier={name}: there is none of that name; choose one of {', '.join(VERIFIERS)}.")
    return VERIFIERS[name]


def check_compatible(trees: str, rule: Verifier) -> None:
    """Raise UserError unless `rule` is lossless (and meant) for a policy's kind of `trees`."""
    if trees not in rule.trees:
        fitting = ", ".join(other.name for other in VERIFIERS.values() if trees in other.trees) or "none"
        raise UserError(
            f"verifier={rule.name} takes trees of kind {', '.join(sorted(rule.trees))}, but the policy drafts '{trees}' trees "
            f"(path: one branch; iid: branches drawn independently). Verifiers for these: {fitting}."
        )
