"""Training finds what the features tell, resumes, exports and refuses what does not fit."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nde_talf import (
    Action,
    DecodingState,
    LMDrafter,
    NeuralPolicy,
    Rng,
    SamplingSetting,
    Selector,
    SpeculativeDecoder,
)
from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.checksums import write_checksums
from nde_talf.decoding.common.errors import Advice
from nde_talf.decoding.features import SCALARS, scalar_features
from nde_talf.decoding.sampling.rng import warp
from nde_talf.selector.export import VECTORS
from nde_talf.selector.offline_evaluation import evaluate_offline
from nde_talf.selector.roots import INPUT_SCALARS, roots_from_traces
from nde_talf.selector.step_costs import StepCosts
from nde_talf.selector.training import _Training, fit_selector, prompt_folds, train_selector
from tests.decoding.pairs import tiny_pair
from tests.refusal import refusal
from tests.selector.examples import CONFIG, DEPTH, TABLE, priced, roots, schema

SLOW_DRAFT = replace(TABLE, draft=[[2.0, 2.0]] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [20.0, 0.0])
def test_selector_wins_where_contexts_differ_and_survives_a_round_trip(tmp_path, sharpness):
    training, validation = priced(800, 0), priced(200, 1)
    selector, _ = fit_selector(training, validation, replace(CONFIG, sharpness=sharpness))
    assert evaluate_offline(selector, training, validation)["all"]["selector"][1] > 1.1
    selector.save_pretrained(tmp_path / "export")
    again = Selector.from_pretrained(tmp_path / "export")
    assert torch.equal(validation.logits(selector), validation.logits(again))


def test_an_export_holds_vectors_that_a_reader_has_to_give(tmp_path):
    selector = Selector(schema(6, 4)).train()
    selector.standardise(torch.randn(50, len(INPUT_SCALARS)))
    selector.save_pretrained(tmp_path)
    assert selector.training
    vectors = load_file(tmp_path / VECTORS)
    logits, trees = vectors.pop("logits"), vectors.pop("trees")
    # Products round by the alignment of their inputs, which is another in a file.
    torch.testing.assert_close(Selector.from_pretrained(tmp_path)(**vectors), logits)
    assert [TREES.index(Action(*tree)) for tree in trees.tolist()] == logits.argmax(-1).tolist()
    save_file({**vectors, "logits": logits + 1, "trees": trees}, tmp_path / VECTORS)
    write_checksums(tmp_path)
    with refusal(r"vectors\.safetensors: its selector gives other logits"):
        Selector.from_pretrained(tmp_path)


@pytest.mark.long
def test_a_resumed_training_ends_with_the_same_weights(tmp_path, monkeypatch):
    training, validation = (priced(n, n) for n in (300, 100))

    class Killed(Exception):
        pass

    started, begin = 0, _Training.__init__

    def kill(self, *how):
        nonlocal started
        started += 1
        if started == 3:
            raise Killed
        begin(self, *how)

    def train(folder):
        config = replace(CONFIG, epochs=4, folds=3)
        return train_selector(training, validation, config, tmp_path / folder)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(_Training, "__init__", kill)
        train("killed")
    assert len(list((tmp_path / "killed").iterdir())) == 2
    (resumed, crossed), (undisturbed, expected) = train("killed"), train("undisturbed")
    weights = resumed.state_dict()
    assert crossed == expected
    assert all(torch.equal(weights[name], x) for name, x in undisturbed.state_dict().items())


@pytest.mark.long
def test_where_nothing_is_won_the_static_tree_is_exported(tmp_path):
    config = replace(CONFIG, epochs=24, folds=3)
    training, validation = priced(400, 0, alike=True), priced(200, 1, alike=True)
    selector, crossed = train_selector(training, validation, config, tmp_path / "alike")
    assert crossed.gains[0][0] < 1.02 and selector.schema.learned == (False,)
    judged = evaluate_offline(selector, training, validation)
    assert judged["all"]["selector"] == [1.0, 1.0, 1.0]


def test_folds_keep_a_prompt_together_and_need_two_prompts():
    some = roots(80, 0)
    folds = prompt_folds(some.prompt, 4)
    assert folds.bincount().tolist() == [20] * 4
    assert all(len(folds[some.prompt == prompt].unique()) == 1 for prompt in some.prompt.unique())
    assert len(prompt_folds(some.prompt, 30).unique()) == 20
    with refusal(r"one training prompt.*traces.train_prompts"):
        prompt_folds(some.prompt[:1], 4)


@pytest.mark.slow
def test_a_setting_that_was_not_learned_gets_the_static_tree_of_the_machine_and_costs_nothing(
    monkeypatch,
):
    target, draft = tiny_pair(16)
    selector = Selector(
        replace(
            schema(16, 16, learned=False), settings=((0.5, 1.0), (1.0, 1.0)), learned=(True, False)
        )
    )
    selector.static_efficiency = torch.stack([torch.ones(len(TREES)), 1.0 + DEPTH / 2])
    for table, depth in ((TABLE, 16), (SLOW_DRAFT, 1)):
        policy = NeuralPolicy(selector, table)
        decoder = SpeculativeDecoder(target, LMDrafter(draft), policy, policy.verifier)
        monkeypatch.setattr(selector, "forward", lambda *_: pytest.fail("the network was asked"))
        decoder.generate([1, 2], 20, SamplingSetting(1.2), Rng.seeded(0))
        assert {TREES[index].depth for index in policy.counts} == {depth}
        with pytest.raises(pytest.fail.Exception, match="asked"):
            decoder.generate([1, 2], 20, SamplingSetting(0.4), Rng.seeded(0))


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [20.0, 0.0])
def test_the_policy_takes_the_tree_of_the_largest_logit(sharpness):
    torch.manual_seed(0)
    selector = Selector(schema(6, 4, sharpness=sharpness)).eval()
    with torch.no_grad():
        for parameter in selector.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    selector.standardise(torch.randn(50, len(INPUT_SCALARS)))
    policy, costs = NeuralPolicy(selector, TABLE), StepCosts(TABLE, "specinfer", 200)
    for seed, top_p in enumerate((0.9, 1.0, 0.9, 1.0)):  # below 1 there are zeros among the rows
        context, setting = 20 + 40 * seed, SamplingSetting(0.5 + 0.1 * seed, top_p)
        states = [torch.randn(size).bfloat16() for size in (6, 4, 4)]  # a model's own dtype
        p, *q = warp(3 * torch.randn(3, 30 + 250 * seed), SamplingSetting(1.0, top_p)).unbind()
        row, known = costs.row(context), torch.tensor([context, setting.temperature, top_p])
        scalars = torch.cat([scalar_features(p, *q), known, costs.passes[row]])
        seen = [x[None].float() for x in states]
        with torch.inference_mode():
            expected = selector(*seen, scalars[None], costs.seconds[row, None])
        previous, root = (SimpleNamespace(hidden=state) for state in states[1:])
        drafter = SimpleNamespace(previous=previous, root=root, seen=q.copy)
        state = DecodingState(0, context, 99, setting, p, states[0])
        assert policy.choice(state, drafter) == int(expected.argmax())


def test_scalar_features_are_entropies_divergences_and_a_distance():
    p, q, r = torch.softmax(2 * torch.randn(3, 7, 40, dtype=torch.float64), -1)
    expected = {
        "entropy_p_previous": -p * p.log(),
        "entropy_q_previous": -q * q.log(),
        "entropy_q_root": -r * r.log(),
        "kl_p_q_previous": p * (p / q).log(),
        "kl_q_p_previous": q * (q / p).log(),
        "l1_previous": (p - q).abs(),
    }
    for name, feature in zip(SCALARS, scalar_features(p, q, r).unbind(-1), strict=True):
        assert torch.allclose(feature, expected[name].sum(-1)), name


def test_traces_that_cannot_be_learnt_from_are_named():
    count = 40
    numbers = (*SCALARS, "temperature", "top_p", "context")
    states = "h_p_previous", "h_q_previous", "h_q_root"
    traces = {
        **dict.fromkeys(numbers, np.ones(count)),
        **dict.fromkeys(("prompt_id", "kind", "split"), np.array(["train"] * count)),
        **dict.fromkeys(states, np.zeros((count, 4))),
        "specinfer": np.ones((count, 2, len(TREES))),
    }
    with refusal(r"no labels for gbv.*traces.verifiers"):
        roots_from_traces(traces, ["specinfer", "gbv"])
    with pytest.warns(Advice, match="has 40 train roots, fewer than 50"):
        roots_from_traces(traces, ["specinfer"])
    traces["specinfer"][-1, 0, 0] = np.nan
    with refusal("specinfer holds NaN"):
        roots_from_traces(traces, ["specinfer"])


def test_a_selector_of_another_pair_is_refused():
    target, draft = tiny_pair(16)
    policy = NeuralPolicy(Selector(schema(99, 4)), TABLE)
    decoder = SpeculativeDecoder(target, LMDrafter(draft), policy, policy.verifier)
    with refusal("hidden sizes"):
        decoder.generate([1, 2], 8, SamplingSetting(), Rng.seeded(0))
