"""The losses are what they are written as: by hand, written out, and by autograd."""

import doctest
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import nde_talf.draft_training.training.losses
from nde_talf.draft_training.targets.target_trees import target_features
from nde_talf.draft_training.training.head_training import HeadModule
from nde_talf.draft_training.training.losses import (
    HeadReadout,
    eagle_loss,
    regression,
    talf_loss,
    tree_loss,
)
from nde_talf.draft_training.training_settings import EagleLoss, HassLoss, HeadConfig, TalfLoss
from tests.draft_training.heads import (
    batch_of,
    random_eagle3,
    random_head,
    tiny_target,
    written_out,
)
from tests.draft_training.one_by_one import plain_path

# lm_head = identity: features are logits
P, Q = [0.5, 0.3, 0.2], [0.6, 0.1, 0.3]
LABELS, FEATURES = (torch.tensor([x]).log() for x in (P, Q))
EYE, ONCE = HeadReadout(torch.eye(3)), torch.ones(1)
WEIGHTS = [TalfLoss(), HassLoss(classification=1.3, distillation=0.4, top=4), EagleLoss()]


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(nde_talf.draft_training.training.losses) == (0, 11)


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("scale,cap", [(0.25, None), (0.5, 2.0)])
@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda weights: weights.name)
def test_the_fused_cross_entropy_is_the_written_one_with_autograds_gradient(
    weights, chunk, scale, cap
):
    torch.manual_seed(0)
    lm_head, labels = torch.randn(31, 8), torch.randn(13, 8)
    features, each = torch.randn(13, 8, requires_grad=True), torch.rand(13)
    readout = HeadReadout(lm_head, scale=scale, cap=cap, chunk=chunk)
    total, slow, agree = written_out(features, labels, readout, each, weights)
    fast_total, fast, same = talf_loss(features, labels, readout, each, weights)
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(fast_total, total)
    most_likely = (features @ lm_head.T).argmax(-1) == (labels @ lm_head.T).argmax(-1)
    assert agree.tolist() == same.tolist() == most_likely.tolist()
    one, two = (torch.autograd.grad(3 * loss, features)[0] for loss in (fast_total, total))
    torch.testing.assert_close(one, two, atol=1e-5 * max(1, float(two.abs().max())), rtol=1e-4)


def test_the_papers_regression_is_the_mean_distance():
    weights = EagleLoss(classification=0.0, regression_norm="l1")
    distance = (FEATURES - LABELS).abs().mean(-1)
    torch.testing.assert_close(eagle_loss(FEATURES, LABELS, EYE, ONCE, weights).loss, distance)
    assert regression(FEATURES.double(), LABELS, "l1").dtype == torch.float64


def test_roots_count_by_their_weights():
    torch.manual_seed(0)
    readout, features, labels = HeadReadout(torch.randn(31, 8)), *torch.randn(2, 5, 2, 8)
    weights = torch.tensor([0.5, 0.0, 0.25, 0.0, 0.25])
    rows = features.flatten(0, 1), labels.flatten(0, 1), readout, torch.ones(10)
    each = written_out(*rows, TalfLoss()).loss.view(5, 2)
    loss, figures = tree_loss([features], [labels], readout, TalfLoss(), [weights])
    torch.testing.assert_close(loss, (each.sum(1) * weights).sum())
    torch.testing.assert_close(figures["loss_depth_0"], loss / 2)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = tree_loss([features], [labels], readout, TalfLoss(), [weights])
    torch.testing.assert_close(mixed, (loss, figures))
    broken = features.clone()
    broken[1] = float("nan")
    torch.testing.assert_close(
        tree_loss([broken], [labels], readout, TalfLoss(), [weights])[0], loss
    )
    assert tree_loss([features], [labels], readout, TalfLoss(), [weights * 0])[0] == 0


THREE = partial(random_eagle3, norms=("fc_norm", "norm_output"))


@torch.no_grad()
@pytest.mark.parametrize("make", [random_head, random_eagle3, THREE])
@pytest.mark.parametrize("loss", [HassLoss(depth=2), EagleLoss()], ids=lambda loss: loss.name)
def test_hass_and_eagle_are_regression_classification_and_distillation_along_the_text(loss, make):
    """On the target's features and then on the head's own; of three layers' without regression."""
    target = tiny_target(layers=4)
    head = make(target)
    if head.feature_layers:
        loss = replace(loss, regression=0)
    tokens = torch.randint(29, (1, 8), generator=torch.Generator().manual_seed(0))
    along, features = target_features(target, tokens, None, layers=head.feature_layers)
    expected, agreed = torch.zeros(()), []
    for drafted in range(loss.depth):
        paths = [tokens[0, : 2 + n] for n in range(drafted, 6)]
        step = torch.stack([plain_path(head, path, features[0], drafted) for path in paths])
        truth = along[0, 1 + drafted : 7]
        p, log_q = target.logits(truth).softmax(-1), head.logits(step).log_softmax(-1)
        y = loss.classification * p
        if loss.distillation:
            y = y + loss.distillation * p * (p >= p.topk(10).values[:, -1:])
        expected += -(y * log_q).sum(-1).mean() + loss.regression * F.smooth_l1_loss(step, truth)
        agreed.append((p.argmax(-1) == log_q.argmax(-1)).float().mean())
    settings = {"features": "three" if head.feature_layers else "final", "roots": 0}
    config = HeadConfig(loss=loss, **settings, chain_fraction=0.0)
    found, figures = HeadModule(head, config).loss(batch_of(tokens), 0)
    torch.testing.assert_close(found, expected)
    assert [figures[f"agreement_depth_{d}"] for d in range(loss.depth)] == agreed
    torch.testing.assert_close(figures["accepted_length"], 1 + torch.stack(agreed).cumprod(0).sum())
