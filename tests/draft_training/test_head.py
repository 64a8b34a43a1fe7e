"""The head's two ways to run are one function, and decoding with it is decoding with the target."""

import random

import pytest
import torch

from nde_talf.decoding.actions import Action
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.policies.base import DecodingState
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed, draft_delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import RAW, Rng, SamplingSetting, warp
from nde_talf.draft_training.head import EagleHead
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.draft_training.target_trees import TreeSpec, target_beam, target_features
from tests.draft_training.heads import random_eagle3, random_head
from tests.draft_training.one_by_one import branch_by_branch, plain_path, random_levels

GREEDY = SamplingSetting(0.0)
WARM = SamplingSetting(0.8, 0.95)


@pytest.fixture(scope="module", params=[random_head, random_eagle3], ids=["eagle", "eagle3"])
def make(request):
    """A function that makes a head of one kind for a target."""
    return request.param


def features_of(head: EagleHead, tokens: torch.Tensor) -> torch.Tensor:
    """The target's features [B, L, W] along `tokens` [B, L] that `head` takes."""
    return target_features(head.target, tokens, None, layers=head.feature_layers)[1]


@torch.no_grad()
def test_training_forward_of_trees_is_decoding_forward_branch_by_branch(target, make):
    head = make(target)
    tokens = torch.randint(target.vocab_size, (2, 9))
    features = features_of(head, tokens)
    roots = torch.tensor([1, 4, 8])
    levels = random_levels(2, 3, 3, 3, target.vocab_size)
    ours = head.tree_features(tokens, features, roots, levels)
    theirs = branch_by_branch(head, tokens, features, roots, levels)
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.shape == reference.shape
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("detach", [False, True])
def test_gradients_of_trees_are_those_of_each_path_run_alone(target, detach, make):
    head = make(target)
    tokens = torch.randint(target.vocab_size, (1, 7))
    with torch.no_grad():
        features = features_of(head, tokens)
    roots, levels = torch.tensor([2, 6]), random_levels(1, 2, 2, 3, target.vocab_size)
    weights = torch.randn(1, 2, 2, target.vocab_size)

    def gradients(loss):
        return torch.autograd.grad(loss, list(head.parameters()))

    ours = gradients(
        (
            head.logits(head.tree_features(tokens, features, roots, levels, detach)[-1]) * weights
        ).sum()
    )
    total = 0.0
    for r, root in enumerate(roots.tolist()):
        for node in range(2):
            path, at = [], node
            for level in reversed(levels):
                path, at = [level.tokens[0, r, at].item(), *path], level.parents[0, r, at].item()
            whole = torch.cat([tokens[0, : root + 1], torch.tensor(path)])
            total = (
                total
                + (
                    head.logits(plain_path(head, whole, features[0], len(path)))
                    * weights[0, r, node]
                ).sum()
            )
    reference = gradients(total)
    pairs = [(a, b, b.abs().max()) for a, b in zip(ours, reference, strict=True)]
    equal = [torch.allclose(a / scale, b / scale, atol=1e-5, rtol=0) for a, b, scale in pairs]
    assert all(equal) is not detach


def test_unseen_tokens_do_not_reach_a_tree(target, make):
    head = make(target)
    tokens = torch.randint(target.vocab_size, (1, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % target.vocab_size
    roots, levels = torch.tensor([4]), random_levels(1, 1, 2, 2, target.vocab_size)
    one, two = (
        head.tree_features(row, features_of(head, row), roots, levels)[-1]
        for row in (tokens, changed)
    )
    torch.testing.assert_close(one, two)


def recomputed_q(
    drafter: EagleDrafter, committed: list[int], path: list[int], setting: SamplingSetting
):
    """Q behind `committed` and then the drafted `path`, from scratch."""
    whole = torch.tensor([*committed, *path])
    features = features_of(drafter.head, torch.tensor([committed]))[0]
    return warp(drafter.head.logits(plain_path(drafter.head, whole, features, len(path))), setting)


class Watched(Delayed):
    """A policy that draws a random delayed tree, expands its leaves too, and compares every q with
    one from scratch.
    """

    def __init__(self, target):
        super().__init__(Action(2, 0, 1))
        self.target, self.random, self.compared, self.committed = target, random.Random(0), 0, []

    def draft(self, state: DecodingState, drafter, rng):
        action = Action(
            self.random.randint(1, 3), self.random.randint(0, 3), self.random.randint(0, 3)
        )
        tree = draft_delayed(action, state, drafter, rng)
        leaves = [node for node in range(1, len(tree)) if tree.q[node] is None]
        if leaves:
            drafter.expand(tree, leaves)
        assert self.committed[-1] == state.root and len(self.committed) == state.context
        for node in range(len(tree)):
            path, at = [], node
            while at:
                path, at = [tree.tokens[at], *path], tree.parents[at]
            expected = recomputed_q(drafter, self.committed, path, state.setting)
            torch.testing.assert_close(tree.q[node], expected, atol=1e-5, rtol=1e-4)
            self.compared += 1
        expected = recomputed_q(drafter, self.committed[:-1], [], state.setting)
        torch.testing.assert_close(drafter.previous.q, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            drafter.root.q, warp(drafter.head.logits(drafter.root.hidden), state.setting)
        )
        return tree


@pytest.mark.slow
@pytest.mark.parametrize("setting", [RAW, WARM], ids=str)
def test_q_at_every_node_is_a_recomputation_from_scratch_through_acceptances_and_rejections(
    target, setting, make
):
    drafter, policy = EagleDrafter(make(target)), Watched(target)
    decoder = SpeculativeDecoder(target, drafter, policy, VERIFIERS["specinfer"])
    prompt, accepted, steps = [3, 1, 4, 1, 5], [], 0
    policy.committed = list(prompt)
    for step in decoder.stream(prompt, setting, Rng.seeded(0)):
        if isinstance(step, tuple):
            policy.committed.append(step[0])
            continue
        policy.committed += step.tokens
        accepted.append(step.tau)
        steps += 1
        if steps == 25:
            break
    assert policy.compared > 100 and max(accepted) >= 1 and min(accepted) == 0


@pytest.mark.slow
def test_greedy_decoding_with_a_head_is_autoregressive_greedy(target, make):
    plain = SpeculativeDecoder(target, None, Autoregressive(), VERIFIERS["specinfer"])
    generator = torch.Generator().manual_seed(0)
    for seed, action in enumerate([Action(1, 0, 4), Action(3, 1, 2), Action(4, 0, 3)]):
        decoder = SpeculativeDecoder(
            target, EagleDrafter(make(target)), Delayed(action), VERIFIERS["specinfer"]
        )
        for length in (1, 6):  # of one token: the head has nothing at it
            prompt = torch.randint(target.vocab_size, (length,), generator=generator).tolist()
            expected = plain.generate(prompt, 60, GREEDY, Rng.seeded(seed)).tokens
            assert decoder.generate(prompt, 60, GREEDY, Rng.seeded(seed)).tokens == expected


@torch.no_grad()
def test_a_deeper_tree_leaves_the_depths_above_as_they_are(target, make):
    head = make(target)
    tokens = torch.randint(target.vocab_size, (2, 8))
    trees = target_beam(
        target, tokens, TreeSpec(2, 4), torch.arange(1, 8), None, head.feature_layers
    )
    deep = head.tree_features(tokens, trees.features, trees.roots, trees.levels)
    shallow = head.tree_features(tokens, trees.features, trees.roots, trees.levels[:1])
    for a, b in zip(shallow, deep, strict=False):
        torch.testing.assert_close(a, b)
