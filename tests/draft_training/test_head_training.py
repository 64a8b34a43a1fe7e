"""The loss is Algorithm 1's, training lowers it, resumes exactly and stops at what is not finite."""

from dataclasses import replace

import pytest
import torch

from benchmarks.papers.talf import after_ranks
from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.common.errors import UserError
from nde_talf.draft_training.evaluate import held_out_report
from nde_talf.draft_training.head import EagleHead
from nde_talf.draft_training.losses import HeadReadout, node_metrics, talf_loss, tree_loss
from nde_talf.draft_training.settings import HassLoss, HeadConfig, TalfLoss
from nde_talf.draft_training.target_trees import TreeSpec, target_beam
from nde_talf.draft_training.train_head import HeadModule, build_head, fit_head
from nde_talf.draft_training.trainer import CHECKPOINT
from tests.draft_training.heads import KillBefore, batch_of, predictable_rows, random_head

TINY = HeadConfig(
    loss=TalfLoss(k=2, depth=3), roots=4, steps=10, batch=2, warm_up=2, checkpoint_seconds=0
)


@pytest.fixture(scope="module")
def rows(target):
    return predictable_rows(target, 16)


def test_the_loss_sums_over_a_trees_nodes_and_averages_over_roots():
    torch.manual_seed(0)
    lm_head = torch.randn(31, 8)
    shapes = [(2, 5, 1, 8), (2, 3, 4, 8), (2, 3, 4, 8)]
    draft, target = ([torch.randn(shape) for shape in shapes] for _ in range(2))
    total = 0.0
    for guess, truth in zip(draft, target, strict=True):
        losses = plain(guess.flatten(0, 2), truth.flatten(0, 2), lm_head).view(guess.shape[:3])
        total += losses.sum(2).mean()
    weights = [torch.full(shape[:2], 1 / (shape[0] * shape[1])) for shape in shapes]
    loss, figures = tree_loss(draft, target, HeadReadout(lm_head), TalfLoss(), weights)
    torch.testing.assert_close(loss, total)
    by_depth = [figures[f"loss_depth_{depth}"] for depth in range(3)]
    torch.testing.assert_close(by_depth[0] + 4 * by_depth[1] + 4 * by_depth[2], loss)


def test_metrics_of_equal_features_are_those_of_equal_distributions():
    features, lm_head = torch.randn(6, 8), torch.randn(31, 8)
    metrics = node_metrics(features, features, HeadReadout(lm_head, chunk=4))
    assert metrics.agree.all()
    torch.testing.assert_close(metrics.kl, torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(metrics.overlap, torch.ones(6))


def plain(features, labels, lm_head):
    """The loss of TALF, written out."""
    return talf_loss(features, labels, HeadReadout(lm_head), plain=True).loss


def test_all_roots_and_no_chain_steps_is_the_loss_of_algorithm_1(target, rows):
    head = random_head(target)
    module = HeadModule(head, replace(TINY, roots=0, chain_fraction=0))
    tokens = rows[:2, :6]
    loss, _ = module.loss(batch_of(tokens), 0)
    trees = target_beam(target, tokens, TreeSpec(2, 3), torch.arange(1, 6), None)
    outputs = head.tree_features(tokens, trees.features, trees.roots, trees.levels)
    outputs[0] = outputs[0][:, :, None]
    labels = [trees.features[:, 1:, None], *trees.labels]
    total = 0.0
    for row in range(2):
        for root in range(4):  # the last token's prediction lies outside the row
            for guess, truth in zip(outputs, labels, strict=True):
                total += plain(guess[row, root], truth[row, root], target.lm_head.weight).sum()
    torch.testing.assert_close(loss, total / 8)


@pytest.mark.parametrize("loss", ["talf", "hass"])
def test_a_choice_of_roots_leaves_the_expected_loss_as_it_is(target, rows, loss):
    batch = batch_of(
        TokenRows(
            rows[:2, :8],
            torch.rand(2, 8, generator=torch.Generator().manual_seed(3)) < 0.8,
            rows[:2, :8] * 0,
        )
    )
    weights = HassLoss(depth=2) if loss == "hass" else TalfLoss(k=2, depth=2)
    config = replace(TINY, loss=weights, roots=0, chain_fraction=0)
    head = random_head(target)
    whole, _ = HeadModule(head, config).loss(batch, 0)
    module = HeadModule(head, replace(config, roots=2))
    with torch.no_grad():
        drawn = torch.stack([module.loss(batch, step)[0] for step in range(120)])
    assert 0 < abs(drawn.mean() - whole) < 4 * drawn.std() / 120**0.5


@pytest.mark.slow
def test_training_lowers_the_loss_and_touches_nothing_but_the_head(target, rows, tmp_path):
    before = {name: weight.clone() for name, weight in target.module.state_dict().items()}
    config = replace(TINY, steps=40, batch=4)
    head = fit_head(target, rows, config, tmp_path)
    trained = held_out_report(head, target, TokenRows.plain(rows[:8]), k=2)
    fresh = held_out_report(
        build_head(target, config).eval(), target, TokenRows.plain(rows[:8]), k=2
    )
    assert all(one < 0.7 * other for one, other in zip(trained["kl"], fresh["kl"], strict=True))
    assert (
        trained["overlap"][0] > fresh["overlap"][0]
        and trained["agreement"][0] > fresh["agreement"][0]
    )
    assert len(trained["overlap"]) == 5 and [
        len(ranks) for ranks in trained["agreement_by_rank"]
    ] == [2, 2]
    assert all(
        torch.equal(weight, before[name]) for name, weight in target.module.state_dict().items()
    )
    assert fresh == held_out_report(
        build_head(target, config).eval(), target, TokenRows.plain(rows[:8]), k=2
    )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_killed_run_resumes_to_the_weights_of_an_undisturbed_one(
    target, rows, tmp_path, optimizer
):
    config = replace(TINY, optimizer=optimizer)
    whole = fit_head(target, rows, config, tmp_path / "whole")
    with pytest.raises(ProcessLookupError):
        fit_head(target, rows, config, tmp_path / "killed", callbacks=[KillBefore(6)])
    resumed = fit_head(target, rows, config, tmp_path / "killed")
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)
    )
    finished = fit_head(target, rows, config, tmp_path / "killed")
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), finished.parameters(), strict=True)
    )


