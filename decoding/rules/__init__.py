"""Lossless verification of draft trees, by name: pure functions of (tree, rng), and which trees
each takes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.renamed import notice
from nde_talf.decoding.device_tree import DeviceTree
from nde_talf.decoding.policies.base import kind_called
from nde_talf.decoding.rules.batch import Verified, rows_of, verify_batch
from nde_talf.decoding.rules.check import check_tree
from nde_talf.decoding.rules.gbv import gbv, gbv_trees
from nde_talf.decoding.rules.khisti import Khisti
from nde_talf.decoding.rules.rules import NSS, Greedy, Naive, Rule, SpecInfer
from nde_talf.decoding.rules.spectr import SpecTr
from nde_talf.decoding.rules.tournament import PAPER
from nde_talf.decoding.rules.traversal import traversal, traversal_trees
from nde_talf.decoding.rules.trees import Trees, trees_of
from nde_talf.decoding.rules.walk import walk, walk_trees
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.tree import DraftTree, Verdict

__all__ = [
    "VERIFIERS",
    "Verified",
    "Verifier",
    "check_compatible",
    "rows_of",
    "verifier",
    "verify_batch",
]

# Kinds of tree, by how children come about: none are drafted; one path; a trunk and K paths of one
# length from its end (delayed); any tree of i.i.d. draws; draws without replacement; the most
# probable tokens, picked, not drawn (top_k).
PATHS = frozenset({"none", "path"})
DELAYED = PATHS | {"delayed"}
IID = DELAYED | {"iid"}
DISTINCT = PATHS | {"without_replacement"}
EVERY = IID | DISTINCT | {"top_k"}


@dataclass(frozen=True)
class Verifier:
    """A verification rule, called with a tree and random numbers; gives the last accepted node and
    the token after it.

    Attributes:
        name: how errors and tables call it.
        rule: the rule for a tree on the host.
        trees: the kinds of tree (`TreePolicy.trees`) on which it is lossless and meant to be used:
            of PATHS, DELAYED, IID, DISTINCT or EVERY; greedy only at temperature 0.
        on_device: the same for trees that lie on a device; None where there is none.
        of_tree: whether a tree's own rule (`DraftTree.rule`) is applied in place of this one.

    Raises:
        ValueError: for a kind of tree that there is not.
    """

    name: str
    rule: Callable[[DraftTree, Rng], Verdict]
    trees: frozenset[str]
    on_device: Callable[[Trees, Rng], Verdict] | None = None
    of_tree: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "trees", frozenset(kind_called(kind, f"{self.name}.trees") for kind in self.trees)
        )
        if unknown := self.trees - EVERY:
            raise ValueError(
                f"trees: there is no kind {', '.join(sorted(unknown))}; choose from"
                f" {', '.join(sorted(EVERY))}."
            )

    @classmethod
    def of_rule(cls, name: str, rule: Rule, trees: frozenset[str] = IID) -> "Verifier":
        """The top-down walk with a rule of one's own, for example `Verifier.of_rule("mine", Mine(),
        IID)`.
        """
        # A tree of kind top_k has no masses to look at, whatever the rule.
        masses = "without_replacement" in trees and "iid" not in trees
        return cls(
            name, partial(walk, rule, without_replacement=masses), trees, partial(walk_trees, rule)
        )

    def __call__(self, tree: DraftTree | DeviceTree, rng: Rng) -> Verdict:
        if isinstance(tree, DraftTree):
            verdict = self.rule(tree, rng)
            if isinstance(verdict[0], list):
                notice("Verdict(path, token)", "Verdict(end, token)")
                return Verdict(verdict[0][-1] if verdict[0] else 0, verdict[1])
            return verdict
        if self.on_device is None:
            raise UserError(
                f"verifier={self.name}: it takes trees on the host only. Switch on_device off."
            )
        end, token = self.on_device(trees_of(tree), rng)
        return Verdict(end, token)

    def checked(self, tree: DraftTree, rng: Rng) -> Verdict:
        """The same for a tree from elsewhere: raises ValueError naming the node if it is not
        well-formed.
        """
        check_tree(tree)
        return self.rule(tree, rng)


VERIFIERS: dict[str, Verifier] = {
    rule.name: rule
    for rule in (
        Verifier.of_rule("nss", NSS(), EVERY),
        Verifier.of_rule("naive", Naive(), PATHS),
        Verifier.of_rule("naivetree", Naive(), IID),
        Verifier.of_rule("spectr", SpecTr(), IID),
        Verifier.of_rule("specinfer", SpecInfer(), IID),
        Verifier.of_rule("khisti", Khisti(), IID),
        Verifier("khisti_lp", partial(walk, Khisti(PAPER)), IID),
        # Tree verification (Hu & Huang, 2024) draws the verdict of a path in one go, from the law
        # that block verification has.
        Verifier("tv", traversal, PATHS, traversal_trees),
        Verifier("bv", traversal, PATHS, traversal_trees),
        Verifier("traversal", traversal, IID, traversal_trees),
        Verifier("gbv", gbv, DELAYED, gbv_trees),
        Verifier("gbv_exact", partial(gbv, exact=True), DELAYED, partial(gbv_trees, exact=True)),
        Verifier.of_rule("without_replacement", SpecInfer(), DISTINCT),
        Verifier(
            "traversal_without_replacement",
            partial(traversal, without_replacement=True),
            DISTINCT,
            traversal_trees,
        ),
        Verifier.of_rule("greedy", Greedy(), EVERY),
    )
}


def verifier(name: str) -> Verifier:
    """The verifier called `name`. Raises UserError for an unknown one."""
    if name not in VERIFIERS:
        raise UserError(
            f"verifier={name}: there is none of that name; choose one of {', '.join(VERIFIERS)}."
        )
    return VERIFIERS[name]


def check_compatible(trees: str, rule: Verifier) -> None:
    """Raise UserError unless `rule` is lossless (and meant) for a policy's kind of `trees`."""
    if trees not in EVERY:
        raise UserError(
            f"the policy's trees are of kind '{trees}', which there is not; choose from"
            f" {', '.join(sorted(EVERY))}."
        )
    if trees not in rule.trees:
        others = (
            name for name, other in VERIFIERS.items() if trees in other.trees and name != "greedy"
        )
        fitting = ", ".join(others) or "none"
        raise UserError(
            f"verifier={rule.name} takes trees of kind {', '.join(sorted(rule.trees))}, but the"
            f" policy drafts '{trees}' trees. Verifiers for these: {fitting}."
        )
