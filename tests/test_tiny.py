"""A first tour of speculative decoding, on models small enough to check everything by hand.

Read it from top to bottom.

A small model, the draft, guesses a tree of tokens. A large model, the target, looks at all of them
in one pass. A verifier accepts some of them such that what comes out is distributed exactly as the
target alone would have written it.
"""

from itertools import product

import pytest
import torch

from nde_talf import (
    VERIFIERS,
    Action,
    Autoregressive,
    Delayed,
    DraftTree,
    EagleDrafter,
    LMDrafter,
    NeuralPolicy,
    Rng,
    SamplingSetting,
    Selector,
    SpeculativeDecoder,
    TreePolicy,
    verifier,
    warp,
)
from nde_talf.decoding.super_tree import super_tree_layout
from nde_talf.decoding.testing import exact_law
from tests.decoding.pairs import tiny_pair
from tests.draft_training.heads import random_head
from tests.selector.examples import TABLE, schema

GREEDY, WARM = SamplingSetting(0.0), SamplingSetting(0.8, 0.95)  # temperature, and top-p
PROMPT = [7, 3, 11, 2]


@pytest.fixture(scope="module")
def pair():
    """Two Llamas with random weights over 32 tokens.

    The draft is the target plus a little noise: it often guesses right.
    """
    return tiny_pair(32, noise=0.02, hidden=32, layers=2)


# 1. Draft. A policy says which tree to draft; `Action(k, l1, l2)` is a trunk of l1 tokens, then k
# branches of l2 tokens each.


class Watched(TreePolicy):
    """A policy says `trees` and has a method `draft`.

    This one drafts as another does and remembers the trees.
    """

    def __init__(self, policy):
        self.policy, self.trees, self.drafted = policy, policy.trees, []

    def draft(self, state, drafter, rng):
        self.drafted.append(self.policy.draft(state, drafter, rng))
        return self.drafted[-1]


def test_a_policy_drafts_a_tree(pair):
    target, draft = pair
    watched = Watched(Delayed(Action(3, 1, 2)))
    decoder = SpeculativeDecoder(target, LMDrafter(draft), watched, VERIFIERS["specinfer"])
    text = decoder.generate(PROMPT, 12, WARM, Rng.seeded(0))
    assert (
        len(text.tokens) == 12 and len(text.steps) == len(watched.drafted) < 12
    )  # fewer passes of the target than tokens

    tree = watched.drafted[0]
    assert (
        tree.tokens[0] == text.tokens[0]
    )  # node 0, the root, is the last token that is certain; the prompt gave the first
    assert list(tree.parents[:2]) == [-1, 0]  # then the trunk
    assert len(tree) <= 1 + 1 + 3 * 2  # branches that begin with the same tokens share their nodes
    assert all(
        parent < node for node, parent in enumerate(tree.parents)
    )  # parents come before their children


# 2. Score. The target computes all nodes in one pass, as each node sees only its ancestors and
# itself.

#   0 ── 1 ── 4
# │    └─── 5      two tokens of trunk (0 is the root), and at both of them two branches of one
# token ├─── 2 └─── 3
MASK = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 0, 1, 0, 0, 0],
    [1, 0, 0, 1, 0, 0],
    [1, 1, 0, 0, 1, 0],
    [1, 1, 0, 0, 0, 1],
]


@torch.inference_mode()
def test_one_pass_with_a_mask_computes_every_path_of_a_tree(pair):
    target, _ = pair
    layout = super_tree_layout(2, 1, 1)
    assert layout.parents.tolist() == [-1, 0, 0, 0, 1, 1]
    assert layout.ancestors.int().tolist() == MASK

    tokens = torch.tensor([5, 9, 1, 4, 8, 2])
    sees = layout.ancestors
    mask = torch.zeros(6, 6).masked_fill(~sees, torch.finfo(torch.float32).min)[None, None]
    at_once = target.hidden(tokens[None], layout.depth[None], mask, None)[0]
    for node in range(6):
        path = tokens[sees[node]]  # the tokens from the root down to this node
        alone = target.hidden(path[None], torch.arange(len(path))[None], None, None)[0]
        torch.testing.assert_close(at_once[node], alone[-1], atol=1e-5, rtol=1e-5)


