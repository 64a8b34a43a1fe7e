"""Transformers' loops are counted like ours: without the pass that holds the prompt."""

import pytest

from nde_talf import SamplingSetting
from nde_talf.evaluation.benchmark import Task
from nde_talf.evaluation.loops import schedule, scheduled, transformers_loop
from tests.decoding.pairs import tiny_pair


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 6])
def test_a_constant_schedule_drafts_that_many_tokens_at_every_step(tokens):
    """A flat draft stops the default schedule behind its first token, whose probability is far
    below the threshold.
    """
    target, draft = tiny_pair(40)
    draft.module.generation_config.eos_token_id = None
    kept = draft.module.generation_config.to_dict()

    def decode(wanted):
        given = wanted and schedule(wanted)
        return transformers_loop("assisted", target, SamplingSetting(1.0), 60, draft, given)(
            Task([1, 2], 3)
        )

    for wanted, most in ((None, 1), (tokens, tokens), (None, 1)):
        record = decode(wanted)
        assert record.nodes == (most + 1) * record.steps  # the last one has room too
    assert draft.module.generation_config.to_dict() == kept
    with pytest.raises(ValueError, match="cut"), scheduled(draft, schedule(tokens)):
        raise ValueError("cut")
    assert draft.module.generation_config.to_dict() == kept


def test_plain_decoding_and_prompt_lookup_write_the_same_greedy_text_in_as_many_and_in_fewer_passes():
    target, _ = tiny_pair(12, scale=30.0)
    plain = transformers_loop("plain", target, SamplingSetting(0.0), 50)(Task([1, 2, 3]))
    assert (
        plain.tokens == plain.steps == plain.nodes == 49
        and plain.accepted == {"0": 49}
        and plain.cpu_seconds > 0
    )
    measured = [
        transformers_loop(
            "x",
            target,
            SamplingSetting(0.0),
            50,
            prompt_lookup_num_tokens=n,
            max_matching_ngram_size=2,
        )(Task([1, 2, 3]))
        for n in (1, 8)
    ]
    assert 49 > measured[0].steps > measured[1].steps and max(
        map(int, measured[1].accepted)
    ) > 1 >= max(map(int, measured[0].accepted))
