"""The outside reference is counted like our own methods: without the pass that holds the prompt."""

import pytest

from decoding.model import CausalModel
from decoding.sampling import SamplingSetting
from evaluation.assisted import assisted_title, is_assisted, schedule, transformers_assisted
from evaluation.benchmark import Record
from tests.decoding.pairs import tiny_pair


def test_tokens_and_passes_of_the_prefill_are_not_counted():
    target, draft = tiny_pair(40)
    prompt, new_tokens = [1, 2, 3, 4], 40
    record = transformers_assisted("assisted", target, draft, SamplingSetting(0.0), new_tokens)(prompt, 0, "code")
    assert 0 < record.tokens < new_tokens and record.steps > 0 and record.seconds > 0
    # Greedy: a pass commits what the draft and the target agree on, so passes partition the tokens.
    assert record.steps <= record.tokens


def test_a_perfect_draft_gives_whole_blocks():
    target, twin = (tiny_pair(40, scale=20.0)[0] for _ in range(2))  # peaked: an unsure assistant stops early
    record = transformers_assisted("assisted", target, twin, SamplingSetting(0.0), 61)(list(range(8)), 0, "code")
    assert record.tokens / record.steps > 3


@pytest.mark.parametrize("tokens", [2, 6])
def test_a_constant_schedule_drafts_that_many_tokens_at_every_step(tokens):
    """A flat draft stops the default schedule behind its first token, whose probability is far below the threshold."""
    target, draft = tiny_pair(40)
    kept = draft.module.generation_config.to_dict()

    def decode(wanted: int | None) -> Record:
        return transformers_assisted("assisted", target, draft, SamplingSetting(1.0), 60, wanted)([1, 2], 3, "code")

    for wanted, most in ((None, 1), (tokens, tokens), (None, 1)):
        record = decode(wanted)
        short = most * record.steps - (record.nodes - record.steps)  # of that many drafted tokens at every step
        assert 0 <= short <= sum(range(most + 1))  # the last steps have less room
    assert draft.module.generation_config.to_dict() == kept
    with pytest.raises(ValueError, match="cut"), schedule(draft, tokens):
        raise ValueError("cut")
    assert draft.module.generation_config.to_dict() == kept


def test_names_tell_the_schedule():
    assert assisted_title(6) == "transformers assisted (6 tokens)"
    assert all(map(is_assisted, (assisted_title(6), assisted_title(None), "transformers assisted")))
    assert not is_assisted("Traversal (1, 0, 4)")


def test_advice_of_a_generation_config_is_ignored():
    target, _ = tiny_pair(40)
    advice = target.module.generation_config
    advice.repetition_penalty, advice.min_p, advice.eos_token_id = 3.0, 0.5, 7
    CausalModel(target.module)
    kept = target.module.generation_config
    assert kept.eos_token_id == 7 and kept.repetition_penalty in (None, 1.0) and kept.min_p is None
