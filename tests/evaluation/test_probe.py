"""A probe: as many prompts as there is time for, and keys that go together."""

import pytest

from nde_talf import LMDrafter, SamplingSetting
from nde_talf.evaluation.probe import (
    DRAFTED_PATH,
    DRAFTED_TREE,
    NGRAMS,
    decode,
    methods,
)
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.pipelines.commands.recommend import ProbedConfig, RecommendConfig, recommend
from tests.decoding.pairs import prompts, tiny_pair
from tests.refusal import refusal

T = SamplingSetting(0.6)


@pytest.mark.slow
def test_every_way_decodes_the_same_prompts():
    target, draft = tiny_pair(20, noise=0.3)
    decoders = methods(target, LMDrafter(draft), T)
    records = decode(decoders, prompts(2, 20), T, seconds=1e6)
    names = {BASELINE, CONTROL, NGRAMS, DRAFTED_PATH, DRAFTED_TREE}
    assert {(one.method, one.prompt) for one in records} == {(n, p) for n in names for p in "01"}
    with refusal("too slow for a probe"):
        decode(decoders, prompts(2, 20), T, seconds=1e-9)
    assert {*methods(target, None, SamplingSetting(0.0))} == {BASELINE, CONTROL, NGRAMS}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": {"target": "org/name"}}, "a probe needs both"),
        ({"prompts": "prompts.jsonl"}, "a probe needs both"),
        ({"model": {"draft": "org/name"}}, "a probe needs both"),
        ({"model": {"target": "org/name"}, "prompts": "p.jsonl", "run": "x"}, "reads no run"),
    ],
)
def test_keys_of_a_probe_that_do_not_go_together(given, words):
    given = given | {"model": ProbedConfig(**given.get("model", {}))}
    with refusal(words):
        recommend(RecommendConfig(**given))