# 3. Verify. SpecInfer accepts a drafted token x with probability min(1, p(x) / q(x)). If it rejects
# x, it goes on with the residual, max(p - q, 0) made to sum to 1. `exact_law` runs code once for
# every outcome of its random decisions.


def test_a_rejected_token_is_replaced_from_the_residual():
    q = torch.tensor([1.0, 0.0, 0.0])  # the draft always says 0
    p = torch.tensor([0.5, 0.3, 0.2])  # the target says 0 half of the time
    after_0 = torch.tensor([1.0, 0.0, 0.0])  # and after it 0 again

    def verify(rng):
        tree = DraftTree.rooted(2, q)
        tree.add(0, 0)  # one child of the root: token 0
        tree.p = torch.stack([p, after_0])
        return verifier("specinfer")(tree, rng).token

    # Accepted (0.5): the target's own token after 0 is 0. Rejected (0.5): the residual is [0, 0.6,
    # 0.4].
    assert exact_law(verify) == pytest.approx({0: 0.5, 1: 0.3, 2: 0.2})


@pytest.mark.parametrize("rule", ["specinfer", "nss", "traversal"])
def test_speculative_text_has_exactly_the_law_of_the_target(rule):
    target, draft = tiny_pair(
        3, noise=0.3
    )  # a vocabulary of three: every text of two tokens can be enumerated
    decoder = SpeculativeDecoder(
        target, LMDrafter(draft), Delayed(Action(2, 0, 1)), VERIFIERS[rule]
    )
    law = exact_law(lambda rng: tuple(decoder.generate([0, 2, 1], 2, WARM, rng).tokens))

    for text in product(range(3), repeat=2):
        with torch.inference_mode():
            logits = target.module(torch.tensor([[0, 2, 1, *text]])).logits[0]
        first, second = warp(logits[2].double(), WARM), warp(logits[3].double(), WARM)
        assert law.get(text, 0.0) == pytest.approx(
            float(first[text[0]] * second[text[1]]), abs=1e-6
        )


# 4. Choose. The NDE selector looks at the context and picks the tree whose tokens are expected to
# come fastest.


def test_a_selector_chooses_trees_by_context(pair):
    target, draft = pair
    torch.manual_seed(0)
    selector = Selector(schema(32, 32))  # untrained: it has opinions, and no reasons for them
    with torch.no_grad():
        selector.network.mlp[-1].weight.mul_(30)
    policy = NeuralPolicy(selector, TABLE)
    decoder = SpeculativeDecoder(target, LMDrafter(draft), policy, VERIFIERS["specinfer"])
    text = decoder.generate(PROMPT, 40, GREEDY, Rng.seeded(0))
    assert text.tokens == greedy(target, 40) and len(policy.counts) > 1  # several different trees


# 5. Draft with a head. An EAGLE head is one layer on top of the target's own features; it takes the
# place of a draft model.


def test_a_head_drafts(pair):
    target, _ = pair
    decoder = SpeculativeDecoder(
        target, EagleDrafter(random_head(target)), Delayed(Action(2, 0, 2)), VERIFIERS["specinfer"]
    )
    assert decoder.generate(PROMPT, 20, GREEDY, Rng.seeded(0)).tokens == greedy(target, 20)


# 6. At temperature 0 the law of the target is one text, so that speculative decoding writes exactly
# this text.


def greedy(target, count: int) -> list[int]:
    """What transformers itself generates."""
    ids = torch.tensor([PROMPT])
    everything = target.module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return everything[0, len(PROMPT) :].tolist()


def test_at_temperature_0_speculative_text_is_greedy_text(pair):
    target, draft = pair
    alone = SpeculativeDecoder(target, None, Autoregressive(), VERIFIERS["specinfer"])
    decoder = SpeculativeDecoder(
        target, LMDrafter(draft), Delayed(Action(3, 2, 3)), VERIFIERS["specinfer"], WARM
    )
    plain, fast = (each.generate(PROMPT, 60, GREEDY, Rng.seeded(0)) for each in (alone, decoder))
    assert fast.tokens == plain.tokens == greedy(target, 60)
    assert fast.block_efficiency > 1.5 > plain.block_efficiency == 1  # tokens a pass of the target
