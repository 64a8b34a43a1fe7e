"""The outside reference is counted like our own methods: without the pass that holds the prompt."""

from decoding.model import CausalModel
from decoding.sampling import SamplingSetting
from evaluation.assisted import transformers_assisted
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


def test_advice_of_a_generation_config_is_ignored():
    target, _ = tiny_pair(40)
    advice = target.module.generation_config
    advice.repetition_penalty, advice.min_p, advice.eos_token_id = 3.0, 0.5, 7
    CausalModel(target.module)
    kept = target.module.generation_config
    assert kept.eos_token_id == 7 and kept.repetition_penalty in (None, 1.0) and kept.min_p is None
