"""A tree that a policy should not have drafted is refused in the loop, by its node: most would
change the law unseen.
"""

import pytest
import torch

from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.decoding.tree import DraftTree
from tests.decoding.pairs import tiny_pair

TARGET, DRAFT = tiny_pair(16)


class Broken(TreePolicy):
    """Drafts `action`'s trees and spoils those from number `step` on."""

    def __init__(self, trees: str, action: Action, spoil, step: int = 0):
        self.trees, self._spoil, self._step, self._inner, self.drafted = (
            trees,
            spoil,
            step,
            Delayed(action),
            0,
        )

    def draft(self, state, drafter, rng):
        tree = self._inner.draft(state, drafter, rng)
        self.drafted += 1
        return (self._spoil(tree) or tree) if self.drafted > self._step else tree


def decoded(policy, rule: str = "specinfer", tokens: int = 30):
    return SpeculativeDecoder(TARGET, LMDrafter(DRAFT), policy, VERIFIERS[rule]).generate(
        [1, 2, 3], tokens, SamplingSetting(), Rng.seeded(0)
    )


def another_root(tree: DraftTree) -> None:
    tree.tokens[0] = (tree.tokens[0] + 1) % 16


def longer_path(tree: DraftTree) -> None:
    tree.add(len(tree) - 1, 3)


def without_mass(tree: DraftTree) -> None:
    tree.q[1] = torch.eye(16)[(tree.tokens[tree.children[1][0]] + 1) % 16]


def unlisted(tree: DraftTree) -> None:
    tree.children[1].clear()


PATH, DELAYED = Action(1, 0, 3), Action(3, 1, 2)
STRUCTURE = {
    "another root": ("path", PATH, another_root, "node 0 is token"),
    "a token that is none": (
        "path",
        PATH,
        lambda tree: tree.tokens.__setitem__(2, 16),
        "node 2 is token 16",
    ),
    "a child before its parent": (
        "path",
        PATH,
        lambda tree: tree.parents.__setitem__(1, 2),
        "node 1 has parent 2",
    ),
    "a child of another node": (
        "path",
        PATH,
        lambda tree: tree.children[0].append(3),
        "node 0 lists 3",
    ),
    "a node that is nobody's child": (
        "path",
        PATH,
        unlisted,
        "node 2 is missing from those of its parent, node 1",
    ),
    "lists of different lengths": (
        "path",
        PATH,
        lambda tree: tree.q.pop(),
        "another number of nodes",
    ),
    "branches on a path": (
        "path",
        DELAYED,
        lambda tree: None,
        "node 1 has 3 draws; one of kind 'path'",
    ),
    "drafts of kind none": ("none", PATH, lambda tree: None, "node 1 was drafted"),
    "a token drawn twice": (
        "without_replacement",
        PATH,
        lambda tree: tree.children[0].append(1),
        "node 0 drew a token twice",
    ),
    "one path longer": ("delayed", DELAYED, longer_path, "of one length"),
    "another branch point": (
        "delayed",
        DELAYED,
        lambda tree: tree.children[0].append(1),
        "branches at one node alone",
    ),
}
DRAWS = {
    "no distribution": (
        "path",
        PATH,
        lambda tree: tree.q.__setitem__(1, None),
        "node 1 has children, but no distribution",
    ),
    "a distribution of other tokens": (
        "path",
        PATH,
        lambda tree: tree.q.__setitem__(0, torch.ones(3) / 3),
        "node 0 has shape",
    ),
    "no distribution at all": (
        "path",
        PATH,
        lambda tree: tree.q.__setitem__(1, tree.q[1] * 2),
        "node 1 does not sum to 1",
    ),
    "a draw without mass": ("path", PATH, without_mass, "node 1 cannot have drawn token"),
}


def rule(trees: str) -> str:
    return (
        "without_replacement"
        if trees == "without_replacement"
        else "gbv"
        if trees == "delayed"
        else "specinfer"
    )


@pytest.mark.parametrize(
    "trees,action,spoil,words", [*STRUCTURE.values(), *DRAWS.values()], ids=[*STRUCTURE, *DRAWS]
)
def test_a_malformed_tree_is_refused_by_policy_kind_and_node(trees, action, spoil, words):
    with pytest.raises(
        UserError, match=rf"policy Broken drafted a tree of kind '{trees}'.*{words}"
    ):
        decoded(Broken(trees, action, spoil), rule(trees))


@pytest.mark.parametrize("trees,action,spoil,words", STRUCTURE.values(), ids=STRUCTURE)
def test_what_holds_it_together_is_looked_at_in_every_tree(trees, action, spoil, words):
    if trees == "none" or (action is DELAYED and trees == "path"):
        pytest.skip("the first tree is wrong already")
    policy = Broken(trees, action, spoil, step=3)
    with pytest.raises(UserError, match=words):
        decoded(policy, rule(trees))
    assert policy.drafted == 4


def test_a_tree_deeper_than_the_context_is_refused(monkeypatch):
    class Deep(TreePolicy):
        trees = "path"

        def draft(self, state, drafter, rng):
            tree = DraftTree.rooted(state.root, drafter.root.q)
            for tip in range(5):
                tree.add(tip, rng.categorical(tree.q[tip]))
                drafter.expand(tree, [tip + 1])
            return tree

    decoder = SpeculativeDecoder(TARGET, LMDrafter(DRAFT), Deep(), VERIFIERS["bv"])
    decoder.max_context = 20
    with pytest.raises(UserError, match=r"node \d lies \d deep, and the context has room for \d"):
        decoder.generate([1, 2, 3], 100, SamplingSetting(), Rng.seeded(0))


def test_sound_trees_of_every_kind_pass():
    for trees, action in (
        ("path", PATH),
        ("delayed", DELAYED),
        ("iid", DELAYED),
        ("top_k", DELAYED),
        ("delayed", PATH),
    ):
        found = decoded(
            Broken(trees, action, lambda tree: None), "nss" if trees == "top_k" else "specinfer"
        )
        assert len(found.tokens) == 30
    picked = Broken(
        "top_k", PATH, lambda tree: tree.q.__setitem__(1, torch.eye(16)[(tree.tokens[2] + 1) % 16])
    )
    assert len(decoded(picked, "nss").tokens) == 30  # a picked token needs no mass
