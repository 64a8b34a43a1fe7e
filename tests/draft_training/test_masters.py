"""A head beside a target in bfloat16: its angles and its weights keep float32, and a float32 target
is cast once.
"""

from dataclasses import replace

import pytest
import torch

from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.export import load_head, save_head
from nde_talf.draft_training.precision import cast_once
from nde_talf.draft_training.settings import EagleLoss, HeadConfig, TalfLoss
from nde_talf.draft_training.train_head import HeadModule, build_head, fit_head
from tests.draft_training.heads import (
    FAMILIES,
    batch_of,
    family_target,
    random_eagle3,
    same,
    tiny_target,
)

TINY = HeadConfig(
    loss=TalfLoss(k=2, depth=2), roots=2, steps=3, batch=2, warm_up=1, precision="32-true"
)


def halved(target: CausalModel) -> CausalModel:
    return CausalModel(target.module.to(torch.bfloat16), target.name)


@pytest.mark.parametrize("family", FAMILIES)
def test_angles_at_8192_are_those_of_float32_beside_a_target_in_bfloat16(family):
    exact, coarse = (
        build_head(target, TINY)
        for target in (family_target(family), halved(family_target(family)))
    )
    at = torch.tensor([[0, 512, 2048, 8192]])
    for head in (coarse, coarse.to(torch.bfloat16).to(torch.float32)):
        for one, other in zip(
            head.angles(torch.zeros(1), at), exact.angles(torch.zeros(1), at), strict=True
        ):
            assert torch.equal(one, other)


def test_a_loaded_head_has_the_targets_dtype_but_tables_in_float32(tmp_path):
    target = halved(tiny_target())
    head = load_head(save_head(build_head(target, TINY), tmp_path / "head"), target)
    assert head.dtype == torch.bfloat16 and head.rotary.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("autocast", [True, pytest.param(False, marks=pytest.mark.law)])
def test_the_same_100_steps_beside_a_target_in_bfloat16_end_with_the_same_loss(rows, autocast):
    """At the SALF & TALF paper's rate, at which a weight of size 1 in bfloat16 would not move."""
    config = replace(TINY, loss=EagleLoss(), steps=100, optimizer="adamw", lr_adam=3e-4)
    batches, ended = [batch_of(rows[at : at + 2, :8]) for at in range(0, 24, 2)], []
    for target in (CausalModel(halved(tiny_target()).module.float()), halved(tiny_target())):
        start, head = (build_head(target, config) for _ in range(2))
        module = HeadModule(head, config)
        (adamw,) = module.configure_optimizers()
        for step in range(config.steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss, _ = module.loss(batches[step % len(batches)], step)
            adamw.zero_grad()
            loss.backward()
            adamw.step()
        assert all(weight.dtype == torch.float32 for weight in head.parameters())
        norm, before = (each.layers[0].post_attention_layernorm.weight for each in (head, start))
        assert (norm != before).float().mean() > 0.9
        assert (head.fc.weight != start.fc.weight).float().mean() > 0.9
        ended.append(module.loss(batch_of(rows), 0)[0].item())
    assert ended[1] == pytest.approx(ended[0], rel=0.02)


@pytest.mark.parametrize("three", [False, True])
def test_a_head_of_three_layers_trains_exports_and_averages_beside_a_target_in_bfloat16(
    rows, tmp_path, three
):
    target = halved(tiny_target())
    config = replace(
        TINY, features="three" if three else "final", ema_decay=0.5, chain_fraction=0.0
    )
    head = fit_head(target, rows, config, tmp_path / "training")
    again = load_head(save_head(head, tmp_path / "head"), target, torch.float32)
    assert same(head, again) and not same(head, build_head(target, config))


@pytest.mark.parametrize("tied", [False, True])
def test_a_frozen_target_cast_once_gives_the_same_loss_bit_for_bit_and_comes_back_as_it_was(tied):
    target = family_target("qwen2", tied)
    module = HeadModule(build_head(target, TINY), replace(TINY, chain_fraction=0.0))
    before = {name: weight.clone() for name, weight in target.module.state_dict().items()}
    rows = torch.arange(24).view(2, 12) % 29

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return module.loss(batch_of(rows), 0)[0].item()

    each_pass, cast = loss(), {}
    with pytest.raises(ZeroDivisionError), cast_once(target.module, torch.bfloat16):
        once = loss()
        cast = {name: weight.dtype for name, weight in target.module.named_parameters()}
        raise ZeroDivisionError
    assert once == each_pass
    assert (
        cast["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
        and cast["model.norm.weight"] == torch.float32
    )
    assert cast["model.embed_tokens.weight"] == torch.float32 and tied != ("lm_head.weight" in cast)
    after = target.module.state_dict()
    assert all(
        torch.equal(weight, before[name]) and weight.dtype == before[name].dtype
        for name, weight in after.items()
    )


def test_a_head_of_three_layers_casts_its_tables_no_more():
    head = random_eagle3(tiny_target()).to(torch.float16)
    assert head.rotary.inv_freq.dtype == torch.float32 and head.sizes.dtype == torch.float16
