"""The target's beams are those of an exhaustive search, however they are cut into passes."""

import itertools

import pytest
import torch

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.draft_training.model import tree_attention
from nde_talf.draft_training.model.tree_attention import tree_features
from nde_talf.draft_training.targets import target_trees
from nde_talf.draft_training.targets.target_trees import target_beam
from nde_talf.draft_training.training.head_evaluation import held_out_report
from tests.draft_training.heads import random_head, tiny_target
from tests.refusal import refusal


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocabulary=11)


@torch.no_grad()
def brute_force(target, prefix, k, depth):
    """Levels 1..depth-1 as paths, most probable first: every child of every path kept is scored, by
    full passes.
    """
    levels, beam = [], {(): 0.0}
    for _ in range(depth - 1):
        scored = {}
        for path, joint in beam.items():
            logits = target.module(torch.tensor([[*prefix, *path]]), use_cache=False).logits[0, -1]
            log_p = logits.log_softmax(-1).tolist()
            scored |= {(*path, token): joint + one for token, one in enumerate(log_p)}
        beam = dict(sorted(scored.items(), key=lambda item: -item[1])[:k])
        levels.append(list(beam))
    return levels


def paths(trees, row, root):
    ancestors, above = [], [()]
    for level in trees.levels:
        nodes = torch.stack([level.tokens, level.parents], -1)[row, root].tolist()
        above = [(*above[parent], token) for token, parent in nodes]
        ancestors.append(above)
    return ancestors


@pytest.mark.parametrize("rows", [1, 7, 128])
def test_the_beam_is_the_k_best_by_joint_probability(target, rows, monkeypatch):
    monkeypatch.setattr(target_trees, "ROWS", rows)
    tokens = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(0))
    trees = target_beam(target, tokens, 3, 4, torch.arange(1, 6), None)
    assert trees.roots.tolist() == [[1, 2, 3, 4, 5]] * 2
    for row, (place, root) in itertools.product(range(2), enumerate(trees.roots[0].tolist())):
        assert paths(trees, row, place) == brute_force(
            target, tokens[row, : root + 1].tolist(), 3, 4
        )


def test_nodes_at_and_below_an_end_of_the_text_are_not_evaluated():
    model = tiny_target(vocabulary=11)
    rows = TokenRows.plain(torch.arange(64).view(2, 32) % 11)
    whole = held_out_report(head := random_head(model), model, rows, k=2)
    model.chat_ends = frozenset(range(11))
    alone = held_out_report(head, model, rows, k=2)
    for name in ("agreement", "kl", "overlap"):
        assert alone[name][0] == pytest.approx(whole[name][0]) and not any(alone[name][1:])


def test_trees_that_pass_the_context_or_the_vocabulary_are_refused(target):
    for length, tree, words in ((255, (2, 3), "context"), (8, (12, 2), "k=12")):
        with refusal(words):
            target_beam(target, torch.zeros(1, length).long(), *tree, torch.tensor([1]), None)


def test_attention_in_parts_has_the_same_outputs_and_gradients(target, monkeypatch):
    tokens = torch.randint(11, (2, 40), generator=torch.Generator().manual_seed(0))
    trees = target_beam(target, tokens, 3, 3, torch.arange(1, 40), None)
    results = []
    for scores in (2**28, 2000):
        monkeypatch.setattr(tree_attention, "SCORES", scores)
        head = random_head(target).train()
        outputs = tree_features(head, tokens, trees.features, trees.roots, trees.levels)
        total = sum(level.square().sum() for level in outputs)
        slopes = torch.autograd.grad(total, list(head.parameters()))
        results.append([*outputs, *slopes])
    for one, other in zip(*results, strict=True):
        size = one.abs().max()
        torch.testing.assert_close(one / size, other / size, atol=1e-4, rtol=1e-4)
