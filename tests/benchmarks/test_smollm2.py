"""Questions are chosen by their hashes, and Eq. 11 prices records."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.papers.claims import Campaign, profile_table, repriced
from benchmarks.papers.shared import Decoded
from benchmarks.smollm2 import OWN, digest, first
from nde_talf import Action, Delayed, SamplingSetting, UserError
from nde_talf.evaluation.benchmark import Record


def test_the_first_questions_by_hash(tmp_path):
    rows = [{"question": "a"}, {"turns": ["b", "later"]}, {"question": "a"}, {"question": "c"}]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert first(file, 2) == sorted("abc", key=digest)[:2] and len(first(OWN, 40)) == 40
    with pytest.raises(UserError, match="3"):
        first(file, 4)


def test_records_in_the_prices_of_a_profile():
    tree, name = Action(2, 1, 3), "a100_70b_8b"
    methods = {"static": (Delayed(tree), "nss"), "chosen": (None, "nss")}
    campaign = Campaign("", SamplingSetting(1.0), methods, (), prices=name)
    bench = SimpleNamespace(prompts=[SimpleNamespace(id="p", tokens=[1] * 60)])
    record = Record("", "chosen", "p", "", 8, 4, 4, 9.0, actions={str(tuple(tree)): 4})
    decoded = Decoded(
        {"static": [replace(record, method="static", actions={})], "chosen": [record]}
    )
    records = repriced(decoded, campaign, bench).records
    draft, target = profile_table(name).passes(torch.tensor([64]))[0].tolist()
    for (own,) in records.values():
        assert own.cpu_seconds == pytest.approx(4 * (4 * draft + target), rel=1e-3)
