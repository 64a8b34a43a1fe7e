"""The whole loop is lossless: joint law of the first tokens through real (tiny) models, drafters,
policies and verifiers.

A chi-square test of sampled generations on a narrow vocabulary, where draft and residual sharing a
random stream would show; `decoding/test_loop_law.py` enumerates every random decision.
"""

import pytest
import torch

from nde_talf import VERIFIERS, Action, Delayed, NeuralPolicy, Selector, SpeculativeDecoder
from nde_talf.decoding.actions import TREES
from tests.decoding.tiny_loop import TARGET, chi_square, drafter
from tests.selector.examples import TABLE, schema

pytestmark = pytest.mark.long


def policy(name, verifier):
    if name == "selector":
        torch.manual_seed(4)
        selector = Selector(schema(16, 16, verifier))
        with torch.no_grad():  # opinions that change with the context, and shallow trees
            selector.network.mlp[-1].weight.mul_(30)
            selector.network.mlp[-1].bias[torch.tensor([tree.depth > 3 for tree in TREES])] = -1e3
        return NeuralPolicy(selector, TABLE)
    return Delayed(Action(3, 1, 1) if "delayed" in VERIFIERS[verifier].trees else Action(1, 1, 2))


SOME = ("specinfer", "naivetree", "bv", "traversal")  # the others see p and q alike
CASES = [
    (verifier, policy_name, drafter_name)
    for verifier in VERIFIERS
    if verifier != "greedy"
    for policy_name in ("static", "selector")
    for drafter_name in ("lm", "head")
    if verifier in SOME or (policy_name, drafter_name) == ("static", "lm")
    if policy_name == "static" or "delayed" in VERIFIERS[verifier].trees  # what selectors draft
]


@pytest.mark.parametrize("verifier,policy_name,drafter_name", CASES)
def test_sampled_tokens_follow_the_target(verifier, policy_name, drafter_name):
    decoder = SpeculativeDecoder(
        TARGET, drafter(drafter_name), policy(policy_name, verifier), VERIFIERS[verifier]
    )
    assert chi_square(decoder) > 1e-3
