"""Ready-made prompts: rows of a hub dataset or file, in a template's words, in a chat template.

The sets themselves are configs/data/*.yaml.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from nde_talf.data.text.corpus import load_table
from nde_talf.data.text.prompts import Prompt, ids_of, in_turn, make_prompt
from nde_talf.data.text.row_template import RowTemplate
from nde_talf.data.text.settings import PromptPart, PromptSet
from nde_talf.data.text.templates import render
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console

CHARACTERS_PER_TOKEN = 16
"""Text to look at for a cut: more than any tokenizer packs into a token on average."""


def load_sets(
    sets: dict[str, PromptSet],
    count: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Prompt]:
    """Draw `count` prompts in all, in equal parts from the sets and, within a set, from its parts.

    No text occurs twice. Example: 5 prompts of the sets a and b are a, b, a, b, a. Prints how many
    prompts are left out because they are too long.

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
        if prompt_set.chat is None:
            prompt_set = replace(prompt_set, chat=bool(tokenizer.chat_template))
        if prompt_set.chat and not tokenizer.chat_template:
            key = f"data.sets.{name}.chat"
            raise UserError(f"{key}=true, but the tokenizer has no chat template: set {key}=false.")
        template = prompt_set.template or "{text}"
        parts = prompt_set.parts or [PromptPart(prompt_set.source or "", template)]
        by_part = []
        for i, part in enumerate(parts):
            from_part = from_set // len(parts) + (i < from_set % len(parts))
            prompts, long = _draw(name, prompt_set, part, from_part, seed, tokenizer, seen)
            by_part.append(prompts)
            if long:
                fate = "cut to it" if prompt_set.shorten else "left out"
                console.print(
                    f"{part.source}: {long} prompts of more than data.sets.{name}.max_tokens="
                    f"{prompt_set.max_tokens} tokens are {fate}"
                )
        by_set.append(in_turn(by_part))
    return in_turn(by_set)


def first_of_each(prompts: Iterable[Prompt]) -> dict[str, str]:
    """Return the first prompt of every kind, as the model gets it."""
    first: dict[str, str] = {}
    for prompt in prompts:
        first.setdefault(prompt.kind, prompt.text)
    return first


def _draw(
    name: str,
    prompt_set: PromptSet,
    part: PromptPart,
    count: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    seen: set[str],
) -> tuple[list[Prompt], int]:
    """Draw `count` prompts of one source, none of them in `seen`, and count those too long."""
    key = f"data.sets.{name}"
    template = RowTemplate(part.template, part.source, f"{key}.template")
    first = 20 * max(1, count)  # a set without its share of few prompts is checked too
    rows = load_table(part.source, prompt_set.split, first if prompt_set.streaming else None)
    template.check(rows.column_names)
    # The template counts too: a sentence to translate in both directions should not come twice.
    key_of_draw = list(f"{seed}/{part.source}/{part.template}".encode())
    prompts: list[Prompt] = []
    long = repeated = 0
    # In random order; of a stream the first rows.
    for index in np.random.default_rng(key_of_draw).permutation(len(rows)):
        if len(prompts) == count:
            break
        text = template.render(rows[int(index)])
        if prompt_set.cut:
            text = _first_tokens(text.strip(), prompt_set.cut, tokenizer)
        if not text.strip():
            continue
        text, too_long = _fitting(text, prompt_set, tokenizer)
        prompt = make_prompt(prompt_set.kind or name, text, bool(prompt_set.chat))
        long += too_long
        repeated += prompt.id in seen
        if text and prompt.id not in seen:
            prompts.append(prompt)
            seen.add(prompt.id)
    if len(prompts) < count:
        others = f" and {long} longer than {key}.max_tokens" if long else ""
        others += f" and {repeated} that occurred before" if repeated else ""
        raise UserError(
            f"{key}: {count} prompts are asked of {part.source!r} (data.prompt_count, in equal"
            f" parts), which has {len(prompts)}{others}. Lower data.prompt_count, or choose another"
            " split."
        )
    return prompts, long


def _fitting(
    text: str, prompt_set: PromptSet, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, bool]:
    """Return a row as a prompt, and whether it was too long: then it is cut, or is ""."""
    prompt = _as_prompt(text, prompt_set, tokenizer)
    excess = len(ids_of(prompt, tokenizer)) - prompt_set.max_tokens
    if excess > 0:
        room = max(1, len(ids_of(text, tokenizer)) - excess) if prompt_set.shorten else 0
        start = _first_tokens(text, room, tokenizer) or text[:room]  # a letter is a token or less
        prompt = _as_prompt(start, prompt_set, tokenizer)
    return prompt, excess > 0


def _as_prompt(text: str, prompt_set: PromptSet, tokenizer: PreTrainedTokenizerBase) -> str:
    """Put a rendered row into the chat template if that is asked for."""
    if not (prompt_set.chat and text.strip()):
        return text
    turn = [{"role": "user", "content": text.strip()}]
    return render(tokenizer, turn, "data.sets", add_generation_prompt=True)


def _first_tokens(text: str, count: int, tokenizer) -> str:
    """Cut `text` to the full words that fit into `count` tokens; nothing of a shorter text."""
    window = text[: CHARACTERS_PER_TOKEN * count]
    if len(ids_of(window, tokenizer)) <= count:
        return ""
    ends = [at for at, letter in enumerate(window) if letter == " "]
    fitting = bisect_right(ends, count, key=lambda end: len(ids_of(window[:end], tokenizer)))
    return window[: ends[fitting - 1]] if fitting else ""
