"""Every method stops where a text ends, and what a pass gives after that counts nowhere."""

import pytest
import torch

from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.decoding.actions import Action
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.ngram import NgramDrafter
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.policies.ngram import NgramTree
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.evaluation.benchmark import read_records, run_benchmark
from nde_talf.evaluation.loops import PLAIN, Speculative, transformers_loop
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.report import ReportData, write_report
from nde_talf.evaluation.table import histogram
from nde_talf.evaluation.tuning import Candidate, Tuner
from tests.decoding.pairs import tiny_pair

GREEDY, PROMPT, LIMIT = SamplingSetting(0.0), [1, 2, 3], 24
AT = 13
"""A place of the greedy text whose token does not come before, inside of every tree."""


@pytest.fixture
def pair():
    """A pair whose draft is always right, so that an end comes in the middle of a tree."""
    return tiny_pair(40, noise=0.0, layers=2)


def greedy(target, **how) -> list[int]:
    ids = torch.tensor([PROMPT])
    return target.module.generate(ids, max_new_tokens=LIMIT, do_sample=False, **how)[0, 3:].tolist()


def methods(pair, setting=GREEDY, limit=LIMIT) -> dict:
    target, draft = pair
    ours = {
        BASELINE: (None, Autoregressive(), "nss"),
        CONTROL: (None, Autoregressive(), "nss"),
        "path": (LMDrafter(draft), Delayed(Action(1, 0, 6)), "naive"),
        "tree": (LMDrafter(draft), Delayed(Action(2, 2, 3)), "traversal"),
        "n-gram": (NgramDrafter(target.vocab_size), NgramTree(), "nss"),
    }
    theirs = {
        PLAIN: {},
        "lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2},
        "assisted": {"draft": draft},
    }
    return {
        name: Speculative(name, SpeculativeDecoder(target, drafter, policy, rule), setting, limit)
        for name, (drafter, policy, rule) in ours.items()
    } | {
        name: transformers_loop(name, target, setting, limit, **options)
        for name, options in theirs.items()
    }


def test_every_method_stops_and_counts_up_to_the_end(pair):
    target, _ = pair
    text = greedy(target)
    assert text.index(text[AT]) == AT
    target.chat_ends = frozenset({text[AT], 39})
    assert greedy(target, eos_token_id=sorted(target.ends)) == text[: AT + 1]
    for name, method in methods(pair).items():
        record = method(PROMPT, 0, "chat")
        before = sum(step * count for step, count in enumerate(histogram([record])))
        assert record.ended and record.tokens == before + record.steps, name
        assert record.tokens <= AT and (record.tokens == AT or name == "assisted"), name
        stream = method.blocks(PROMPT, 0) if isinstance(method, Speculative) else ()
        tokens = [token for block in stream for token in block.tokens]
        assert tokens in ([], text[: AT + 1])


def test_texts_without_an_end_have_the_tokens_that_were_asked_for(pair):
    for name, method in methods(pair).items():
        record = method(PROMPT, 0, "chat")
        assert not record.ended and record.tokens >= LIMIT - 1 - 20 * (name == "assisted"), name
    target, _ = pair
    target.chat_ends = frozenset({greedy(target)[AT]})
    for more in (0, 1):
        for name, method in methods(pair, limit=AT + more).items():
            assert method(PROMPT, 0, "chat").ended == more, name


def test_a_prompt_that_is_answered_with_an_end_has_no_decoded_tokens(pair, tmp_path):
    target, _ = pair
    target.chat_ends = frozenset({greedy(target)[0]})
    made, path = methods(pair), tmp_path / "records.jsonl"
    prompts = [("at once", "chat", PROMPT), ("later", "chat", [3, 2, 1])]
    run_benchmark(made, prompts, GREEDY, path, 0)
    records = list(read_records(path))
    nothing = [r for r in records if r.prompt == "at once"]
    assert len(nothing) == len(made)
    assert all(r.ended and not (r.tokens or r.steps or r.seconds or r.cpu_seconds) for r in nothing)
    grid = {name: Candidate(lambda _, n, name=name: made[name]) for name in made}
    assert Tuner(tmp_path / "tuned.json", LIMIT, [PROMPT])("all", grid) in grid
    parts = {
        "measured": "", "learned": {}, "same": {}, "exports": {}, "pair": {}, "offline": {},
        "head": {}, "curves": {}, "stages": {}, "environment": {},
    }  # fmt: skip
    setting = str(GREEDY)
    data = ReportData.of("ends", records, "here", **parts)
    assert "of 2 texts of plain decoding ended" in data.ended[setting]
    assert [row.speedup[0] > 0 for row in data.tables[setting]] == [True] * len(made)
    write_report(ReportData.of("ends", nothing, "here", **parts), tmp_path)
    said = (tmp_path / "results.md").read_text()
    assert "1 of 1 texts" in said and "no text has a second token" in said


def test_sampled_texts_stop_before_the_end(pair):
    target, _ = pair
    text = greedy(target)
    target.chat_ends = frozenset({text[AT], 39})
    assert TransformersEngine(target).sample([PROMPT], GREEDY, LIMIT, 0) == [PROMPT + text[:AT]]
