"""The losses are what they are written as: by hand, by their plain forms, and by autograd."""

import doctest
import math

import pytest
import torch
from torch.nn import functional as F

import nde_talf.draft_training.losses
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.registry import LOSSES
from nde_talf.draft_training.losses import (
    HeadReadout,
    distribution_loss,
    tree_loss,
)
from nde_talf.draft_training.settings import (
    EagleLoss,
    HassLoss,
    HeadConfig,
    TalfLoss,
)
from nde_talf.draft_training.target_trees import chains
from nde_talf.draft_training.train_head import HeadModule
from tests.draft_training.heads import batch_of, random_head, tiny_target

# lm_head = identity: features are logits
P, Q = [0.5, 0.3, 0.2], [0.6, 0.1, 0.3]
LABELS, FEATURES = (torch.tensor([x]).log() for x in (P, Q))
EYE = HeadReadout(torch.eye(3))
WEIGHTS = [
    TalfLoss(),
    HassLoss(),
    HassLoss(regression=0.7, classification=1.3, distillation=0.4, top=4),
    EagleLoss(),
    EagleLoss(classification=0.1),
    EagleLoss(regression_norm="l1"),
    *(TalfLoss(objective=objective) for objective in ("total_variation", "log_acceptance", "lk")),
    HassLoss(objective="lk", eta=1.0, classification=2.0, top=4),
    EagleLoss(objective="log_acceptance"),
]


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(nde_talf.draft_training.losses).failed == 0
    assert doctest.testmod(nde_talf.draft_training.losses).attempted == 13


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("scale,cap", [(1.0, None), (0.25, None), (0.5, 2.0)])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_the_fused_losses_are_the_plain_ones_with_autograds_gradient(weights, chunk, scale, cap):
    torch.manual_seed(0)
    lm_head, labels = torch.randn(31, 8), torch.randn(13, 8)
    features, each = torch.randn(13, 8, requires_grad=True), torch.rand(13)
    how = {"scale": scale, "cap": cap}
    slow, agree = LOSSES[weights.name](
        features, labels, HeadReadout(lm_head, **how), weights, plain=True
    )
    fast, same = LOSSES[weights.name](
        features, labels, HeadReadout(lm_head, **how, chunk=chunk), weights
    )
    torch.testing.assert_close(fast, slow)
    assert (
        agree.tolist()
        == same.tolist()
        == ((features @ lm_head.T).argmax(-1) == (labels @ lm_head.T).argmax(-1)).tolist()
    )
    one, two = (torch.autograd.grad((loss * each).sum(), features)[0] for loss in (fast, slow))
    torch.testing.assert_close(one, two, atol=1e-5 * max(1, float(two.abs().max())), rtol=1e-4)


@pytest.mark.parametrize("plain", [False, True])
def test_objectives_of_acceptance_by_hand(plain):
    """Of p = 0.5, 0.3, 0.2 and q = 0.6, 0.1, 0.3: a = 0.5 + 0.1 + 0.2 = 0.8."""
    kl = 0.5 * math.log(0.5 / 0.6) + 0.3 * math.log(0.3 / 0.1) + 0.2 * math.log(0.2 / 0.3)
    w = math.exp(-2 * 0.8)
    expected = {
        "total_variation": 0.2,
        "log_acceptance": -math.log(0.8),
        "lk": w * kl + (1 - w) * 0.2,
    }
    for objective, value in expected.items():
        for loss, factor in (
            (TalfLoss(objective=objective, eta=2.0), 1),
            (EagleLoss(objective=objective, eta=2.0), 10),
        ):
            found, agree = distribution_loss(FEATURES, LABELS, EYE, loss, plain)
            assert found.item() == pytest.approx(factor * value, rel=1e-5) and agree.tolist() == [
                True
            ]
    hass = HassLoss(objective="total_variation", classification=1, distillation=2, top=1)
    assert distribution_loss(FEATURES, LABELS, EYE, hass, plain).loss.item() == pytest.approx(
        0.2 - 2 * 0.5 * math.log(0.6)
    )


