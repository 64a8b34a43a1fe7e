"""The target's own answers: each is what it says behind the dialogue so far, and unfinished ones
end a dialogue.
"""

import pytest

from nde_talf import SamplingSetting
from nde_talf.data.dialogues.chat_mask import ChatEncoder
from nde_talf.data.dialogues.read import ASSISTANT, Dialogue, in_order
from nde_talf.data.dialogues.regenerate import regenerate
from nde_talf.data.engines.transformers import TransformersEngine
from tests.data.chat_templates import family_tokenizer
from tests.draft_training.heads import tiny_target

GREEDY, NEW_TOKENS, LONGEST = SamplingSetting(0.0), 6, 120
QUESTIONS = [
    [f"Who is {i}?", "And why?" + "?" * i, f"Since {i * i}?", "So?"] for i in range(12)
] + [["Hm?", "日本" * 40]]


@pytest.mark.slow
def test_every_answer_is_what_the_target_says_behind_the_dialogue_so_far():
    tokenizer = family_tokenizer("llama3", ["Who? And why? Since when?"])
    target = tiny_target(vocabulary=len(tokenizer), seed=1)
    # So that many answers end early.
    target.module.generation_config.eos_token_id = [*range(0, len(tokenizer), 4)]
    engine, encoder = TransformersEngine(target), ChatEncoder(tokenizer)
    system = {"role": "system", "content": "Be odd."}
    asked = [Dialogue(str(i), [system, *in_order(turns)]) for i, turns in enumerate(QUESTIONS)]
    dialogues = regenerate(engine, encoder, asked, GREEDY, NEW_TOKENS, LONGEST, 0)
    answers = cut = 0
    for dialogue in dialogues:
        first, *turns = dialogue.messages
        questions = [message["content"] for message in turns[::2]]
        assert first == system and questions == QUESTIONS[int(dialogue.name)][: len(questions)]
        for i in range(2, len(dialogue.messages), 2):
            prompt = encoder.prompt(dialogue.messages[:i])
            (text,) = engine.sample([prompt], GREEDY, NEW_TOKENS, 0)
            written = text[len(prompt) :]
            answer = {"role": ASSISTANT, "content": tokenizer.decode(written).strip()}
            assert dialogue.messages[i] == answer
            unfinished = len(written) == NEW_TOKENS
            # An unfinished answer ends a dialogue.
            assert unfinished == (dialogue.cut and i == len(dialogue.messages) - 1)
            assert len(prompt) + NEW_TOKENS <= LONGEST
            answers, cut = answers + 1, cut + unfinished
    assert answers > len(dialogues) > cut > 0  # several turns, and unfinished answers
