"""Lossless verification of draft trees, by name: pure functions of (tree, rng), and which trees each takes."""

from collections.abc import Callable
from dataclasses import dataclass

from decoding.common.errors import UserError
from decoding.sampling import Rng
from decoding.tree import DraftTree, Verdict
from decoding.verification.checks import check_tree
from decoding.verification.gbv import gbv
from decoding.verification.greedy import greedy
from decoding.verification.khisti import khisti
from decoding.verification.naive import naivetree
from decoding.verification.nss import nss
from decoding.verification.specinfer import specinfer, without_replacement
from decoding.verification.spectr import spectr
from decoding.verification.traversal import traversal, traversal_without_replacement
from decoding.verification.unread import UNREAD, UnreadRule

# Kinds of tree, by how children come about: none are drafted; one path; a trunk and K paths of one length from its end
# (delayed); any tree of i.i.d. draws; draws without replacement; the most probable tokens, picked, not drawn (top_k).
PATHS = frozenset({"none", "path"})
DELAYED = PATHS | {"delayed"}
IID = DELAYED | {"iid"}
DISTINCT = PATHS | {"without_replacement"}
EVERY = IID | DISTINCT | {"top_k"}


@dataclass(frozen=True)
class Verifier:
    """A verification rule, called with a tree and rng.

    trees: the kinds of tree (`TreePolicy.trees`) on which it is lossless and meant to be used; greedy only at temperature 0.
    unread: the same rule for trees that lie on the device, where there is one.
    """

    name: str
    rule: Callable[[DraftTree, Rng], Verdict]
    trees: frozenset[str]
    unread: UnreadRule | None = None

    def __call__(self, tree: DraftTree, rng: Rng) -> Verdict:
        return self.rule(tree, rng)

    def checked(self, tree: DraftTree, rng: Rng) -> Verdict:
        """The same for a tree from elsewhere: raises ValueError naming the node if it is not well-formed."""
        check_tree(tree)
        return self.rule(tree, rng)


VERIFIERS: dict[str, Verifier] = {
    name: Verifier(name, rule, trees, UNREAD[name])
    for name, rule, trees in (
        ("nss", nss, EVERY),
        ("naive", naivetree, PATHS),
        ("naivetree", naivetree, IID),
        ("spectr", spectr, IID),
        ("specinfer", specinfer, IID),
        ("khisti", khisti, IID),
        ("bv", traversal, PATHS),
        ("traversal", traversal, IID),
        ("gbv", gbv, DELAYED),
        ("without_replacement", without_replacement, DISTINCT),
        ("traversal_without_replacement", traversal_without_replacement, DISTINCT),
        ("greedy", greedy, EVERY),
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
        others = (name for name, other in VERIFIERS.items() if trees in other.trees and name != "greedy")
        fitting = ", ".join(others) or "none"
        raise UserError(
            f"verifier={rule.name} takes trees of kind {', '.join(sorted(rule.trees))}, but the policy drafts '{trees}' "
            f"trees. Verifiers for these: {fitting}."
        )
