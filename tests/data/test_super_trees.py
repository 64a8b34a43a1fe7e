"""Labels of super-trees from real models are the same in chunks of any size."""

import pytest
import torch

from nde_talf.data.traces.super_trees import Prefix, labels, super_trees
from nde_talf.decoding.names import LABELLED
from nde_talf.decoding.sampling.rng import SamplingSetting, warp
from nde_talf.decoding.super_tree import super_tree_layout
from tests.decoding.laws import expected_block_efficiency
from tests.decoding.pairs import tiny_pair

pytestmark = pytest.mark.slow

SETTING, LAYOUT = SamplingSetting(0.8), super_tree_layout()
CONTEXT, ROOTS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]), torch.tensor([4, 4, 7, 7])


@pytest.mark.parametrize("chunk", [29, 600, 5000])
@torch.inference_mode()
def test_labels_in_chunks_are_labels_of_all_rows_at_once(chunk):
    target, draft = tiny_pair(11, noise=0.06)
    prefixes = [Prefix(model, CONTEXT) for model in (target, draft)]
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(len(ROOTS), len(LAYOUT), generator=generator, dtype=torch.float64)
    trees = super_trees(*prefixes, ROOTS, LAYOUT, SETTING, uniforms, 300)
    p, q = warp(target.logits(trees.h_p), SETTING), warp(draft.logits(trees.h_q), SETTING)
    chunked = labels(trees, target, draft, SETTING, LABELLED, LAYOUT, chunk)
    for name in LABELLED:
        whole = expected_block_efficiency(p, q, trees.tokens, name)
        torch.testing.assert_close(chunked[name].double(), whole, atol=1e-4, rtol=1e-5)
