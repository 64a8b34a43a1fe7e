"""Every method stops where a text ends, and what a pass gives after that counts nowhere."""

import pytest
import torch

from nde_talf import (
    Action,
    Autoregressive,
    Delayed,
    LMDrafter,
    NgramDrafter,
    NgramTree,
    SamplingSetting,
    SpeculativeDecoder,
)
from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.evaluation.benchmark import Task, read_records, run_benchmark
from nde_talf.evaluation.loops import Speculative, transformers_loop
from nde_talf.evaluation.protocol import BASELINE
from nde_talf.evaluation.tuning import Candidate, Method, Tuner
from tests.decoding.pairs import tiny_pair

GREEDY, PROMPT, LIMIT = SamplingSetting(0.0), [1, 2, 3], 24
AT = 13
"""A place of the greedy text whose token does not come before, inside of every tree."""
ASSISTED = "assisted"


@pytest.fixture
def pair():
    """A pair whose draft is always right, so that an end comes in the middle of a tree."""
    return tiny_pair(40, noise=0.0, layers=2)


def greedy(target, **how):
    ids = torch.tensor([PROMPT])
    return target.module.generate(ids, max_new_tokens=LIMIT, do_sample=False, **how)[0, 3:].tolist()


def methods(pair, limit=LIMIT):
    target, draft = pair
    ours = {
        BASELINE: (None, Autoregressive(), "nss"),
        "path": (LMDrafter(draft), Delayed(Action(1, 0, 6)), "naive"),
        "tree": (LMDrafter(draft), Delayed(Action(2, 2, 3)), "traversal"),
        "n-gram": (NgramDrafter(target.vocab_size), NgramTree(), "nss"),
    }
    lookup = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2}
    theirs = {"plain": {}, "lookup": lookup, ASSISTED: {"draft": draft}}
    made = {name: SpeculativeDecoder(target, *parts) for name, parts in ours.items()}
    return {name: Speculative(name, each, GREEDY, limit) for name, each in made.items()} | {
        name: transformers_loop(name, target, GREEDY, limit, **how) for name, how in theirs.items()
    }


def test_every_method_stops_and_counts_up_to_the_end(pair):
    target, _ = pair
    text = greedy(target)
    target.chat_ends = frozenset({text[AT], 39})
    assert greedy(target, eos_token_id=sorted(target.ends)) == text[: AT + 1]
    assert TransformersEngine(target).sample([PROMPT], GREEDY, LIMIT, 0) == [PROMPT + text[:AT]]
    for name, method in methods(pair).items():
        record = method(Task(PROMPT))
        accepted = sum(int(length) * steps for length, steps in record.accepted.items())
        assert record.ended and record.tokens == accepted + record.steps, name
        assert accepted <= record.nodes - record.steps and record.cpu_seconds > 0
        assert record.tokens == AT or (name == ASSISTED and record.tokens < AT)  # it drafts first
        if isinstance(method, Speculative):
            blocks = method.blocks(PROMPT, 0)
            assert [token for block in blocks for token in block.tokens] == text[: AT + 1]


def test_a_prompt_that_is_answered_with_an_end_has_no_decoded_tokens(pair, tmp_path):
    target, _ = pair
    target.chat_ends = frozenset({greedy(target)[0]})
    made, path = methods(pair), tmp_path / "records.jsonl"
    prompts = [("at once", "chat", PROMPT), ("later", "chat", [3, 2, 1])]
    run_benchmark(made, prompts, GREEDY, path, 0)
    records = list(read_records(path))
    nothing = [record for record in records if record.prompt == "at once"]
    assert len(nothing) == len(made)
    assert not any(r.tokens or r.steps or r.seconds or r.cpu_seconds for r in nothing)
    grid = [Candidate(name, lambda title, n: made[title], {"name": name}) for name in made]
    method = Method("all", "all", grid)
    assert Tuner(tmp_path / "tuned.json", LIMIT, [PROMPT])(method) in grid
