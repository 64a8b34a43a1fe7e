"""Labels from text are those of the rule on enumerated drafts, and of super-trees on average."""

from itertools import product

import pytest
import torch

from nde_talf.data.traces.text_labels import text_labels, text_rows
from nde_talf.decoding.actions import TREE_INDEX, Action
from nde_talf.decoding.rules.labels.traversal import path_weights
from nde_talf.decoding.super_tree import super_tree_layout
from tests.decoding.laws import expected_block_efficiency

V = 3
PATH = TREE_INDEX[Action(1, 0, 2)]


def chain(seed):
    """Transition rows p, q [V, V] of a target and a draft that see one token back."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.softmax(1.5 * torch.randn(2, V, V, generator=generator), -1)
    return p, q


def labels(p, q, tokens, root, rule="specinfer"):
    """Labels [233] of a rule at a position of a text that ends after `tokens`."""
    rows = text_rows(p[tokens], q[tokens], tokens.roll(-1))
    rows.given[-1], rows.ratio[-1] = 0, 0
    return text_labels(rows, torch.tensor([root]))[rule][0].double()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_over_all_texts_they_are_the_mean_of_super_trees(seed):
    p, q = chain(seed)
    texts = torch.tensor([(0, *text) for text in product(range(V), repeat=3)])
    chances = p[texts[:, :-1], texts[:, 1:]].double().prod(1)
    exact = sum(c * labels(p, q, text, 0) for c, text in zip(chances, texts, strict=True))
    layout, count = super_tree_layout(), 4000
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(count, len(layout), dtype=torch.long)
    for row in range(1, len(layout)):
        drawn = q[tokens[:, layout.parents[row]]]
        tokens[:, row] = torch.multinomial(drawn, 1, generator=generator)[:, 0]
    inner = tokens[:, : layout.inner]
    sampled = expected_block_efficiency(p[inner], q[inner], tokens, "specinfer").mean(0)
    trees = ((1, 0, 1), (1, 0, 3), (4, 0, 1), (2, 0, 2), (3, 1, 2), (4, 0, 3), (2, 2, 1))
    at = [TREE_INDEX[Action(*tree)] for tree in trees]
    assert exact[at].tolist() == pytest.approx(sampled[at].tolist(), rel=0.015)


def test_over_all_texts_traversals_are_exact_on_a_path():
    """Against the weights min(1, w p / q) over all drafts."""
    p, q = chain(0)
    texts = torch.tensor([(0, *text) for text in product(range(V), repeat=4)])
    rows = [x[texts[:, :-1], texts[:, 1:]].double() for x in (p, q)]
    each = torch.stack([labels(p, q, text, 0, "traversal") for text in texts])
    mean = rows[0].prod(1) @ each[:, TREE_INDEX[Action(1, 0, 4)]]
    weights = path_weights(*rows)[:, 1:].sum(1)
    assert float(mean) == pytest.approx(1 + float(rows[1].prod(1) @ weights), rel=1e-6)


def test_nothing_is_accepted_after_the_end_of_a_text():
    p, q = chain(3)
    made = labels(p, q, torch.tensor([0, 1, 2]), 2)
    overlap = float(torch.minimum(p[2], q[2]).sum())
    assert float(made[TREE_INDEX[Action(1, 0, 8)]]) == pytest.approx(1 + overlap)
