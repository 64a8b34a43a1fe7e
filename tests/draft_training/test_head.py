"""Every kind of head: its two ways to run are one function, and decoding with it is decoding with
the target.
"""

import copy

import pytest
import torch

from nde_talf import (
    VERIFIERS,
    Action,
    Autoregressive,
    Delayed,
    DySpec,
    EagleDrafter,
    Rng,
    Salf,
    SamplingSetting,
    SpeculativeDecoder,
)
from nde_talf.decoding.models.forward import onednn
from nde_talf.decoding.models.forward.onednn import has_onednn
from nde_talf.draft_training.export.head_format import save_head
from nde_talf.draft_training.model.tree_attention import tree_features
from nde_talf.draft_training.targets.target_trees import target_features
from tests.decoding.laws import distance
from tests.decoding.pairs import tiny_model
from tests.decoding.tiny_loop import VOCABULARY, law_of, target_law
from tests.draft_training.heads import (
    FAMILIES,
    family_target,
    random_eagle3,
    random_head,
    same,
    tiny_target,
)
from tests.draft_training.one_by_one import branch_by_branch, plain_path, random_levels

GREEDY = SamplingSetting(0.0)
DRAFTED = [2, 3, 5, 11, 28]
ONE_NORM = ("norm_before_residual", "norm_before_fc", "norm_output")
KINDS = {family: lambda family=family: random_head(family_target(family)) for family in FAMILIES}
KINDS |= {f"{name}, tied": lambda name=name: random_head(family_target(name, tied=True))
          for name in ("qwen2", "gemma3_text")}  # fmt: skip
KINDS |= {
    "eagle, some tokens": lambda: random_head(tiny_target(), vocabulary=DRAFTED),
    "eagle3": lambda: random_eagle3(tiny_target(layers=4)),
    "eagle3, some tokens": lambda: random_eagle3(tiny_target(layers=4), vocabulary=DRAFTED),
    "eagle3.1": lambda: random_eagle3(tiny_target(layers=4), norms=("fc_norm", "norm_output")),
    "eagle3.1, one norm before fc": lambda: random_eagle3(tiny_target(layers=4), norms=ONE_NORM),
}


@pytest.fixture(scope="module", params=KINDS)
def head(request):
    return KINDS[request.param]()


@pytest.fixture
def tokens():
    return torch.randint(29, (2, 9), generator=torch.Generator().manual_seed(0))


def features_of(head, tokens):
    """The target's features [B, L, W] along `tokens` [B, L] that `head` takes."""
    with torch.no_grad():
        return target_features(head.target, tokens, None, layers=head.feature_layers)[1]


def assert_close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        size = other.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(one / size, other / size, atol=1e-5, rtol=0)


@pytest.mark.slow
@torch.no_grad()
def test_training_forward_of_trees_is_decoding_forward_branch_by_branch(head, tokens, monkeypatch):
    features, roots = features_of(head, tokens), torch.tensor([1, 4, 8])
    levels = random_levels(2, 3, 3, 3, 29)
    trees = tree_features(head, tokens, features, roots, levels)
    assert_close(trees, branch_by_branch(head, tokens, features, roots, levels))
    monkeypatch.setattr(onednn, "LEAST", 1)
    for way in ("plain", "packed")[: 1 + has_onednn()]:
        monkeypatch.setattr(head.target.native, "way", way)
        drafting = EagleDrafter(copy.deepcopy(head)).head
        assert drafting.native is not None and head.native is None
        assert drafting.fc.weight.requires_grad  # it trains on
        assert_close(trees, branch_by_branch(drafting, tokens, features, roots, levels))


@pytest.mark.slow
@pytest.mark.parametrize("detach", [False, True])
def test_gradients_of_trees_are_those_of_each_path_run_alone(head, tokens, detach):
    tokens, weights = tokens[:1, :7], torch.randn(1, 2, 2, head.config.hidden_size)
    features = features_of(head, tokens)
    roots, levels = torch.tensor([2, 6]), random_levels(1, 2, 2, 3, 29)
    outputs = tree_features(head, tokens, features, roots, levels, detach)[-1]
    trained = [weight for weight in head.parameters() if weight.requires_grad]
    ours = torch.autograd.grad((outputs * weights).sum(), trained, allow_unused=True)
    total = 0.0
    for r, root in enumerate(roots.tolist()):
        for node in range(2):
            path, at = [], node
            for level in reversed(levels):
                path, at = [level.tokens[0, r, at].item(), *path], level.parents[0, r, at].item()
            whole = torch.cat([tokens[0, : root + 1], torch.tensor(path)])
            output = plain_path(head, whole, features[0], len(path))
            total = total + (output * weights[0, r, node]).sum()
    theirs = torch.autograd.grad(total, trained, allow_unused=True)
    pairs = [(a, b, b.abs().max()) for a, b in zip(ours, theirs, strict=True) if b is not None]
    equal = [torch.allclose(a / size, b / size, atol=1e-5, rtol=0) for a, b, size in pairs]
    assert all(equal) is not detach


@pytest.mark.slow
def test_decoding_with_the_exported_head_is_greedy_decoding(head, tmp_path):
    target = head.target
    drafter = EagleDrafter.from_pretrained(save_head(head, tmp_path / "head"), target)
    assert same(drafter.head, head) and not drafter.head.training
    assert drafter.vocab_size == target.vocab_size
    assert [*map(type, (drafter.head.vocabulary, head.vocabulary))].count(torch.Tensor) != 1
    plain = SpeculativeDecoder(target, None, Autoregressive(), VERIFIERS["specinfer"])
    for rule, policy in (
        ("specinfer", Delayed(Action(3, 1, 2))),
        ("greedy", Salf(nodes=3, batch=2, threshold=0.5)),
    ):
        decoder = SpeculativeDecoder(target, drafter, policy, VERIFIERS[rule])
        for prompt in ([7], [3, 1, 4, 1, 5]):  # of one token: the head has nothing at it
            texts = [
                one.generate(prompt, 40, GREEDY, Rng.seeded(0)).tokens for one in (plain, decoder)
            ]
            assert texts[0] == texts[1]


POLICIES = {
    "delayed": Delayed(Action(2, 0, 1)),
    "salf": Salf(nodes=3, batch=2, threshold=0.5),
    "dyspec": DySpec(nodes=3),
}
RULES = [("delayed", rule) for rule in ("specinfer", "traversal", "gbv")]
RULES += [("salf", "nss"), ("dyspec", "without_replacement")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind,vocabulary", [(random_eagle3, None), (random_eagle3, [1, 2]), (random_head, [1, 2])]
)
@pytest.mark.parametrize("policy,rule", RULES)
def test_the_enumerated_law_of_the_loop_is_the_targets(policy, rule, kind, vocabulary):
    target = tiny_model(VOCABULARY, layers=2)
    drafter = EagleDrafter(kind(target, vocabulary=vocabulary))
    decoder = SpeculativeDecoder(target, drafter, POLICIES[policy], VERIFIERS[rule])
    assert distance(law_of(decoder, 2), target_law(2, target=target)) < 1e-5
