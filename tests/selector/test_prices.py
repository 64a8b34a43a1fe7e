"""Prices are what steps take; a table that cannot be trusted is refused; the exported static tree
is the baseline.
"""

import warnings
from dataclasses import replace

import pytest
import torch

from nde_talf import (
    Action,
    LMDrafter,
    NeuralPolicy,
    Rng,
    SamplingSetting,
    Selector,
    SpeculativeDecoder,
)
from nde_talf.decoding.actions import TREE_INDEX
from nde_talf.decoding.common.errors import Advice
from nde_talf.decoding.sampling.sampling_setting import RAW
from nde_talf.selector.profiling import disagreement_of, measure_latency
from nde_talf.selector.table_fit import PROBES, Probed, fit_table
from tests.decoding.pairs import tiny_pair
from tests.refusal import refusal
from tests.selector.examples import TABLE, schema


def true_step(action, context, by_branches):
    """Parts that rise along straight lines: draft, target, all else.

    Widths and nodes as if no draws were merged.
    """
    widths = [
        1 if level <= action.l1 or action.k == 1 else action.k for level in range(1, action.depth)
    ]
    run = (action.k if action.l2 else 1) * (1 + action.depth) if by_branches else action.nodes
    return (
        3.0 + sum(0.5 + 0.1 * width for width in widths),
        10.0 + context / 100 + 0.2 * run,
        0.5 + 0.01 * action.nodes,
    )


@pytest.mark.parametrize("by_branches", [False, True])
def test_the_parts_add_up_to_what_steps_took(by_branches):
    contexts = [100, 300]
    steps = [
        Probed(index, action, name, action.nodes, (draft, target, rest * (1 + (name == "gbv"))))
        for index, context in enumerate(contexts)
        for action in PROBES
        for name in ("nss", "gbv")
        for draft, target, rest in [true_step(action, context, by_branches)]
    ]
    table = fit_table(steps, contexts, ["nss", "gbv"], {}, by_branches)
    assert table.first == pytest.approx([3.0, 3.0])
    for name, factor in (("nss", 1), ("gbv", 2)):
        seconds = table.steps(torch.tensor(contexts), name)
        for action in (*PROBES, Action(4, 3, 2), Action(2, 5, 5), Action(1, 0, 13)):
            for row, context in enumerate(contexts):
                draft, target, rest = true_step(action, context, by_branches)
                # Between two probes the isotonic fits are straight, so on straight lines prices are
                # exact.
                priced = float(seconds[row, TREE_INDEX[action]])
                assert priced == pytest.approx(draft + target + factor * rest, rel=2e-3), (
                    name,
                    action,
                )


def test_a_table_measured_under_load_or_of_another_shape_is_refused():
    TABLE.check_quiet("table.json")
    quiet = replace(TABLE, verify={"nss": [0.1, 0.1]})
    noisy = replace(quiet, target=[[1.0, 1.0], [1.3, 1.3]])
    assert disagreement_of(quiet, quiet) == 0 and disagreement_of(quiet, noisy) > 0.1
    with refusal(r"table\.json.*under load.*13%.*latency\.accept_noise=true"):
        replace(TABLE, disagreement=0.13).check_quiet("table.json")
    with pytest.raises(ValueError, match="'target' has to be a grid of 2 x 2"):
        replace(TABLE, target=[[1.0]] * 2)


@pytest.mark.slow
def test_a_measured_table_prices_plain_decoding_by_its_own_steps(monkeypatch):
    monkeypatch.setattr("nde_talf.selector.profiling.MAX_BATCHES", 2)
    target, draft = tiny_pair(16)
    table = measure_latency(target, draft, [1, 2, 3], [8, 24], ["naive", "specinfer", "nss"], 1)
    assert table.disagreement < float("inf")
    assert table.plain(torch.tensor([8, 24])).tolist() == table.autoregressive


@pytest.mark.slow
def test_an_export_is_enough_for_inference_and_prices_as_in_training(tmp_path):
    selector = Selector(schema(16, 16, pricing="eq11"))
    dear = replace(TABLE, target=[[1.0, 50.0]] * 2)
    selector.table = dear
    selector.save_pretrained(tmp_path / "export")
    again = Selector.from_pretrained(tmp_path / "export")
    assert again.table == dear and again.schema == selector.schema
    policy, other = NeuralPolicy(again), NeuralPolicy(again, TABLE)
    assert other._costs.table == TABLE
    prices = dear.steps_eq11(torch.tensor([112.0]))[0].float()
    assert torch.equal(policy._costs.seconds[7], prices)
    target, draft = tiny_pair(16)
    decoder = SpeculativeDecoder(target, LMDrafter(draft), policy, policy.verifier)
    assert len(decoder.generate([1, 2], 6, SamplingSetting(), Rng.seeded(0)).tokens) == 6
    again.table = None
    with refusal(r"no latency table.*LatencyTable\.load"):
        NeuralPolicy(again)


@pytest.mark.slow
def test_a_decoder_of_another_draft_temperature_is_warned_of():
    target, draft = tiny_pair(16)
    policy = NeuralPolicy(Selector(schema(16, 16)), TABLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SpeculativeDecoder(target, LMDrafter(draft), policy, policy.verifier)
    with pytest.warns(
        Advice, match="drafts warped as the target is, and this decoder warps them at T=1"
    ):
        SpeculativeDecoder(target, LMDrafter(draft), policy, policy.verifier, RAW)
