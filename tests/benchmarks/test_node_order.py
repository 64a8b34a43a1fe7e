"""Node orders and mask tiles against the mask itself."""

import pytest
import torch

from nde_talf.evaluation.papers.blocks import depth_first, heavy_first, nonzero_blocks, reordered

ORDERS = {
    "as grown": lambda parents: list(range(len(parents))),
    "depth first": depth_first,
    "heavy first": heavy_first,
}


def random_parents(nodes: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [-1, *(int(torch.randint(node, (), generator=generator)) for node in range(1, nodes))]


def tiles_of_the_mask(parents: list[int], block: int) -> int:
    mask = torch.eye(len(parents))
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = (mask[node] + mask[parent]).clamp(max=1)
    padded = torch.nn.functional.pad(mask, (0, -len(parents) % block, 0, -len(parents) % block))
    return int((padded.unfold(0, block, block).unfold(1, block, block).sum((-1, -2)) > 0).sum())


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("block", [1, 4, 32])
def test_tiles_are_those_of_the_mask_in_every_order(name, block):
    for seed in range(5):
        parents = random_parents(50, seed)
        found = reordered(parents, ORDERS[name](parents))
        assert nonzero_blocks(found, block) == tiles_of_the_mask(found, block)
        if block == 1:  # no order changes the number of entries
            assert nonzero_blocks(found, 1) == nonzero_blocks(parents, 1)


def test_depth_first_follows_a_path_before_its_siblings():
    parents = [-1, 0, 0, 1, 1, 2]
    assert depth_first(parents) == [0, 1, 3, 4, 2, 5]
    assert heavy_first([-1, 0, 0, 2, 3]) == [0, 2, 3, 4, 1]
    assert reordered(parents, depth_first(parents)) == [-1, 0, 1, 1, 0, 4]


def test_depth_first_takes_no_more_tiles_on_breadth_first_trees():
    """Eight paths of eight, grown level by level as policies do."""
    parents = [-1, *(max(0, node - 8) for node in range(1, 65))]
    before = nonzero_blocks(parents, 8)
    assert nonzero_blocks(reordered(parents, depth_first(parents)), 8) < 0.6 * before


def test_an_order_that_is_none_is_an_error():
    with pytest.raises(ValueError, match="before its parent"):
        reordered([-1, 0, 1], [0, 2, 1])
