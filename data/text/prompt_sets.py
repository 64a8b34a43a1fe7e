"""Ready-made prompts: rows of a hub dataset or file, in a template's words, in a chat template.

The sets themselves are configs/data/*.yaml.
"""

from bisect import bisect_right
from collections import Counter

import numpy as np
from transformers import PreTrainedTokenizerBase

from nde_talf.data.text.conversation import (
    SYSTEM,
    USER,
    Message,
    UnsuitedError,
    and_skipped,
    question,
    question_keys,
)
from nde_talf.data.text.corpus import load_table
from nde_talf.data.text.prompts import Prompt, ids_of, in_turn, make_prompt
from nde_talf.data.text.row_template import RowTemplate
from nde_talf.data.text.settings import PromptPart, PromptSet
from nde_talf.data.text.templates import ChatTemplate
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console

CHARACTERS_PER_TOKEN = 16
"""Text to look at for a cut: more than any tokenizer packs into a token on average."""


def load_sets(
    sets: dict[str, PromptSet], count: int, seed: int, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Draw `count` prompts in all, in equal parts from the sets and, within a set, from its parts.

    No text occurs twice. Example: 5 prompts of the sets a and b are a, b, a, b, a. Prints what is
    left out or cut to its length.

    Args:
        sets: by name.
        count: of all sets together.
        seed: of the choice of rows.
        tokenizer: counts tokens, and has the chat template.

    Raises:
        UserError: a set cannot be read, has too few prompts, or does not fit its template or the
            tokenizer.
    """
    by_set = []
    seen: set[str] = set()
    for index, (name, prompt_set) in enumerate(sets.items()):
        from_set = count // len(sets) + (index < count % len(sets))
        key, chat = f"data.sets.{name}.chat", None
        if prompt_set.chat and not tokenizer.chat_template:
            raise UserError(f"{key}=true, but the tokenizer has no chat template: set {key}=false.")
        if prompt_set.chat is not False and tokenizer.chat_template:
            chat = ChatTemplate(tokenizer, key)
        template = prompt_set.template or "{text}"
        parts = prompt_set.parts or [PromptPart(prompt_set.source or "", template)]
        by_part = []
        for i, part in enumerate(parts):
            from_part = from_set // len(parts) + (i < from_set % len(parts))
            by_part.append(_draw(name, prompt_set, part, from_part, seed, tokenizer, chat, seen))
        by_set.append(in_turn(by_part))
    return in_turn(by_set)


def _draw(
    name: str,
    prompt_set: PromptSet,
    part: PromptPart,
    count: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatTemplate | None,
    seen: set[str],
) -> list[Prompt]:
    """Draw `count` prompts of one source, none of them in `seen`. Prints what is left out."""
    key = f"data.sets.{name}"
    template = RowTemplate(part.template, part.source, f"{key}.template")
    first = 20 * max(1, count)  # a set without its share of few prompts is checked too
    rows = load_table(part.source, prompt_set.split, first if prompt_set.streaming else None)
    template.check(rows.column_names)
    # The template counts too: a sentence to translate in both directions should not come twice.
    key_of_draw = list(f"{seed}/{part.source}/{part.template}".encode())
    prompts: list[Prompt] = []
    skipped: Counter[str] = Counter()
    # In random order; of a stream the first rows.
    for index in np.random.default_rng(key_of_draw).permutation(len(rows)):
        if len(prompts) == count:
            break
        row = rows[int(index)]
        try:
            asked = question(row, template)
            text = _text_of(asked, template.render(row), key, prompt_set, tokenizer, chat)
        except UnsuitedError as error:
            skipped[str(error)] += 1
            continue
        bare = [m | {"content": template.bare(m["content"])} for m in asked]
        prompt = make_prompt(prompt_set.kind or name, text, bool(chat), question_keys(bare)[-1])
        if prompt.id in seen:
            skipped["that occurred before"] += 1
        else:
            prompts.append(prompt)
            seen.add(prompt.id)
    others = and_skipped(+skipped)
    if len(prompts) < count:
        raise UserError(
            f"{key}: {count} prompts are asked of {part.source!r} (data.prompt_count, in equal"
            f" parts), which has {len(prompts)}{others}. Lower data.prompt_count, or choose another"
            " split."
        )
    if others:
        console.print(f"{part.source}: {len(prompts)} prompts{others}")
    return prompts


def _text_of(
    messages: list[Message],
    plain: str,
    key: str,
    prompt_set: PromptSet,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatTemplate | None,
) -> str:
    """Return a row as a prompt. Raises UnsuitedError for one that is too long, or short to cut.

    plain: the text of a prompt without a chat template. key: of the set.
    """
    if prompt_set.cut:
        plain = _first_tokens(plain.strip(), prompt_set.cut, tokenizer)
        if not plain:
            raise UnsuitedError(f"not longer than {key}.cut={prompt_set.cut}")
        messages = [{"role": USER, "content": plain}]
    if not chat:
        messages = [{"role": USER, "content": plain}]

    def shown(messages: list[Message]) -> tuple[str, int]:
        text = messages[-1]["content"]
        if chat:
            text = chat.render(messages, add_generation_prompt=True)
        return text, len(ids_of(text, tokenizer)) - prompt_set.max_tokens

    text, excess = shown(messages)
    if excess > 0 and prompt_set.shorten:  # without earlier turns
        *before, last = messages
        system = [message for message in before if message["role"] == SYSTEM]
        text, excess = shown([*system, last])
        if excess > 0:  # without the end of the question
            question = last["content"]
            room = max(1, len(ids_of(question, tokenizer)) - excess)
            # A letter is a token or less.
            start = _first_tokens(question, room, tokenizer) or question[:room]
            text, excess = shown([*system, last | {"content": start}])
    if excess > 0:
        raise UnsuitedError(f"longer than {key}.max_tokens={prompt_set.max_tokens}")
    return text


def _first_tokens(text: str, count: int, tokenizer) -> str:
    """Cut `text` to the full words that fit into `count` tokens; nothing of a shorter text."""
    window = text[: CHARACTERS_PER_TOKEN * count]
    if len(ids_of(window, tokenizer)) <= count:
        return ""
    ends = [at for at, letter in enumerate(window) if letter == " "]
    fitting = bisect_right(ends, count, key=lambda end: len(ids_of(window[:end], tokenizer)))
    return window[: ends[fitting - 1]] if fitting else ""
