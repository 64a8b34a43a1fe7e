"""Trees that lie on the device: laws of shapes and beams, and verdicts that have the host's law
(`test_lossless` has delayed trees).
"""

import pytest
import torch

from nde_talf.decoding.actions import Action
from nde_talf.decoding.device_tree import DeviceTree
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.policies.fixed import Shaped
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.rules.batch import Nodes, accept_law, trees_of
from nde_talf.decoding.rules.specinfer import SpecInfer
from nde_talf.decoding.rules.traversal import weights_of
from nde_talf.decoding.sampling import Rng
from nde_talf.decoding.testing import exact_law
from tests.decoding.laws import distance, target_law, tokens_law
from tests.decoding.tables import KINDS, Tables, V, emitted, scored
from tests.decoding.wide_rows import rows

RULES = ["nss", "naive", "specinfer", "bv", "traversal"]
FLAT, UNEVEN, FORKED = ((), ()), (((),), ()), (((), ()), ())
BOTH = ("without_replacement", "traversal_without_replacement")
# Drafts whose mass ends before the draws do: one-hot, sparse and disjoint.
SHAPES = [
    *(
        (name, "without_replacement", FLAT, kind, 3)
        for name in BOTH
        for kind in ("random", "sparse", "disjoint", "one-hot q")
    ),
    *(
        (name, "without_replacement", FORKED, kind, 2)
        for name in BOTH
        for kind in ("random", "equal", "one-hot q")
    ),
    *(
        (name, "iid", UNEVEN, kind, 2)
        for name in ("specinfer", "traversal", "nss")
        for kind in ("random", "sparse")
    ),
    *(("nss", trees, UNEVEN, "sparse", 2) for trees in ("top_k", "without_replacement")),
    ("nss", "top_k", FLAT, "random", 3),
    *((name, "iid", UNEVEN, "random", 2) for name in ("naivetree", "spectr", "khisti")),
]


def error(policy, name: str, tables: Tables, length: int) -> float:
    """Of the law of what a step on the device emits."""
    found = tokens_law(
        tables,
        lambda rng: emitted(scored(tables, policy, rng, device=True), VERIFIERS[name], rng),
        length,
    )
    return distance(found, target_law(tables, length))


@pytest.mark.parametrize("name,trees,shape,kind,vocabulary", SHAPES, ids=str)
def test_trees_of_a_fixed_shape_have_the_targets_law(name, trees, shape, kind, vocabulary):
    tables = Tables(kind, seed=3, vocabulary=vocabulary)
    assert error(Shaped(shape, trees), name, tables, 2 if shape == FLAT else 3) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "policy,vocabulary", [(Beam(2, 2, 3), 3), (Beam(3, 3, 5), 2)], ids=["wide", "deep"]
)
def test_beams_have_the_targets_law(policy, vocabulary, kind):
    assert (
        error(policy, "nss", Tables(kind, seed=3, vocabulary=vocabulary), policy.depth + 1) < 1e-9
    )


VERDICTS = [
    *(
        (name, Delayed(Action(2, 0, 2)), 2)
        for name in (*RULES, "naivetree", "khisti", "gbv")
        if name not in ("naive", "bv")
    ),
    *((name, Delayed(Action(1, 0, 3)), 2) for name in ("naive", "bv")),
    *((name, Shaped(FLAT, "without_replacement"), V) for name in BOTH),
]


@pytest.mark.parametrize(
    "name,policy,vocabulary", VERDICTS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_verdicts_have_the_law_of_the_rule_on_the_host(name, policy, vocabulary):
    """Of the tree, the node accepted last and the token, not only of what is emitted."""
    tables = Tables("random", seed=5, vocabulary=vocabulary)

    def verdict(rng, device: bool):
        tree = scored(tables, policy, rng, device)
        tokens = emitted(tree, VERIFIERS[name], rng)
        host = tree.to_host() if device else tree
        return tuple(host.tokens), tuple(map(tuple, host.children)), tokens

    assert (
        distance(
            exact_law(lambda rng: verdict(rng, False)), exact_law(lambda rng: verdict(rng, True))
        )
        < 1e-9
    )


def weights(batch, carried):
    """Of all nodes: traversal's, or with what probability SpecInfer accepts each of a node's draws
    first.
    """
    if carried:
        found = weights_of(batch)
        return [x[0] for x in (found.w0, found.c, found.keep)]
    laws = torch.zeros(batch.tokens.shape[1], batch.max_draws + 1, dtype=torch.float64)
    for node in batch.parents[0, 1:].unique():
        at = node[None]
        laws[node] = accept_law(SpecInfer(), Nodes(batch.p(at), batch.q(at), *batch.children(at)))[
            0
        ][0]
    return [laws]


@pytest.mark.parametrize("kind", ["flat", "peaked", "one-hot", "equal"])
@pytest.mark.parametrize("carried", [False, True])
def test_weights_in_float32_are_those_of_float64(kind, carried):
    """At a vocabulary of 150,000, some of whose draws coincide."""
    p, q = rows(kind, 12)
    q = torch.where(q < q.topk(4).values[:, -1:], 1e-6 * q, q)
    q = q / q.sum(-1, keepdim=True)
    trees = []
    for dtype in (torch.float32, torch.float64):
        rng, tree = Rng.seeded(0), DeviceTree(0, q[0].to(dtype))
        for level, children in enumerate((1, 3, 1, 1)):
            if level:
                for tip in tree.tips:
                    tree.q[tip] = q[tip].to(dtype)
            tree.draw(children, rng)
        tree.p = p[: len(tree)].to(dtype)
        trees.append(tree)
    single, double = trees
    assert torch.equal(single.tokens, double.tokens)
    assert len(single.first.unique()) < len(single) == 11
    for found, right in zip(*(weights(trees_of(tree), carried) for tree in trees), strict=True):
        torch.testing.assert_close(
            found[single.first.unique()], right[single.first.unique()], atol=1e-4, rtol=1e-4
        )
    for name in ("traversal", "gbv") if carried else ("specinfer", "nss"):
        for seed in range(5):
            assert single.commit(*VERIFIERS[name](single, Rng.seeded(seed))).read().tokens[-1] >= 0
