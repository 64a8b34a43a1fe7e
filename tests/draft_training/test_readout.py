"""Targets whose logits are scaled (Granite) or soft-capped (Gemma 2): so are labels, losses,
figures and what a head drafts from.
"""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from nde_talf.draft_training.export.head_format import save_head
from nde_talf.draft_training.model.tree_attention import tree_features
from nde_talf.draft_training.targets.target_trees import target_features
from nde_talf.draft_training.training.head_training import HeadModule
from nde_talf.draft_training.training_settings import EagleLoss, HeadConfig, TalfLoss
from tests.decoding.families import V, family
from tests.draft_training.heads import batch_of, random_eagle3, random_head


@pytest.fixture(scope="module", params=["granite", "gemma-2"])
def target(request):
    return family(request.param)


@torch.no_grad()
@pytest.mark.parametrize(
    "make",
    [random_head, lambda target: random_eagle3(target, layer="llama")],
    ids=["eagle", "eagle3"],
)
def test_the_loss_of_a_training_step_is_to_the_targets_own_distribution(target, make):
    tokens = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(0))
    head = make(target)
    features = "three" if head.feature_layers else "final"
    talf = HeadConfig(loss=TalfLoss(depth=1), features=features, chain_fraction=0.5)
    loss, _ = HeadModule(head, talf).loss(batch_of(tokens), talf.steps - 1)
    first, _ = HeadModule(head, talf).loss(batch_of(tokens), 0)
    if head.feature_layers:
        torch.testing.assert_close(first, loss)
    else:  # a fresh head begins with EAGLE's loss
        eagle = HeadModule(head, HeadConfig(loss=EagleLoss()))
        torch.testing.assert_close(first, eagle.loss(batch_of(tokens), 0)[0])
        again = HeadModule(head, replace(talf, warm_start="head"))
        torch.testing.assert_close(again.loss(batch_of(tokens), 0)[0], loss)
    p = target.module(tokens, use_cache=False).logits.detach()[:, 1:-1].softmax(-1)
    features = target_features(target, tokens, None, layers=head.feature_layers)[1]
    q = head.logits(tree_features(head, tokens, features, torch.tensor([1]), [])[0][:, :-1])
    expected = F.cross_entropy(q.flatten(0, 1), p.flatten(0, 1))
    torch.testing.assert_close(loss, expected)


def test_an_exported_head_says_the_scale_that_vllm_reads(tmp_path):
    def config(head, name):
        return json.loads((save_head(head, tmp_path / name) / "config.json").read_text())

    assert config(random_head(family("granite")), "granite")["logit_scale"] == 2.0
    assert "logit_scale" not in config(
        random_eagle3(family("granite"), layer="llama"), "eagle3"
    )  # its own lm_head holds it
    assert config(random_head(family("gemma-2")), "gemma2")["attn_logit_softcapping"] is None
