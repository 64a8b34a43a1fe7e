"""A probe: what a path tells of shorter ones by hand, and as many prompts as there is time for."""

import pytest

from nde_talf import LMDrafter, SamplingSetting
from nde_talf.evaluation.probe import (
    DRAFTED_PATH,
    DRAFTED_TREE,
    NGRAMS,
    decode,
    methods,
    timed_path,
)
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.speed_estimate import TimedPath
from nde_talf.pipelines.commands.recommend import ProbedConfig, RecommendConfig, recommend
from tests.decoding.pairs import prompts, tiny_pair
from tests.refusal import refusal

T = SamplingSetting(0.6)


def test_the_best_length_of_a_path_by_hand():
    """A step takes 1 s, 2 with eight drafted tokens; drafting one takes 0.1. Half are accepted at
    the first place, all of these at the second, none later.
    """
    path = TimedPath(8, [0.5, 0.5], plain=1.0, draft=0.1, step=2.0)
    assert path.gain(0) == 1
    assert path.gain(1) == pytest.approx(1.5 / 1.225)
    assert path.gain(2) == pytest.approx(2 / 1.45) and path.best == 2
    assert TimedPath(8, [0.1], plain=1.0, draft=0.2, step=1.0).best == 0


@pytest.mark.slow
def test_every_way_decodes_the_same_prompts():
    target, draft = tiny_pair(20, noise=0.3)
    decoders = methods(target, LMDrafter(draft), T)
    records = decode(decoders, prompts(2, 20), T, seconds=1e6)
    names = {BASELINE, CONTROL, NGRAMS, DRAFTED_PATH, DRAFTED_TREE}
    assert {(one.method, one.prompt) for one in records} == {(n, p) for n in names for p in "01"}
    chosen = {name: [one for one in records if one.method == name] for name in names}
    path = timed_path(chosen[DRAFTED_PATH], chosen[BASELINE])
    assert path.plain > 0 and path.draft > 0 and 0 <= path.best <= 8
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
