"""EAGLE-3's head takes features of three layers, learns, comes back from disk, and is refused where
it would not mean what it says.

What it shares with EAGLE's is tried on both in test_head.py, test_packing.py and test_token_law.py.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.papers.talf import after_ranks
from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.checksums import write_checksums
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.policies.salf import Salf
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.draft_training.eagle3 import Eagle3Head, three_layers
from nde_talf.draft_training.evaluate import held_out_report
from nde_talf.draft_training.export import load_head, save_head
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.draft_training.losses import HeadReadout, distribution_loss
from nde_talf.draft_training.settings import HeadConfig, TalfLoss
from nde_talf.draft_training.train_head import build_head, fit_head
from tests.decoding.pairs import tiny_model
from tests.draft_training.heads import (
    check_law,
    family_target,
    random_eagle3,
    random_head,
    tiny_target,
)

TINY = HeadConfig(
    features="three", loss=TalfLoss(k=2, depth=3), roots=4, steps=40, batch=4, warm_up=2
)
LAYOUT = {
    "fc.weight",
    "norm.weight",
    "lm_head.weight",
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(
        f"midlayer.{name}.weight"
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    ),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target(layers=4)


def test_the_layers_are_three_of_the_targets_in_ascending_order():
    assert three_layers(32) == (2, 16, 29) and three_layers(7) == (2, 3, 4)  # vLLM's default
    for count in range(2, 8):
        layers = three_layers(count)
        assert (
            sorted(set(layers)) == list(layers)
            and len(layers) == 3
            and layers[0] >= 0
            and layers[-1] <= count
        )
    with pytest.raises(UserError, match="1 layer"):
        three_layers(1)


@torch.no_grad()
def test_layers_features_come_with_the_same_pass_and_leave_nothing_behind(target):
    tokens, positions = torch.randint(29, (2, 6)), torch.arange(6)[None].expand(2, -1)

    def hooks():
        return [(*block._forward_hooks, *block._forward_pre_hooks) for block in target.body.layers]

    before = hooks()
    states = target.reader((0, 1, 3, 4))(tokens, positions, None, None)
    assert hooks() == before
    final, layers = target.parts(states, (0, 1, 3, 4))
    assert torch.equal(final, target.hidden(tokens, positions, None, None))
    theirs = target.body(tokens, output_hidden_states=True).hidden_states
    for mine, reference in zip(
        layers.split(16, -1)[:3], (theirs[0], theirs[1], theirs[3]), strict=True
    ):
        torch.testing.assert_close(mine, reference)
    torch.testing.assert_close(
        target.body.norm(layers[..., -16:]), final
    )  # the last one is that before the final norm


def test_a_drafter_without_such_features_gets_the_plain_pass(target):
    for drafter in (None, LMDrafter(target), EagleDrafter(random_head(target))):
        assert (
            SpeculativeDecoder(
                target, drafter, Autoregressive(), VERIFIERS["naive"]
            ).session.forward
            == target.hidden
        )
    with pytest.raises(UserError, match="layers 2, 5"):
        target.reader((2, 5))


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_the_loss_of_a_readout_of_its_own_is_autograds(chunk):
    torch.manual_seed(0)
    lm_head, labels, weights = torch.randn(31, 8), torch.randn(13, 8), torch.rand(13)
    draft, own = torch.randn(13, 8, requires_grad=True), torch.randn(31, 8, requires_grad=True)
    slow = -((labels @ lm_head.T).softmax(-1) * (draft @ own.T).log_softmax(-1)).sum(-1)
    fast, agree = distribution_loss(draft, labels, HeadReadout(lm_head, own=own, chunk=chunk))
    torch.testing.assert_close(fast, slow)
    assert (
        agree.tolist() == ((draft @ own.T).argmax(-1) == (labels @ lm_head.T).argmax(-1)).tolist()
    )
    ours, theirs = (
        torch.autograd.grad((loss * weights).sum(), (draft, own)) for loss in (fast, slow)
    )
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_training_lowers_the_loss_and_trains_every_weight(target, tmp_path, optimizer):
    steps = torch.randint(1, 3, (24, 16), generator=torch.Generator().manual_seed(0))
    rows = steps.cumsum(1) % target.vocab_size
    config = replace(TINY, optimizer=optimizer)
    head, fresh = fit_head(target, rows, config, tmp_path), build_head(target, config).eval()
    assert isinstance(head, Eagle3Head)
    after, before = (
        held_out_report(one, target, TokenRows.plain(rows), k=2) for one in (head, fresh)
    )
    assert all(one < 0.7 * other for one, other in zip(after["kl"], before["kl"], strict=True))
    assert (
        after["overlap"][0] > before["overlap"][0]
        and after["agreement"][0] > before["agreement"][0]
    )
    unmoved = [
        name
        for name, weight in head.state_dict().items()
        if torch.equal(weight, fresh.state_dict()[name])
    ]
    assert not unmoved
    agree, _, _ = after_ranks(head, target, TokenRows.plain(rows), ranks=2, stride=4)
    assert agree[0].mean() > 0


def test_a_head_comes_back_in_eagle_3s_layout_and_decodes(target, tmp_path):
    head = random_eagle3(target)
    folder = save_head(head, tmp_path / "head")
    weights, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    assert set(weights) == LAYOUT
    assert weights["fc.weight"].shape == (16, 48) and weights[
        "midlayer.self_attn.k_proj.weight"
    ].shape == (8, 32)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert (
        config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
        and config["draft_vocab_size"] == target.vocab_size
    )
    drafter = EagleDrafter.from_pretrained(folder, target)
    assert all(
        torch.equal(weight, drafter.head.state_dict()[name])
        for name, weight in head.state_dict().items()
    )
    plain = SpeculativeDecoder(target, None, Autoregressive(), VERIFIERS["specinfer"])
    decoder = SpeculativeDecoder(target, drafter, Delayed(Action(2, 1, 2)), VERIFIERS["specinfer"])
    texts = [
        one.generate([3, 1, 4], 24, SamplingSetting(0.0), Rng.seeded(0)).tokens
        for one in (plain, decoder)
    ]
    assert texts[0] == texts[1]


POLICIES = {
    "delayed": lambda: Delayed(Action(2, 0, 1)),
    "beam": lambda: Beam(k=2, depth=2, nodes=3),
    "salf": lambda: Salf(nodes=3, batch=2, threshold=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy,rule",
    [("delayed", "specinfer"), ("delayed", "traversal"), ("beam", "nss"), ("salf", "nss")],
)
def test_the_enumerated_law_of_the_loop_is_the_targets(policy, rule):
    target = tiny_model(4, layers=2)
    check_law(
        SpeculativeDecoder(
            target, EagleDrafter(random_eagle3(target)), POLICIES[policy](), VERIFIERS[rule]
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["beam", "salf"])
def test_greedy_decoding_over_trees_of_chosen_tokens_is_autoregressive(target, policy):
    plain = SpeculativeDecoder(target, None, Autoregressive(), VERIFIERS["greedy"])
    drafter = EagleDrafter(random_eagle3(target))
    fast = SpeculativeDecoder(
        target, drafter, POLICIES[policy](), VERIFIERS["greedy"], SamplingSetting(1.0)
    )
    for seed in range(3):
        prompt = torch.randint(
            29, (4 + seed,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        texts = [
            one.generate(prompt, 40, SamplingSetting(0.0), Rng.seeded(seed)).tokens
            for one in (plain, fast)
        ]
        assert texts[0] == texts[1]


def test_the_exported_fc_takes_features_as_they_are(target, tmp_path):
    head = random_eagle3(target)
    head.sizes.copy_(torch.tensor([0.5, 2.0, 16.0]).repeat_interleave(16))
    fc = load_file(save_head(head, tmp_path / "head") / "model.safetensors")["fc.weight"]
    features = torch.randn(5, 48)
    torch.testing.assert_close(features @ fc.T, head.combine(features))


def test_another_target_is_refused(target, tmp_path):
    folder = save_head(random_eagle3(target), tmp_path / "head")
    with pytest.raises(UserError, match="another lm_head"):
        EagleDrafter.from_pretrained(folder, tiny_target(layers=4, seed=3))
    shallow = tiny_target(layers=2)
    shallow.lm_head.weight.data.copy_(target.lm_head.weight)
    with pytest.raises(UserError, match=r"layers \[1, 2, 3\].*\[0, 1, 2\]"):
        EagleDrafter.from_pretrained(folder, shallow)
    config = json.loads((folder / "config.json").read_text())
    config["draft_head"]["kind"] = "eagle"
    (folder / "config.json").write_text(json.dumps(config))
    write_checksums(folder)
    with pytest.raises(UserError, match="layers"):
        load_head(folder, target)


@pytest.mark.parametrize(
    "other",
    [
        "loss.name=hass",
        "loss.name=eagle",
        "labels.name=features",
        "labels.name=top_m",
        "features=four",
    ],
)
def test_what_does_not_go_with_three_layers_is_refused(other):
    key, value = other.split("=")
    with pytest.raises(UserError, match=rf"draft\.{other}"):
        replace(TINY, **{key.removesuffix(".name"): {"name": value} if ".name" in key else value})


def test_a_warm_start_of_the_other_kind_is_refused(target, tmp_path):
    one, three = (
        save_head(random_head(target), tmp_path / "one"),
        save_head(random_eagle3(target), tmp_path / "three"),
    )
    assert isinstance(build_head(target, replace(TINY, warm_start=str(three))), Eagle3Head)
    for features, folder in (("three", one), ("final", three)):
        with pytest.raises(UserError, match="warm_start"):
            build_head(target, replace(TINY, features=features, warm_start=str(folder)))


def test_the_layer_is_llamas_whatever_the_target():
    target = family_target("qwen3")
    with pytest.raises(UserError, match=r"draft\.layer=llama"):
        Eagle3Head(target)
    assert random_eagle3(target, layer="llama").config.model_type == "llama"