def test_the_checkpoint_holds_the_head_and_not_the_target(target, rows, tmp_path):
    head = fit_head(target, rows, TINY, tmp_path)
    saved = torch.load(tmp_path / CHECKPOINT, weights_only=True)["state_dict"]
    assert sorted(saved) == sorted(f"head.{name}" for name in head.state_dict())
    assert not list(tmp_path.glob(".*"))


def test_other_settings_do_not_continue_a_run(target, rows, tmp_path):
    fit_head(target, rows, TINY, tmp_path)
    with pytest.raises(UserError, match=r"other settings than those of now \(lr_adam\)"):
        fit_head(target, rows, replace(TINY, lr_adam=1e-4), tmp_path)


def test_a_fresh_head_is_a_pure_function_of_target_and_seed(target):
    first = build_head(target, TINY).state_dict()
    torch.rand(7)
    second = build_head(target, TINY).state_dict()
    other = EagleHead(target).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(UserError, match="sgd"):
        replace(TINY, optimizer="sgd")


@torch.no_grad()
def test_figures_behind_a_rank_are_those_of_the_sequence_with_that_token(target, rows):
    head, row = random_head(target), rows[:1]
    agree, confidence, right = after_ranks(head, target, TokenRows.plain(row), ranks=3, stride=6)
    assert agree.shape == confidence.shape == right.shape == (3, 3)
    root, place = 7, 1
    features = target.hidden(row, torch.arange(16)[None], None, None)
    states = head(row[:, 1 : root + 1], torch.arange(root)[None], None, None, features[:, :root])
    for rank, token in enumerate(target.logits(states[0, -1]).topk(3).indices):
        text = torch.cat([row[:, : root + 1], token.view(1, 1)], 1)
        fed = torch.cat([features[:, :root], states[:, -1:]], 1)
        q = target.logits(
            head(text[:, 1:], torch.arange(root + 1)[None], None, None, fed)[0, -1]
        ).softmax(-1)
        p = target.module(input_ids=text).logits[0, -1].softmax(-1)
        torch.testing.assert_close(confidence[rank, place], q.max(), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(right[rank, place], p[q.argmax()], atol=1e-5, rtol=1e-4)
        assert agree[rank, place] == (p.argmax() == q.argmax())
