"""Drafts for a batch whose rows move, leave and come back, without an engine."""

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest

from nde_talf import (
    Action,
    Autoregressive,
    Delayed,
    LMDrafter,
    NgramDrafter,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
    for_vllm,
)
from nde_talf.draft_training.export.head_format import save_head
from nde_talf.integrations.batch_drafting import Proposals
from nde_talf.integrations.vllm import KEY, check_version, checked_draft
from tests.decoding.pairs import tiny_pair
from tests.draft_training.heads import random_head
from tests.refusal import refusal

VOCABULARY, DRAFTED, NEW = 16, 4, 40
TARGET, DRAFT = tiny_pair(VOCABULARY, noise=0.05)
GREEDY = SamplingSetting(0.0)
PATH = Action(1, 0, DRAFTED)
PROMPTS = [[1, 2, 3], [4, 5], [1, 2, 3], [6, 7, 8, 9, 10]]


class Counted(LMDrafter):
    """Counts the texts that were read from their beginning."""

    started: ClassVar[Counter[str]] = Counter()

    def start(self, prompt, token, features, setting):
        self.started["texts"] += 1
        super().start(prompt, token, features, setting)


def drafters():
    return {"lm": Counted(DRAFT), "ngram": NgramDrafter(VOCABULARY)}


@pytest.fixture(scope="module")
def texts():
    """Of every prompt what the target goes on with."""
    decoder = SpeculativeDecoder(TARGET, None, Autoregressive(), "naive")
    return [
        [*prompt, *decoder.generate(prompt, NEW, GREEDY, Rng.seeded(0)).tokens]
        for prompt in PROMPTS
    ]


def accepted(draft, rest):
    hits = 0
    while hits < min(len(draft), len(rest) - 1) and draft[hits] == rest[hits]:
        hits += 1
    return hits


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lm", "ngram"])
def test_drafts_do_not_depend_on_where_rows_are_and_when_they_return(kind, texts, monkeypatch):
    """Rows change places at every step, some steps leave requests out, and one loses its cache
    meanwhile.

    Two requests have the same text for all time. Each draft is the one of a batch of its own, made
    from nothing.
    """
    dice, steps, hits = np.random.default_rng(0), 0, 0
    monkeypatch.setattr("nde_talf.integrations.batch_drafting.IDLE", 2)
    proposals = Proposals(drafters()[kind], DRAFTED)
    read = [len(prompt) + 1 for prompt in PROMPTS]
    Counted.started.clear()
    while left := [i for i, text in enumerate(texts) if read[i] < len(text)]:
        running = [i for i in dice.permutation(left) if dice.random() < 0.7]
        # []: a row that is still in its prompt
        within = [texts[i][: read[i]] if dice.random() < 0.9 else [] for i in running]
        drafts = proposals.propose(within, NEW + 20)
        for i, text, draft in zip(running, within, drafts, strict=True):
            alone = Proposals(drafters()[kind], DRAFTED)
            assert [draft] == alone.propose([text], NEW + 20) and len(draft) <= DRAFTED * bool(text)
            if text:
                cut = dice.integers(len(draft) + 1) if dice.random() < 0.3 else None  # by an engine
                tau = accepted(draft[:cut], texts[i][read[i] :])
                read[i], steps, hits = read[i] + tau + 1, steps + 1, hits + tau
    assert len(proposals.followed) <= len(texts) and hits > 5
    if kind == "lm":  # less those of the comparison
        assert len(PROMPTS) <= Counted.started["texts"] - steps < steps / 2


@pytest.mark.slow
def test_steps_are_those_of_our_loop(texts):
    """Greedily as many tokens are drafted and accepted as by `Delayed` with the same path."""
    proposals, policy = Proposals(LMDrafter(DRAFT), DRAFTED), Delayed(PATH)
    decoder = SpeculativeDecoder(TARGET, LMDrafter(DRAFT), policy, "traversal")
    for prompt, text in zip(PROMPTS, texts, strict=True):
        steps = decoder.generate(prompt, NEW, GREEDY, Rng.seeded(0)).steps
        read, taus = len(prompt) + 1, []
        while read < len(text):
            (draft,) = proposals.propose([text[:read]], 1000)
            taus.append(accepted(draft, text[read:]))
            read += taus[-1] + 1
        assert taus[:-1] == [step.tau for step in steps][: len(taus) - 1] and len({*taus}) > 1


def test_a_path_is_cut_to_the_room():
    drafted = Proposals(LMDrafter(DRAFT), 8).propose([[1, 2, 3], [1, 2, 3, 4, 5]], 7)
    assert [*map(len, drafted)] == [4, 2]


def test_what_cannot_draft_is_refused(tmp_path):
    save_head(random_head(TARGET), tmp_path / "head")
    for given, words in (
        ("nowhere/draft", "draft='nowhere/draft'.*no such folder"),
        (str(tmp_path / "head"), "draft head.*head_method"),
        ({"draft": "ngram"}, "name the folder"),
        (None, KEY),
    ):
        with refusal(words):
            checked_draft(given)
    for version in ("0.31.2", "0.33.0", "1.0"):
        with refusal(rf"vLLM {version}.*0\.32"):
            check_version(version)
    check_version("0.32.1+cpu")
    with refusal("tokens=0"):
        for_vllm("ngram", tokens=0)
    asked = for_vllm("ngram", tokens=5)
    assert asked["speculative_config"]["model"] == "nde_talf.integrations.vllm.Proposer"
    assert asked["additional_config"] == {KEY: "ngram"}
