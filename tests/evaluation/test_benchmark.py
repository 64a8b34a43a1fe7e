"""Records of the benchmark: blocks, seeds, orders, and what a cut run goes on from."""

import json
from collections import Counter

import pytest

from nde_talf.evaluation.benchmark import read_records, run_benchmark
from nde_talf.evaluation.protocol import BASELINE
from tests.evaluation.example import PROMPTS, SETTING, methods


def test_every_prompt_has_a_seed_and_an_order_of_its_own(tmp_path):
    calls = []
    path = tmp_path / "records.jsonl"
    prompts = [*PROMPTS, *((f"again {name}", *rest) for name, *rest in PROMPTS)]
    run_benchmark(methods(calls), prompts, SETTING, path, seed=3)
    counts = Counter(record.prompt for record in read_records(path))
    assert counts == {prompt: 4 for prompt, *_ in prompts}
    blocks = [calls[i : i + 4] for i in range(4, len(calls), 4)]  # behind the warm-up
    seeds = [{seed for *_, seed in block} for block in blocks]
    assert [len(block) for block in seeds] == [1] * 10 and len(set.union(*seeds)) == 10
    orders = [[name for name, *_ in block] for block in blocks]
    assert len(set(map(tuple, orders))) > 5
    before = {order[order.index(BASELINE) - 1] for order in orders if order[0] != BASELINE}
    assert len(before) == 3  # no method always follows the same other one


def test_a_cut_benchmark_goes_on_with_whole_blocks(tmp_path):
    path = tmp_path / "records.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_benchmark(methods([], fail_at=14), PROMPTS, SETTING, path, seed=0)
    with path.open("a") as stream:
        stream.write(json.dumps({"setting": str(SETTING), "method": BASELINE, "prompt": "p2"})[:-9])
    calls = []
    run_benchmark(methods(calls), PROMPTS, SETTING, path, seed=0)
    again = {prompt for _, prompt, _ in calls[4:]}  # the first four calls warm up
    assert again == {(1, 2, 2), (1, 2, 3), (1, 2, 4)}
    decoded = [(r.prompt, r.method) for r in read_records(path)]
    assert len(decoded) == len(set(decoded)) == 20
