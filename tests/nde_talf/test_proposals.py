"""Drafts for a batch whose rows move, leave and come back; lengths by a selector.

Without an engine.
"""

from collections import Counter
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from nde_talf import (
    Action,
    Autoregressive,
    Delayed,
    LMDrafter,
    NeuralPolicy,
    NgramDrafter,
    Rng,
    SamplingSetting,
    Selector,
    SpeculativeDecoder,
    for_vllm,
)
from nde_talf.decoding.actions import tree_index
from nde_talf.decoding.features import scalar_features
from nde_talf.draft_training.export.head_format import save_head
from nde_talf.integrations.batch_drafting import Proposals
from nde_talf.integrations.vllm import KEY, Options, check_version
from nde_talf.selector.path_lengths import PathLengths
from tests.decoding.pairs import tiny_pair
from tests.draft_training.heads import random_head
from tests.refusal import refusal
from tests.selector.examples import DEPTH, TABLE, schema

VOCABULARY, DRAFTED, NEW = 16, 4, 40
TARGET, DRAFT = tiny_pair(VOCABULARY, noise=0.05)
GREEDY = SamplingSetting(0.0)
PATH = Action(1, 0, DRAFTED)
PROMPTS = [[1, 2, 3], [4, 5], [1, 2, 3], [6, 7, 8, 9, 10]]
PRICED = replace(TABLE, target=[[1.0, 3.0]] * 2, draft=[[0.4, 0.4]] * 2)


class Counted(LMDrafter):
    """Counts the texts that were read from their beginning."""

    started: ClassVar[Counter[str]] = Counter()

    def start(self, prompt, token, features, setting):
        self.started["texts"] += 1
        super().start(prompt, token, features, setting)


def drafters():
    return {"lm": Counted(DRAFT), "ngram": NgramDrafter(VOCABULARY)}


def priced(selector, table=TABLE):
    """Give a selector the table that it would have been exported with."""
    selector.table = table
    return selector


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
    proposals = Proposals(drafters()[kind], None, DRAFTED)
    read = [len(prompt) + 1 for prompt in PROMPTS]
    Counted.started.clear()
    while left := [i for i, text in enumerate(texts) if read[i] < len(text)]:
        running = [i for i in dice.permutation(left) if dice.random() < 0.7]
        # []: a row that is still in its prompt
        within = [texts[i][: read[i]] if dice.random() < 0.9 else [] for i in running]
        drafts = proposals.propose(within, NEW + 20)
        for i, text, draft in zip(running, within, drafts, strict=True):
            alone = Proposals(drafters()[kind], None, DRAFTED)
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
    proposals, policy = Proposals(LMDrafter(DRAFT), None, DRAFTED), Delayed(PATH)
    decoder = SpeculativeDecoder(TARGET, LMDrafter(DRAFT), policy, "traversal")
    for prompt, text in zip(PROMPTS, texts, strict=True):
        steps = decoder.generate(prompt, NEW, GREEDY, Rng.seeded(0)).steps
        read, taus = len(prompt) + 1, []
        while read < len(text):
            (draft,) = proposals.propose([text[:read]], 1000)
            taus.append(accepted(draft, text[read:]))
            read += taus[-1] + 1
        assert taus[:-1] == [step.tau for step in steps][: len(taus) - 1] and len({*taus}) > 1


@pytest.fixture(scope="module")
def selector():
    """Of the draft's features alone, with random weights that choose several lengths."""
    torch.manual_seed(3)
    made = Selector(schema(0, DRAFT.hidden_size, sharpness=0.0, width=8, hidden=(16, 16))).eval()
    made.standardise(torch.randn(50, 11))
    with torch.no_grad():
        for weight in made.network.parameters():
            weight.add_(torch.randn_like(weight))
    made.table = PRICED
    return made


