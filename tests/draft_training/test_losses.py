"""The losses are what they are written as: by hand, written out, and by autograd."""

import doctest

import pytest
import torch
from torch.nn import functional as F

import nde_talf.draft_training.losses
from nde_talf.draft_training.losses import (
    HeadReadout,
    eagle_loss,
    regression,
    talf_loss,
    tree_loss,
    written_out,
)
from nde_talf.draft_training.settings import EagleLoss, HassLoss, HeadConfig, TalfLoss
from nde_talf.draft_training.target_trees import chains, target_features
from nde_talf.draft_training.train_head import HeadModule
from tests.draft_training.heads import batch_of, random_eagle3, random_head, tiny_target
from tests.draft_training.one_by_one import plain_path

# lm_head = identity: features are logits
P, Q = [0.5, 0.3, 0.2], [0.6, 0.1, 0.3]
LABELS, FEATURES = (torch.tensor([x]).log() for x in (P, Q))
EYE, ONCE = HeadReadout(torch.eye(3)), torch.ones(1)
WEIGHTS = [TalfLoss(), HassLoss(classification=1.3, distillation=0.4, top=4), EagleLoss()]


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(nde_talf.draft_training.losses) == (0, 11)


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


@torch.no_grad()
def test_hass_is_regression_classification_and_distillation_along_the_text():
    target = tiny_target()
    head = random_head(target)
    tokens = torch.randint(29, (1, 8), generator=torch.Generator().manual_seed(0))
    config = HeadConfig(loss=HassLoss(depth=2), roots=0, chain_fraction=0.0)
    readout = HeadReadout(target.lm_head.weight)
    features = target.hidden(tokens, torch.arange(8)[None], None, None)
    roots = torch.arange(1, 6)  # two known tokens after each
    trees = chains(tokens, features, roots[None], 2)
    assert trees.levels[0].tokens[0, :, 0].tolist() == tokens[0, 2:7].tolist()
    first, second = head.tree_features(tokens, features, roots, trees.levels)
    guesses = ((first[0, :6], features[0, 1:7]), (second[0, :, 0], features[0, 2:7]))
    only_top = HassLoss(classification=0, distillation=1)
    expected = sum(
        (
            10 * written_out(guess, truth, readout, torch.ones(len(guess)), TalfLoss()).loss
            + 10 * written_out(guess, truth, readout, torch.ones(len(guess)), only_top).loss
            + F.smooth_l1_loss(guess, truth, reduction="none").mean(-1)
        ).mean()
        for guess, truth in guesses
    )
    loss, figures = HeadModule(head, config).loss(batch_of(tokens), 0)
    torch.testing.assert_close(loss, expected)
    names = [f"{what}_depth_{d}" for what in ("loss", "agreement") for d in (0, 1)]
    assert list(figures) == [*names, "accepted_length"]
    one, two = figures["agreement_depth_0"], figures["agreement_depth_1"]
    torch.testing.assert_close(figures["accepted_length"], 1 + one + one * two)
    plain = HeadModule(head, HeadConfig(loss=EagleLoss(classification=0.1)))
    eagle, _ = plain.loss(batch_of(tokens), 0)
    guess, truth = guesses[0]
    cross = written_out(guess, truth, readout, torch.ones(len(guess)), TalfLoss()).loss.mean()
    torch.testing.assert_close(eagle, 0.1 * cross + F.smooth_l1_loss(guess, truth))


@torch.no_grad()
@pytest.mark.parametrize("norms", [(), ("fc_norm", "norm_output")])
@pytest.mark.parametrize("loss", [HassLoss(depth=2, regression=0), EagleLoss(regression=0)])
def test_hass_and_eagle_without_regression_train_a_head_on_three_layers(loss, norms):
    """Cross-entropies along the text alone, on the target's features and then on the head's own."""
    target = tiny_target(layers=4)
    head = random_eagle3(target, norms=norms)
    tokens = torch.randint(29, (1, 8), generator=torch.Generator().manual_seed(0))
    along, features = target_features(target, tokens, None, layers=head.feature_layers)
    outputs = [plain_path(head, tokens[0, : 2 + n], features[0], 0) for n in range(6)]
    steps = [torch.stack(outputs)]
    if loss.depth == 2:
        paths = (plain_path(head, tokens[0, : 3 + n], features[0], 1) for n in range(5))
        steps.append(torch.stack([*paths]))
    expected = torch.zeros(())
    for drafted, step in enumerate(steps):
        p = target.logits(along[0, 1 + drafted : 7]).softmax(-1)
        y = loss.classification * p
        if loss.distillation:
            cutoff = p.topk(10).values[:, -1:]
            y = y + loss.distillation * p * (p >= cutoff)
        expected += -(y * head.logits(step).log_softmax(-1)).sum(-1).mean()
    config = HeadConfig(loss=loss, features="three", norms=norms, roots=0, chain_fraction=0.0)
    torch.testing.assert_close(HeadModule(head, config).loss(batch_of(tokens), 0)[0], expected)
