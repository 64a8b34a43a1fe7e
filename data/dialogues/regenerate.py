"""Response regeneration: a head learns from the target's answers in place of a data set's.

The dialogue is answered turn by turn: the next question is asked after the target's own answer to
the one before. Dialogues are read, and shards written, elsewhere.
"""

from contextlib import suppress
from dataclasses import replace
from itertools import count

from nde_talf.data.dialogues.chat_mask import ChatEncoder
from nde_talf.data.dialogues.read import Dialogue
from nde_talf.data.engines.transformers import Engine
from nde_talf.data.text.conversation import ASSISTANT, SYSTEM, Message, UnsuitedError
from nde_talf.decoding.sampling.rng import SamplingSetting


def regenerate(
    engine: Engine,
    encoder: ChatEncoder,
    dialogues: list[Dialogue],
    setting: SamplingSetting,
    new_tokens: int,
    longest: int,
    seed: int,
) -> list[Dialogue]:
    """Answer the questions of dialogues; the same seed gives the same answers.

    Example: [user: "2 + 2?", user: "And 3 + 3?"] becomes [user: "2 + 2?", assistant: "4", user:
    "And 3 + 3?", assistant: "6"].

    A dialogue ends before a question that does not fit, before an empty answer, and after an answer
    that had not ended after `new_tokens` tokens (it is then `cut`). A dialogue without any
    answer is left out.

    Args:
        engine: samples from the target.
        encoder: the target's tokenizer with its chat template.
        dialogues: of questions alone, perhaps after a system message.
        setting: how answers are sampled.
        new_tokens: maximum number of tokens of an answer.
        longest: maximum number of tokens of a question with everything before it and its answer.
        seed: of the sampling.
    """
    made = [
        replace(one, messages=[m for m in one.messages if m["role"] == SYSTEM]) for one in dialogues
    ]
    left = {i: one.messages[len(made[i].messages) :] for i, one in enumerate(dialogues)}
    for turn in count():
        asked = {i: [*made[i].messages, question] for i, (question, *_) in left.items()}
        prompts = _prompts(encoder, asked, longest - new_tokens)
        if not prompts:
            break
        sampled = engine.sample([*prompts.values()], setting, new_tokens, seed * 1_009 + turn)
        going: dict[int, list[Message]] = {}
        for (i, prompt), ids in zip(prompts.items(), sampled, strict=True):
            answer, (question, *others) = ids[len(prompt) :], left[i]
            cut = len(answer) == new_tokens  # an end of text would have been dropped
            text = encoder.tokenizer.decode(answer, clean_up_tokenization_spaces=False).strip()
            if text:
                said = [question, {"role": ASSISTANT, "content": text}]
                made[i] = replace(made[i], messages=[*made[i].messages, *said], cut=cut)
                if others and not cut:
                    going[i] = others
        left = going
    return [one for one in made if len(one.messages) > 1]


def _prompts(
    encoder: ChatEncoder, asked: dict[int, list[Message]], most: int
) -> dict[int, list[int]]:
    """Encode what is asked; without what is too long, or what the template refuses."""
    prompts = {}
    for i, messages in asked.items():
        with suppress(UnsuitedError):
            if len(ids := encoder.prompt(messages)) <= most:
                prompts[i] = ids
    return prompts