@pytest.mark.slow
def test_a_selector_of_draft_features_chooses_among_paths_as_it_does_among_trees(
    selector, tmp_path, monkeypatch
):
    """It is exported and read again, decodes in our loop, whatever the target's rows are, and
    `PathLengths` takes its best path.
    """
    monkeypatch.setattr("nde_talf.selector.path_lengths.PART", 4)
    selector.save_pretrained(tmp_path / "export")
    again = Selector.from_pretrained(tmp_path / "export")
    policy, sampled = NeuralPolicy(again, TABLE), SamplingSetting()
    decoder = SpeculativeDecoder(TARGET, LMDrafter(DRAFT), policy, policy.verifier)
    assert len(decoder.generate([1, 2], 30, sampled, Rng.seeded(0)).tokens) == 30
    assert len(policy.counts) > 1
    lengths = PathLengths(priced(again), DRAFT, 8, sampled)
    paths = [tree_index(Action(1, 0, length)) for length in range(9)]
    costs = policy._costs
    known = torch.tensor([4, 1.0, 1.0, *costs.passes[costs.row(4)]])
    drafts = [LMDrafter(DRAFT) for _ in range(6)]
    with torch.inference_mode():
        for row, drafter in enumerate(drafts):
            drafter.start([1, 2, row], row + 1, torch.empty(0), sampled)
        by_length = lengths.choose(drafts, [4] * 6)
        for drafter, length in zip(drafts, by_length, strict=True):
            states = torch.empty(0), drafter.previous.hidden, drafter.root.hidden
            rows = (drafter.previous.q, drafter.root.q)
            for p in (torch.full((VOCABULARY,), 1 / VOCABULARY), rows[1]):
                scalars = torch.cat([scalar_features(p, *rows), known])
                logits = again(*states, scalars, costs.seconds[costs.row(4)])
                assert int(logits[paths].argmax()) == length
    assert len({*by_length}) > 1


def test_a_length_is_cut_to_the_room_and_chosen_row_by_row(selector):
    lengths = PathLengths(priced(selector), DRAFT, 8, GREEDY)
    proposals = Proposals(LMDrafter(DRAFT), lengths.choose, 8)
    drafted = proposals.propose([[1, 2, row, 3] for row in range(6)], 7)
    assert len({len(draft) for draft in drafted}) > 1 and max(map(len, drafted)) <= 3


def test_time_beside_the_passes_favours_longer_paths():
    """With none of it a short path is best here; with much, the longest one."""
    best = Selector(schema(6, DRAFT.hidden_size, learned=False))
    best.static_efficiency = (1.0 + (1 - 0.8**DEPTH) * 4)[None].double()
    best.static_contexts = torch.tensor(
        [[0, 2, 0, 1]]
    )  # tokens of context at which no text was have no price
    drafter = LMDrafter(DRAFT)
    lengths = [
        PathLengths(priced(best, PRICED), DRAFT, 8, GREEDY, late).choose([drafter], [4])[0]
        for late in (0.0, 100.0)
    ]
    assert lengths[0] < lengths[1] == 8


def test_what_cannot_draft_is_refused(tmp_path, selector):
    save_head(random_head(TARGET), tmp_path / "head")
    for given, words in (
        ({"draft": "nowhere/draft"}, "draft='nowhere/draft'.*no such folder"),
        ({"draft": str(tmp_path), "selector": "gone"}, "selector='gone'"),
        ({"draft": str(tmp_path / "head")}, "draft head.*head_method"),
        ({"draft": "ngram", "selector": str(tmp_path)}, "n-grams have none"),
        ({"draft": "ngram", "fast": 1}, "fast: there is no such key"),
        (None, KEY),
    ):
        with refusal(words):
            Options.read(given)
    for version in ("0.31.2", "0.33.0", "1.0"):
        with refusal(rf"vLLM {version}.*0\.32"):
            check_version(version)
    check_version("0.32.1+cpu")
    with refusal(r"selector\.features=draft"):
        PathLengths(priced(Selector(schema(6, DRAFT.hidden_size))), DRAFT, 8, GREEDY)
    with refusal("hidden size 99"):
        PathLengths(priced(Selector(schema(0, 99))), DRAFT, 8, GREEDY)
    with refusal("tokens=20: selectors know paths of 1 to 16"):
        for_vllm("draft", "selector", tokens=20)
    with refusal("tokens=0"):
        for_vllm("ngram", tokens=0)
    asked = for_vllm("ngram", tokens=5)
    assert asked["speculative_config"]["model"] == "nde_talf.integrations.vllm.Proposer"
    assert Options.read(asked["additional_config"][KEY])
