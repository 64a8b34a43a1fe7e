"""Questions are chosen by their hashes, tuning is counted as it is, and Eq. 11 prices records."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.papers.claims import Campaign, profile_table, repriced
from benchmarks.papers.shared import Decoded
from benchmarks.smollm2 import OWN, digest, first, trials
from nde_talf import Action, Delayed, SamplingSetting, UserError
from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.tuning import Candidate, Tuner


def record(**steps):
    return Record("T=1", "m", "p", "", 8, 4, 4, 9.0, **steps)


def test_the_first_questions_by_hash(tmp_path):
    rows = [{"question": "a"}, {"turns": ["b", "later"]}, {"question": "a"}, {"question": "c"}]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert first(file, 2) == sorted("abc", key=digest)[:2] and len(first(OWN, 40)) == 40
    with pytest.raises(UserError, match="3"):
        first(file, 4)


@pytest.mark.parametrize(("candidates", "prompts"), [(1, 4), (2, 4), (9, 12), (12, 3)])
def test_trials_are_those_of_a_tuner(candidates, prompts, tmp_path):
    decoded = []
    candidate = Candidate(lambda title, new: lambda *_: decoded.append(new) or record())
    grid = dict.fromkeys(map(str, range(candidates)), candidate)
    Tuner(tmp_path / "tuned.json", 16, [[1]] * prompts)("role", grid)
    assert decoded.count(16) == trials(candidates, prompts)


def test_records_in_the_prices_of_a_profile():
    methods = {"m": (Delayed(Action(2, 1, 3)), "nss"), "chosen": (None, "nss")}
    campaign = Campaign("c", SamplingSetting(1.0), methods, (), prices="a100_70b_8b")
    bench = SimpleNamespace(prompts=[SimpleNamespace(id="p", tokens=[1] * 60)])
    decoded = Decoded({"m": [record()], "chosen": [record(actions={"(2, 1, 3)": 4})]})
    price = profile_table("a100_70b_8b")
    draft, target = price.passes(torch.tensor([64]))[0].tolist()
    for own in repriced(decoded, campaign, bench).records.values():
        assert own[0].cpu_seconds == pytest.approx(4 * (4 * draft + target), rel=1e-3)
