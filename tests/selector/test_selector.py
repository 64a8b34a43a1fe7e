"""Training finds what the features tell, resumes, exports and refuses what does not fit."""

import json

import pytest
import torch

from decoding.actions import TREES
from decoding.drafter import LMDrafter
from decoding.errors import UserError
from decoding.loop import SpeculativeDecoder
from decoding.sampling import Coins, SamplingSetting
from decoding.verification import VERIFIERS
from selector.latency import LatencyTable
from selector.offline import offline_report
from selector.policy import NeuralPolicy
from selector.roots import INPUT_SCALARS, Roots
from selector.selector import Selector, SelectorSchema
from selector.training import SelectorConfig, fit_selector
from tests.decoding.pairs import tiny_pair

TABLE = LatencyTable([1, 100], [1, 2], [1, 4], [[1.0, 1.0]] * 2, [[0.1, 0.1]] * 2, {})


def roots(count: int, seed: int, alike: bool = False) -> Roots:
    """Contexts of two sorts, told apart by the sign of one hidden unit: drafts are all accepted, or none is; or all
    `alike`, with half of every draft accepted."""
    generator = torch.Generator().manual_seed(seed)
    states = [torch.randn(count, size, generator=generator) for size in (6, 4, 4)]
    good = states[2][:, 0] > 0
    depth = torch.tensor([tree.depth for tree in TREES])
    efficiency = (1.0 + depth / 2).expand(count, -1) if alike else torch.where(good[:, None], 1.0 + depth, 1.0)
    samples = efficiency[:, None] + 0.3 * torch.randn(count, 4, len(TREES), generator=generator)
    return Roots(
        *states,
        scalars=torch.randn(count, len(INPUT_SCALARS), generator=generator),
        samples=samples,
        seconds=TABLE.actions(torch.full((count,), 50)),
        setting=torch.zeros(count, dtype=torch.long),
        settings=[(1.0, 1.0)],
        prompt=torch.arange(count) // 4,
        kind=["code"] * count,
    )


def test_selector_wins_where_contexts_differ_and_survives_a_round_trip(tmp_path):
    training, validation = roots(800, 0), roots(200, 1)
    selector = fit_selector(training, validation, SelectorConfig(epochs=80, lr=1e-3), tmp_path / "training")
    report = offline_report(selector, training, validation)["all"]
    assert report["selector"][1] > 1.1 and report["selector"][0] > 0.9 * report["split_half"][0]
    selector.save_pretrained(tmp_path / "export")
    again = Selector.from_pretrained(tmp_path / "export")
    states = (validation.h_p_previous, validation.h_q_previous, validation.h_q_root, validation.scalars)
    assert torch.equal(selector(*states), again(*states))


def test_a_resumed_training_ends_with_the_same_weights(tmp_path):
    training, validation = roots(300, 0), roots(100, 1)

    def fit(folder: str, epochs: int) -> Selector:
        return fit_selector(training, validation, SelectorConfig(epochs=epochs, lr=1e-3), tmp_path / folder)

    fit("killed", 4)
    resumed, undisturbed = fit("killed", 9).state_dict(), fit("undisturbed", 9).state_dict()
    assert all(torch.equal(resumed[name], undisturbed[name]) for name in undisturbed)


def test_nothing_to_learn_costs_little(tmp_path):
    training, validation = roots(400, 0, alike=True), roots(200, 1, alike=True)
    selector = fit_selector(training, validation, SelectorConfig(epochs=20, lr=1e-3), tmp_path)
    assert offline_report(selector, training, validation)["all"]["selector"][0] > 0.97


def test_loading_names_what_is_wrong(tmp_path):
    with pytest.raises(UserError, match="no selector"):
        Selector.from_pretrained(tmp_path)
    Selector(SelectorSchema(6, 4, "specinfer")).save_pretrained(tmp_path / "export")
    config = tmp_path / "export" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "scalars": ["entropy"]}))
    with pytest.raises(UserError, match="scalars"):
        Selector.from_pretrained(tmp_path / "export")


def test_selector_of_another_pair_is_refused():
    target, draft = tiny_pair(16)
    policy = NeuralPolicy(Selector(SelectorSchema(99, 4, "specinfer")), TABLE)
    decoder = SpeculativeDecoder(target, LMDrafter(draft), policy, VERIFIERS["specinfer"])
    with pytest.raises(UserError, match="hidden sizes"):
        decoder.generate([1, 2], 8, SamplingSetting(), Coins.seeded(0))
