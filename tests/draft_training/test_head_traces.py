"""Super-trees that a draft head draws: their rows are what the head gives while decoding, and so
are their labels.
"""

import pytest
import torch

from nde_talf import DraftTree, EagleDrafter, SamplingSetting
from nde_talf.data.traces.super_trees import Prefix, super_trees
from nde_talf.decoding.sampling.rng import warp
from nde_talf.decoding.super_tree import super_tree_layout
from nde_talf.draft_training.head_draft import HeadDraft
from nde_talf.draft_training.model.eagle3 import Eagle3Head
from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.targets.target_trees import target_features
from tests.decoding.pairs import tiny_model

SETTING = SamplingSetting(0.8)
TRAJECTORY = torch.tensor([1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("kind", [EagleHead, Eagle3Head])
@torch.inference_mode()
def test_every_row_is_the_heads_while_decoding(kind):
    torch.manual_seed(0)
    head = kind(tiny_model(11, hidden=32, layers=4), "llama")
    layout, roots = super_tree_layout(2, 2, 2), torch.tensor([2, 5])
    target, draft = head.target, HeadDraft(head)
    above = Prefix(target, TRAJECTORY)
    prefix = draft.prefix(above)
    uniforms = torch.rand(
        2, len(layout), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    tokens, _, h_q = super_trees(above, prefix, roots, layout, SETTING, uniforms, 3)
    q = warp(draft.logits(h_q), SETTING)
    assert tokens.unique().numel() > 4
    drafter, layers = EagleDrafter(head), head.feature_layers
    features = target_features(target, TRAJECTORY[None], None, layers=layers)[1][0]
    for at, root in enumerate(roots.tolist()):
        for row in range(layout.inner):
            drafter.start(
                TRAJECTORY[:root].tolist(), int(TRAJECTORY[root]), features[:root], SETTING
            )
            assert torch.allclose(prefix.hidden[root - 1], drafter.previous.hidden, atol=1e-5)
            assert torch.allclose(prefix.hidden[root], drafter.root.hidden, atol=1e-5)
            tree, node = DraftTree.rooted(int(TRAJECTORY[root]), drafter.root.q), 0
            for token in tokens[at][layout.ancestors[row]][1:].tolist():
                node = tree.add(node, token)
                drafter.expand(tree, [node])
            assert torch.allclose(q[at, row], tree.q[node], atol=1e-5)
