"""A tree that no verifier can walk, or no such policy may draft, is refused by its node: most would
change the law unseen.
"""

from types import SimpleNamespace

import pytest
import torch

from nde_talf import (
    VERIFIERS,
    Action,
    Delayed,
    DraftTree,
    LMDrafter,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
    Verifier,
)
from nde_talf.decoding.rules.check import check_policys_tree
from nde_talf.decoding.verifier import check_compatible
from tests.decoding.pairs import tiny_pair
from tests.refusal import refusal

V = 5
Q = torch.full((V,), 1 / V)


def made(*paths):
    """The tree of these paths, each node's children drawn from Q."""
    tree = DraftTree.rooted(0)
    for path in paths:
        node = 0
        for token in path:
            node = tree.add(node, token)
    tree.q = [Q if children else None for children in tree.children]
    tree.p = [Q] * len(tree)
    return tree


def path():
    return made([1, 2, 3])


def again():
    """A path whose first token was drawn twice, and nothing below it."""
    tree = path()
    tree.add(0, 1)
    return tree


def spoilt(field, node, value):
    tree = path()
    getattr(tree, field)[node] = value
    return tree


TOPOLOGY = {
    "outside the vocabulary": (spoilt("tokens", 2, 9), "tree.tokens: node 2 is token 9"),
    "a child before its parent": (spoilt("parents", 1, 2), "tree.parents: node 1 has parent 2"),
    "a child of another node": (spoilt("children", 0, [1, 3]), r"node 0 lists \[1, 3\]"),
    "nobody's child": (spoilt("children", 1, []), r"node 1 lists \[\].*parent of \[2\]"),
    "masses": (spoilt("left", 0, []), r"node 0 lists \[1\] with 0 masses"),
}
DRAWS = {
    "no q": (spoilt("q", 1, None), "tree.q: node 1 has children, but no distribution"),
    "q of other tokens": (spoilt("q", 1, Q[:2]), "tree.q: node 1 has shape"),
    "q sums to 2": (spoilt("q", 1, 2 * Q), "tree.q: node 1 is no distribution: its sum is 2"),
    "q has no mass": (spoilt("q", 1, torch.eye(V)[0]), "node 1 cannot have drawn token 2"),
}
KINDS = {
    "none": (path(), "none", "node 0 has 1 draws; one of kind 'none'"),
    "path": (made([1], [2]), "path", "node 0 has 2 draws; one of kind 'path'"),
    "distinct": (made([1], [1]), "without_replacement", "node 0 drew a token twice"),
    "delayed, lengths": (made([1, 2], [3]), "delayed", "of one length"),
    "delayed, two branch points": (again(), "delayed", "node 1 has 1 draws and 2 paths"),
    "nothing": (None, "path", r"draft\(\) returned None"),
    "root": (spoilt("tokens", 0, 4), "path", "node 0 is token 4; the root"),
    "room": (made([1, 2, 3, 4, 1]), "path", "lies 5 deep, and the context has room for 4"),
}


def check(tree, trees, first=True):
    state = SimpleNamespace(root=0, room=4, tau=None if first else 1)
    check_policys_tree(SimpleNamespace(trees=trees), tree, state, V)


@pytest.mark.parametrize("name", [*TOPOLOGY, *DRAWS])
def test_a_malformed_tree_is_refused_by_its_node(name):
    tree, words = (TOPOLOGY | DRAWS)[name]
    with refusal(rf"drafted a tree of kind 'iid'.*{words}"):
        check(tree, "iid")
    if name in TOPOLOGY:  # looked at in every tree
        with refusal(words):
            check(tree, "top_k", first=False)


@pytest.mark.parametrize("tree,kind,words", KINDS.values(), ids=KINDS)
def test_a_tree_of_another_kind_is_refused(tree, kind, words):
    with refusal(rf"of kind '{kind}'.*{words}"):
        check(tree, kind)


def test_sound_trees_pass():
    for trees in ("path", "delayed", "iid", "without_replacement", "top_k"):
        check(path(), trees)
    check(made([1, 2, 3], [1, 2, 4], [1, 1, 1]), "delayed")
    check(spoilt("q", 1, torch.eye(V)[0]), "top_k")  # a picked token needs no mass
    for tree, _ in DRAWS.values():
        check(tree, "path", first=False)
    # Stop tokens, and a token drawn again, are found among numbers alone.
    assert made([torch.tensor(1)], [1]).tokens == [0, 1]
    assert type(path().commit(2, torch.tensor(4)).tokens[-1]) is int


def test_a_path_may_be_longer_than_python_recurses():
    assert VERIFIERS["bv"](made([1] * 2000), Rng.seeded(0)).end == 2000


def test_the_loop_checks_every_tree_and_the_devices():
    class Broken(Delayed):
        drafted = 0

        def draft(self, state, drafter, rng):
            tree = super().draft(state, drafter, rng)
            self.drafted += 1
            if self.drafted == 4:
                tree.children[0].append(3)
            return tree

    target, draft = tiny_pair(16)
    policy = Broken(Action(1, 0, 3))
    decoder = SpeculativeDecoder(target, LMDrafter(draft), policy, "specinfer")
    with refusal(r"policy Broken drafted .*node 0 lists "):
        decoder.generate([1, 2, 3], 60, SamplingSetting(), Rng.seeded(0))
    assert policy.drafted == 4
    draft.device = torch.device("meta")
    with refusal("draft is on meta"):
        SpeculativeDecoder(target, LMDrafter(draft), policy, "specinfer")


def test_unknown_kinds_are_named():
    with pytest.raises(ValueError, match="no kind 'idd'"):
        Verifier("mine", len, frozenset({"idd"}))
    with refusal("no kind 'idd'"):
        check_compatible("idd", VERIFIERS["nss"])
