"""Answers of the target itself in place of a data set's, so that a head learns what the target says.

Turn by turn: a person's next question is put behind what the target answered before. It knows an engine and a chat template;
not where dialogues come from, nor where shards go.
"""

from dataclasses import replace

from data.dialogues.chat_mask import ChatEncoder
from data.dialogues.read import ASSISTANT, SYSTEM, Dialogue, Message
from data.engines.base import Engine
from decoding.sampling import SamplingSetting


def answered(
    engine: Engine,
    encoder: ChatEncoder,
    dialogues: list[Dialogue],
    setting: SamplingSetting,
    new_tokens: int,
    longest: int,
    seed: int,
) -> list[Dialogue]:
    """The dialogues (of questions alone) with the engine's answers; the same seed gives the same ones.

    A dialogue ends before a question that with `new_tokens` more would reach beyond `longest` tokens, before an empty answer,
    and behind one that had not ended after `new_tokens` (it is then `cut`). One that has no answer at all is left out.
    """
    said: list[list[Message]] = [[m for m in one.messages if m["role"] == SYSTEM] for one in dialogues]
    asked = [[m for m in one.messages if m["role"] != SYSTEM] for one in dialogues]
    cut, open_ = [False] * len(dialogues), set(range(len(dialogues)))
    for turn in range(max(map(len, asked), default=0)):
        prompts = {}
        for i in sorted(open_):
            if turn < len(asked[i]) and len(ids := encoder.prompt([*said[i], asked[i][turn]])) + new_tokens <= longest:
                prompts[i] = ids
        open_ = set(prompts)
        if not prompts:
            break
        found = engine.sample(list(prompts.values()), setting, new_tokens, seed * 1_009 + turn)
        for (i, prompt), tokens in zip(prompts.items(), found, strict=True):
            answer = tokens[len(prompt) :]
            text = encoder.tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()
            if text:
                said[i] += [asked[i][turn], {"role": ASSISTANT, "content": text}]
                cut[i] = len(answer) == new_tokens  # an end of text would have been dropped
            if cut[i] or not text:
                open_.discard(i)
    return [
        replace(one, messages=messages, cut=unfinished)
        for one, messages, unfinished in zip(dialogues, said, cut, strict=True)
        if any(message["role"] == ASSISTANT for message in messages)
    ]
