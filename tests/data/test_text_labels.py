"""Labels from text are those of the rule on enumerated drafts, and of super-trees on average."""

from itertools import product

import pytest
import torch

from nde_talf.data.traces.text_labels import TextRows, text_labels, text_rows
from nde_talf.decoding.actions import TREE_INDEX, Action
from nde_talf.decoding.super_tree import super_tree_layout
from tests.decoding.laws import expected_block_efficiency

V = 3


def chain(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Transition rows p, q [V, V] of a target and a draft that see one token back."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.softmax(1.5 * torch.randn(2, V, V, generator=generator), -1)
    return p, q


def expected_over_texts(p: torch.Tensor, q: torch.Tensor, length: int, name: str) -> torch.Tensor:
    """Labels [233] at token 0, in expectation over all texts of so many tokens after it."""
    total = torch.zeros(233, dtype=torch.float64)
    for text in product(range(V), repeat=length):
        tokens = torch.tensor([0, *text])
        chance = float(p[tokens[:-1], tokens[1:]].double().prod())
        rows = text_rows(p[tokens], q[tokens], tokens.roll(-1))
        rows.given[-1], rows.ratio[-1] = 0, 0
        total += chance * text_labels(rows, torch.tensor([0]))[name][0].double()
    return total


@pytest.mark.parametrize("seed", [0, 1])
def test_over_all_texts_they_are_the_mean_of_super_trees(seed):
    p, q = chain(seed)
    exact = expected_over_texts(p, q, 3, "specinfer")
    layout, count = super_tree_layout(), 4000
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(count, len(layout), dtype=torch.long)
    for row in range(1, len(layout)):
        drawn = q[tokens[:, layout.parents[row]]]
        tokens[:, row] = torch.multinomial(drawn, 1, generator=generator)[:, 0]
    inner = tokens[:, : layout.inner]
    sampled = expected_block_efficiency(p[inner], q[inner], tokens, "specinfer").mean(0)
    for tree in ((1, 0, 1), (1, 0, 3), (4, 0, 1), (2, 0, 2), (3, 1, 2), (4, 0, 3), (2, 2, 1)):
        index = TREE_INDEX[Action(*tree)]
        assert float(exact[index]) == pytest.approx(float(sampled[index]), rel=0.015), tree
    assert float(exact[TREE_INDEX[Action(4, 0, 1)]]) > float(exact[TREE_INDEX[Action(1, 0, 1)]])


def test_on_a_path_traversal_is_block_verification():
    """Two tokens, worked out: kept with min(1, R1) and min(1, R1, R2), R the products of q / p."""
    ratio = torch.tensor([0.5, 4.0, 0.0], dtype=torch.float64)
    given = ratio.clamp(max=1)[:, None].repeat(1, 4)
    rows = TextRows(torch.full((3, 4), 0.6).double(), given, torch.full((3,), 0.3).double(), ratio)
    made = text_labels(rows, torch.tensor([0]))
    path = TREE_INDEX[Action(1, 0, 2)]
    assert float(made["specinfer"][0, path]) == pytest.approx(1 + 0.6 + 0.5 * 0.6)
    # Products 0.5 and 2: both 0.5 by their running minimum; token by token 0.5 and 0.5 * 1.
    assert float(made["traversal"][0, path]) == pytest.approx(1.9 * (1 + 0.5 + 0.5) / 2)
    rows = rows._replace(ratio=torch.tensor([4.0, 0.5, 0.0], dtype=torch.float64))
    rows.given[0], rows.given[1] = 1, 0.5
    made = text_labels(rows, torch.tensor([0]))
    assert float(made["specinfer"][0, path]) == pytest.approx(1 + 0.6 + 0.6)
    assert float(made["traversal"][0, path]) == pytest.approx(2.2 * 3 / 2.5)


def test_nothing_is_accepted_after_the_end_of_a_text():
    p, q = chain(3)
    tokens = torch.tensor([0, 1, 2])
    rows = text_rows(p[tokens], q[tokens], tokens.roll(-1))
    rows.given[-1], rows.ratio[-1] = 0, 0
    made = text_labels(rows, torch.tensor([2]))["specinfer"][0]
    overlap = float(torch.minimum(p[2], q[2]).sum())
    assert float(made[TREE_INDEX[Action(1, 0, 8)]]) == pytest.approx(1 + overlap)
