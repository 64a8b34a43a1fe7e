"""What the ablations do to roots, and that they are told in a table and plots."""

from dataclasses import replace
from pathlib import Path

import torch
import yaml

from nde_talf.evaluation.plots import learning_curves, tails
from nde_talf.evaluation.text import ablation_table
from nde_talf.selector.ablation import (
    fewer_prompts,
    fewer_samples,
    shrunk_labels,
    variants,
    without_scalars,
    without_states,
)
from nde_talf.selector.settings import NDE_PAPER, SelectorConfig
from tests.selector.examples import roots


def test_a_part_that_is_taken_away_is_zero_and_its_labels_stay():
    some = roots(20, 0)
    for change, names in (
        (without_states, ("h_p_previous", "h_q_previous", "h_q_root")),
        (without_scalars, ("scalars",)),
    ):
        changed = change(some)
        assert all(not getattr(changed, name).any() for name in names)
        assert changed.samples is some.samples and some.scalars.any() and some.h_q_root.any()


def test_less_data_is_a_subset_by_prompt_or_by_super_tree():
    some = roots(80, 0)  # of 20 prompts
    for fraction, prompts in ((0.125, 3), (0.25, 5), (0.5, 10)):
        fewer = fewer_prompts(some, fraction)
        assert len(fewer.prompt.unique()) == prompts and len(fewer) == 4 * prompts
        assert fewer.samples["gbv"].shape[:2] == (len(fewer), 4)
    assert torch.equal(fewer_samples(some, 2).samples["gbv"], some.samples["gbv"][:, :2])


def test_shrinking_brings_noisy_labels_nearer_to_the_truth():
    generator = torch.Generator().manual_seed(0)
    some = roots(400, 0)
    truth = 3 + 0.3 * torch.randn(400, 1, some.samples["gbv"].shape[2], generator=generator)
    noisy = truth + torch.randn(400, 4, truth.shape[2], generator=generator)
    some.samples["gbv"] = noisy
    shrunk = shrunk_labels(some).samples["gbv"]
    before, after = ((x.mean(1) - truth[:, 0]).square().mean() for x in (noisy, shrunk))
    assert after < 0.5 * before
    assert torch.allclose(shrunk.mean((0, 1)), noisy.mean((0, 1)), atol=1e-5)


def test_variants_are_named_once_and_their_results_are_drawn():
    every = variants(4, 4, 20, 4)
    assert len({v.name for v in every}) == len(every) and {
        v.value for v in every if v.group == "super-trees"
    } == {1, 2, 4}
    exchanged = [v for v in variants(2, 8, 20, 4) if v.exchanged]
    assert [v.value for v in exchanged] == [1, 2, 4, 8] and not any(v.exchanged for v in every)
    assert [v.name for v in every if v.group == "prompts"] == [
        "25% of the prompts",
        "50% of the prompts",
    ]  # 2 are too few to fold
    own = {
        "selector": [1.02, 1.0, 1.04],
        "worst_5_percent": 0.8,
        "worst_quantiles": [0.7, 0.8, 0.9, 1.0, 1.1],
    }
    results = {
        v.name: {
            "group": v.group,
            "value": v.value,
            "training_roots": 9,
            "tables": {"measured": own},
        }
        for v in every
    }
    assert ablation_table(results).count("1.020 [1.000, 1.040]") == len(every)
    assert len(learning_curves(results).axes) == 2 and len(tails(results).axes) == 1


def test_a_variant_of_other_settings_is_named_as_one_types_them():
    config = SelectorConfig()
    for variant in variants(4, 4, 20, 4):
        if "=" in variant.name and not variant.value and "selector=nde" not in variant.name:
            typed = dict(part.split("=") for part in variant.name.split())
            assert typed.keys() == variant.config.keys()
            assert all(yaml.safe_load(typed[key]) == value for key, value in variant.config.items())
        replace(config, **variant.config)  # no unknown key, no value that is refused


def test_the_papers_recipe_is_the_preset():
    preset = Path(__file__).parents[2] / "configs" / "selector" / "nde.yaml"
    assert yaml.safe_load(preset.read_text()) == NDE_PAPER
