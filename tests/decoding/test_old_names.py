"""Names that go with the next version still work, and say what they are called now."""

import pytest
import torch

from nde_talf.decoding.actions import Action
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.policies.base import DecodingState
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.policies.dynatree import DynaTreeConfig
from nde_talf.decoding.policies.fixed import Shaped
from nde_talf.decoding.rules import VERIFIERS, Verifier
from nde_talf.decoding.sampling import RAW, Rng, SamplingSetting
from nde_talf.decoding.tree import DraftTree, Verdict
from tests.decoding.pairs import tiny_pair

TARGET, DRAFT = tiny_pair(16)


def grown() -> DraftTree:
    tree = DraftTree.rooted(3)
    tree.add(tree.add(0, 5), 7)
    tree.add(0, 6)
    return tree


def begun() -> LMDrafter:
    drafter = LMDrafter(DRAFT)
    drafter.start([1, 2], 3, torch.zeros(2, 16), RAW)
    tree = grown()
    drafter.expand(tree, [1, 3])
    return drafter


def relabelled() -> dict[int, int]:
    drafter = begun()
    drafter.relabel([0, 3])
    return drafter._rows


def forgotten() -> int:
    drafter = begun()
    drafter.forget()
    return drafter.session.rows


def state() -> DecodingState:
    return DecodingState(0, 1, 4, RAW, torch.zeros(1), torch.zeros(1), device=True)


class Old:
    """A policy of one's own that calls its trees by the old name."""

    trees = "chosen"

    def draft(self, state, drafter, rng):
        return DraftTree.rooted(state.root, drafter.root.q)


def decoder(policy, **options) -> SpeculativeDecoder:
    return SpeculativeDecoder(TARGET, LMDrafter(DRAFT), policy, VERIFIERS["nss"], **options)


def old_verdict() -> int:
    """Of a rule of one's own that returns the accepted nodes."""
    rule = Verifier("mine", lambda tree, rng: Verdict(tree.path(2), 0), frozenset({"path"}))
    return rule(grown(), Rng.seeded(0)).end


def old_kind() -> frozenset[str]:
    return Verifier("mine", lambda tree, rng: Verdict(0, 0), frozenset({"chosen"})).trees


PATH = Delayed(Action(1, 0, 2))
OLD = {
    "mine.trees=chosen": (old_kind, "mine.trees=top_k", lambda: frozenset({"top_k"})),
    "Verdict(path, token)": (old_verdict, "Verdict(end, token)", lambda: 2),
    "DraftTree.way": (lambda: grown().way(2), "path", lambda: grown().path(2)),
    "DraftTree.of": (lambda: grown().of([0, 3]).tokens, "subtree", lambda: [3, 6]),
    "Drafter.relabel": (relabelled, "rerank", lambda: {1: 1}),
    "LMDrafter.forget": (forgotten, "rollback", lambda: 0),
    "DecodingState.unread": (lambda: state().unread, "device", lambda: True),
    "SpeculativeDecoder(unread=)": (
        lambda: decoder(PATH, unread=True).device,
        "device=",
        lambda: True,
    ),
    "Old.trees=chosen": (lambda: decoder(Old()).kind, "Old.trees=top_k", lambda: "top_k"),
    "most_depth": (lambda: DynaTreeConfig(most_depth=7).max_depth, "max_depth", lambda: 7),
    "children=distinct": (
        lambda: Shaped(((),), "distinct").trees,
        "children=without_replacement",
        lambda: "without_replacement",
    ),
    "children=chosen": (lambda: Shaped(((),), "chosen").trees, "children=top_k", lambda: "top_k"),
}


@pytest.mark.parametrize("old", OLD)
@torch.inference_mode()
def test_an_old_name_works_and_says_the_new_one(old):
    use, new, expected = OLD[old]
    with pytest.warns(FutureWarning) as told:
        assert use() == expected()
    (message,) = (str(each.message) for each in told)
    assert message.startswith(f"{old} is called {new}")


class OldDrafter:
    """A drafter of the protocol before: it is told the path and the token, and knows no commit."""

    def __init__(self, inner: LMDrafter):
        self.inner = inner
        self.vocab_size, self.max_context = inner.vocab_size, inner.max_context

    def fork(self) -> "OldDrafter":
        return OldDrafter(self.inner.fork())

    def start(self, *arguments) -> None:
        self.inner.start(*arguments)
        self.root = self.inner.root

    def expand(self, tree, nodes) -> None:
        self.inner.expand(tree, nodes)

    def advance(self, tree, path, token, features) -> None:
        self.inner.advance(tree.commit(path[-1] if path else 0, token), features)
        self.root = self.inner.root


def test_an_old_drafter_drafts_what_it_did():
    asked = [1, 2, 3], 40, SamplingSetting(0.8)
    decoders = [
        SpeculativeDecoder(TARGET, own, PATH, VERIFIERS["bv"])
        for own in (LMDrafter(DRAFT), OldDrafter(LMDrafter(DRAFT)))
    ]
    expected = decoders[0].generate(*asked, Rng.seeded(0))
    with pytest.warns(FutureWarning, match="OldDrafter"):
        assert decoders[1].generate(*asked, Rng.seeded(0)).tokens == expected.tokens