def test_the_acceptance_of_a_draft_vocabulary_is_that_of_the_full_law():
    """Q = 0.4, 0.6 on the first and the last token: a = 0.4 + 0.2, however p is renormalised for
    the cross-entropy.
    """
    own = torch.nn.Parameter(torch.eye(3)[[0, 2]])
    readout = HeadReadout(torch.eye(3), own=own, vocabulary=torch.tensor([0, 2]))
    features = torch.tensor([[0.4, 9.0, 0.6]]).log()
    loss = distribution_loss(features, LABELS, readout, TalfLoss(objective="total_variation")).loss
    torch.testing.assert_close(loss, torch.tensor([0.4]))
    (slope,) = torch.autograd.grad(loss.sum(), own)
    assert slope.abs().max() > 0
    outside = torch.tensor(
        [[0.2, 0.5, 0.3]]
    ).log()  # the most likely token cannot be drafted: others still can
    torch.testing.assert_close(
        distribution_loss(features, outside, readout, TalfLoss(objective="total_variation")).loss,
        torch.tensor([0.5]),
    )
    lk = distribution_loss(features, outside, readout, TalfLoss(objective="lk")).loss
    torch.testing.assert_close(lk, torch.tensor([(1 - math.exp(-1.5)) * 0.5]))


def test_roots_count_by_their_weights():
    torch.manual_seed(0)
    readout, features, labels = (
        HeadReadout(torch.randn(31, 8)),
        torch.randn(5, 2, 8),
        torch.randn(5, 2, 8),
    )
    weights = torch.tensor([0.5, 0.0, 0.25, 0.0, 0.25])
    each = distribution_loss(
        features.flatten(0, 1), labels.flatten(0, 1), readout, plain=True
    ).loss.view(5, 2)
    loss, figures = tree_loss([features], [labels], readout, TalfLoss(), [weights])
    torch.testing.assert_close(loss, (each.sum(1) * weights).sum())
    torch.testing.assert_close(figures["loss_depth_0"], loss / 2)
    broken = features.clone()
    broken[1] = float("nan")
    torch.testing.assert_close(
        tree_loss([broken], [labels], readout, TalfLoss(), [weights])[0], loss
    )
    assert tree_loss([features], [labels], readout, TalfLoss(), [weights * 0])[0] == 0


@torch.no_grad()
def test_hass_is_regression_classification_and_distillation_along_the_text():
    target = tiny_target()
    head, tokens = (
        random_head(target),
        torch.randint(29, (1, 8), generator=torch.Generator().manual_seed(0)),
    )
    config = HeadConfig(loss=HassLoss(depth=2), roots=0, chain_fraction=0.0)
    readout = HeadReadout(target.lm_head.weight)
    features = target.hidden(tokens, torch.arange(8)[None], None, None)
    roots = torch.arange(1, 6)  # two known tokens after each
    trees = chains(tokens, features, roots[None], 2)
    assert trees.levels[0].tokens[0, :, 0].tolist() == tokens[0, 2:7].tolist()
    first, second = head.tree_features(tokens, features, roots, trees.levels)
    guesses = ((first[0, :6], features[0, 1:7]), (second[0, :, 0], features[0, 2:7]))
    expected = sum(
        (
            10 * distribution_loss(guess, truth, readout, plain=True).loss
            + 10
            * distribution_loss(
                guess, truth, readout, HassLoss(classification=0, distillation=1), plain=True
            ).loss
            + F.smooth_l1_loss(guess, truth, reduction="none").mean(-1)
        ).mean()
        for guess, truth in guesses
    )
    loss, figures = HeadModule(head, config).loss(batch_of(tokens), 0)
    torch.testing.assert_close(loss, expected)
    assert list(figures) == [
        "loss_depth_0",
        "loss_depth_1",
        "agreement_depth_0",
        "agreement_depth_1",
    ]
    eagle, figures = HeadModule(head, HeadConfig(loss=EagleLoss(classification=0.1))).loss(
        batch_of(tokens), 0
    )
    guess, truth = guesses[0]
    cross = distribution_loss(guess, truth, readout, plain=True).loss.mean()
    torch.testing.assert_close(eagle, 0.1 * cross + F.smooth_l1_loss(guess, truth))
    assert list(figures) == ["loss_depth_0", "agreement_depth_0"]


@pytest.mark.parametrize(
    "settings,words",
    [
        ({"loss": {"name": "medusa"}}, r"draft\.loss\.name=medusa: there is none"),
        ({"loss": {"name": "talf", "k": "four"}}, r"draft\.loss\.k=four"),
        ({"loss": {"name": "talf", "objective": "none"}}, r"draft\.loss\.objective=none"),
        ({"labels": {"name": "disk"}}, r"draft\.labels\.name=disk"),
        ({"strategy": "fsdp"}, r"draft\.strategy=fsdp"),
        ({"layer": "mamba"}, r"draft\.layer=mamba"),
        ({"optimizer": "sgd"}, r"draft\.optimizer=sgd"),
        ({"precision": "16-mixed"}, r"draft\.precision=16-mixed.*bf16-mixed"),
    ],
)
def test_settings_that_do_not_exist_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        HeadConfig(**settings)
