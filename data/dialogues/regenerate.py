"""Response regeneration: a head learns from the target's answers in place of a data set's.

The dialogue is answered turn by turn: the next question is asked after the target's own answer to
the one before. This module knows an engine and a chat template, but not where dialogues come from
or where shards go.
"""

from dataclasses import replace

from nde_talf.data.dialogues.chat_mask import ChatEncoder
from nde_talf.data.dialogues.read import ASSISTANT, SYSTEM, Dialogue
from nde_talf.data.engines.base import Engine
from nde_talf.decoding.sampling import SamplingSetting


class _Begun:
    """A dialogue that is being answered."""

    def __init__(self, dialogue: Dialogue):
        self.dialogue = dialogue
        self.messages = [m for m in dialogue.messages if m["role"] == SYSTEM]
        self.questions = [m for m in dialogue.messages if m["role"] != SYSTEM]
        self.cut, self.ended = False, False

    def prompt(self, encoder: ChatEncoder, turn: int, longest: int) -> list[int] | None:
        """Ask question number `turn`; None if the dialogue has ended."""
        if self.ended or turn >= len(self.questions):
            return None
        ids = encoder.prompt([*self.messages, self.questions[turn]])
        self.ended = len(ids) > longest
        return None if self.ended else ids

    def answer(self, text: str, turn: int, cut: bool) -> None:
        if text:
            self.messages += [self.questions[turn], {"role": ASSISTANT, "content": text}]
            self.cut = cut
        self.ended = cut or not text


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
    that was still going on after `new_tokens` tokens (it is then `cut`). A dialogue without any
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
    begun = [_Begun(dialogue) for dialogue in dialogues]
    for turn in range(max((len(one.questions) for one in begun), default=0)):
        asked = {i: one.prompt(encoder, turn, longest - new_tokens) for i, one in enumerate(begun)}
        prompts = {i: prompt for i, prompt in asked.items() if prompt}
        if not prompts:
            break
        sampled = engine.sample(list(prompts.values()), setting, new_tokens, seed * 1_009 + turn)
        for (i, prompt), tokens in zip(prompts.items(), sampled, strict=True):
            answer = tokens[len(prompt) :]
            text = encoder.tokenizer.decode(
                answer, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            # An end of text would have been dropped.
            begun[i].answer(text.strip(), turn, cut=len(answer) == new_tokens)
    return [
        replace(one.dialogue, messages=one.messages, cut=one.cut)
        for one in begun
        if any(message["role"] == ASSISTANT for message in one.messages)
    ]
