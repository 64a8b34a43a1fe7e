"""The losses are what they are written as, by hand and by autograd."""

import math

import pytest
import torch
from torch.nn import functional as F

from decoding.common.errors import UserError
from draft_training.losses import TopLabels, fused_cross_entropy, reference_cross_entropy, regression, tree_loss
from draft_training.settings import HeadConfig, Terms
from draft_training.target_trees import chains, target_beam
from draft_training.train_head import HeadModule
from tests.draft_training.heads import batch_of, random_head, tiny_target

# lm_head = identity: features are logits
P, Q = [0.5, 0.3, 0.2], [0.6, 0.1, 0.3]
TARGET, DRAFT = (torch.tensor([x]).log() for x in (P, Q))
EYE = torch.eye(3)


@pytest.mark.parametrize("terms", [Terms(), Terms(0.1, 0.0), Terms(10, 10, top=1), Terms(0, 1, top=1)])
def test_classification_and_top_distillation_by_hand(terms):
    expected = terms.classification * (-0.5 * math.log(0.6) - 0.3 * math.log(0.1) - 0.2 * math.log(0.3))
    expected += terms.distillation * -0.5 * math.log(0.6)
    fused, agree = fused_cross_entropy(DRAFT, TARGET, EYE, terms=terms)
    torch.testing.assert_close(fused, torch.tensor([expected]))
    torch.testing.assert_close(reference_cross_entropy(DRAFT, TARGET, EYE, terms), torch.tensor([expected]))
    assert agree.tolist() == [True]


def test_regression_by_hand():
    # smooth L1: 0.5 x^2 within 1, |x| - 0.5 beyond; a mean over the feature
    draft, target = torch.tensor([[0.5, 3.0, 0.0]]), torch.tensor([[0.0, 0.0, -1.0]])
    torch.testing.assert_close(regression(draft, target), torch.tensor([(0.125 + 2.5 + 0.5) / 3]))


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_the_fused_gradient_is_autograds(chunk):
    torch.manual_seed(0)
    lm_head, target, terms = torch.randn(31, 8), torch.randn(13, 8), Terms(0.7, 1.3, top=4)
    draft, weights = torch.randn(13, 8, requires_grad=True), torch.rand(13)
    slow = reference_cross_entropy(draft, target, lm_head, terms)
    fast, _ = fused_cross_entropy(draft, target, lm_head, chunk, terms)
    torch.testing.assert_close(fast, slow)
    one, two = (torch.autograd.grad((loss * weights).sum(), draft)[0] for loss in (fast, slow))
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


def test_top_labels_of_the_whole_vocabulary_are_the_features():
    torch.manual_seed(0)
    lm_head, target, draft = torch.randn(31, 8), torch.randn(6, 8), torch.randn(6, 8)
    top = (target @ lm_head.T).softmax(-1).topk(31, -1)
    for terms in (Terms(), Terms(1, 2, top=5)):
        one, agree = fused_cross_entropy(draft, TopLabels(top.indices.int(), top.values), lm_head, 4, terms)
        two, same = fused_cross_entropy(draft, target, lm_head, 4, terms)
        torch.testing.assert_close(one, two)
        assert agree.tolist() == same.tolist()


def test_top_labels_leave_out_what_they_do_not_hold():
    cut = TopLabels(torch.tensor([[0, 1]]), torch.tensor([P[:2]]))
    draft = DRAFT.clone().requires_grad_()
    loss, _ = fused_cross_entropy(draft, cut, EYE)
    torch.testing.assert_close(loss, torch.tensor([-0.5 * math.log(0.6) - 0.3 * math.log(0.1)]))
    (slope,) = torch.autograd.grad(loss.sum(), draft)
    torch.testing.assert_close(slope, torch.tensor([[0.8 * q - p for q, p in zip(Q, [0.5, 0.3, 0.0], strict=True)]]))


def test_roots_count_by_their_weights():
    torch.manual_seed(0)
    lm_head, draft, target = torch.randn(31, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    weights = torch.tensor([0.5, 0.0, 0.25, 0.0, 0.25])
    each = reference_cross_entropy(draft.flatten(0, 1), target.flatten(0, 1), lm_head).view(5, 2)
    loss, levels, _ = tree_loss([draft], [target], lm_head, weights=[weights])
    torch.testing.assert_close(loss, (each.sum(1) * weights).sum())
    torch.testing.assert_close(levels[0], loss / 2)
    broken = draft.clone()
    broken[1] = float("nan")
    torch.testing.assert_close(tree_loss([broken], [target], lm_head, weights=[weights])[0], loss)
    assert tree_loss([draft], [target], lm_head, weights=[weights * 0])[0] == 0


@torch.no_grad()
def test_hass_is_regression_classification_and_distillation_along_the_text():
    target = tiny_target()
    head, tokens = random_head(target), torch.randint(29, (1, 8), generator=torch.Generator().manual_seed(0))
    config = HeadConfig(loss="hass", depth=2, roots=0, chain_fraction=0.0)
    terms = Terms(10, 10, 1)
    assert config.terms() == terms
    features = target.hidden(tokens, torch.arange(8)[None], None, None)
    roots = torch.arange(1, 6)  # two known tokens behind each
    trees = chains(tokens, features, roots[None], 2)
    assert trees.levels[0].tokens[0, :, 0].tolist() == tokens[0, 2:7].tolist()
    first, second = head.tree_features(tokens, features, roots, trees.levels)
    guesses = ((first[0, :6], features[0, 1:7]), (second[0, :, 0], features[0, 2:7]))
    expected = sum(
        (
            10 * reference_cross_entropy(guess, truth, target.lm_head.weight)
            + 10 * reference_cross_entropy(guess, truth, target.lm_head.weight, Terms(0, 1))
            + F.smooth_l1_loss(guess, truth, reduction="none").mean(-1)
        ).mean()
        for guess, truth in guesses
    )
    loss, levels, _ = HeadModule(head, config).loss(batch_of(tokens), 0)
    torch.testing.assert_close(loss, expected)
    assert len(levels) == 2
    eagle, levels, _ = HeadModule(head, HeadConfig(loss="eagle", classification_weight=0.1)).loss(batch_of(tokens), 0)
    guess, truth = guesses[0]
    cross = reference_cross_entropy(guess, truth, target.lm_head.weight).mean()
    torch.testing.assert_close(eagle, 0.1 * cross + F.smooth_l1_loss(guess, truth))
    assert len(levels) == 1


@torch.no_grad()
def test_talf_with_one_node_a_level_is_a_greedy_chain():
    target = tiny_target()
    tokens = torch.randint(29, (1, 8), generator=torch.Generator().manual_seed(0))
    trees = target_beam(target, tokens, 1, 3, torch.tensor([4]))
    text = tokens[:, :5]
    for level in trees.levels:
        best = target.module(input_ids=text).logits[:, -1:].argmax(-1)
        assert level.tokens.item() == best.item()
        text = torch.cat([text, best], 1)
    assert all(level.parents.item() == 0 for level in trees.levels)


def test_settings_that_do_not_exist_or_exclude_each_other_are_refused():
    head = random_head(tiny_target())
    for config, words in (
        (HeadConfig(loss="medusa"), "medusa"),
        (HeadConfig(labels="disk"), "disk"),
        (HeadConfig(loss="hass", labels="top_m"), "top_m"),
        (HeadConfig(strategy="fsdp"), "Muon"),
        (HeadConfig(depth=0), "1 or more"),
    ):
        with pytest.raises(UserError, match=words):
            HeadModule(head, config)
