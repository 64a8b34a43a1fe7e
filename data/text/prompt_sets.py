"""Ready-made prompts from prompt sets: which rows of a hub dataset or file, in which words, in
which chat template.

The sets themselves are configs/data/*.yaml.
"""

from collections.abc import Callable, Iterable

import numpy as np
from transformers import PreTrainedTokenizerBase

from nde_talf.data.text.corpus import load_rows
from nde_talf.data.text.prompts import Prompt, in_turn, make_prompt
from nde_talf.data.text.row_template import RowTemplate
from nde_talf.data.text.settings import PromptPart, PromptSet
from nde_talf.decoding.common.errors import UserError

CHARACTERS_PER_TOKEN = 16
"""How much text to look at for a cut: more than any tokenizer packs into a token on average."""


def load_sets(
    sets: dict[str, PromptSet],
    count: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    say: Callable[[str], object] = print,
) -> list[Prompt]:
    """`count` prompts in all, in equal parts from the sets and, within a set, from its parts; no
    text occurs twice.

    Example: 5 prompts of the sets a and b are a, b, a, b, a.

    Args:
        sets: by name.
        seed: of the choice of rows.
        tokenizer: counts tokens, and has the chat template.
        say: gets a sentence where prompts are left out because they are too long.

    Raises:
        UserError: a set cannot be read, has too few prompts, or does not fit its template or the
            tokenizer.
    """
    columns = []
    seen: set[str] = set()
    for index, (name, own) in enumerate(sets.items()):
        wanted = count // len(sets) + (index < count % len(sets))
        parts = own.parts or [PromptPart(own.source or "", own.template)]
        found = [
            _part(
                name,
                own,
                part,
                wanted // len(parts) + (i < wanted % len(parts)),
                seed,
                tokenizer,
                say,
                seen,
            )
            for i, part in enumerate(parts)
        ]
        columns.append(in_turn(found))
    return in_turn(columns)


def first_of_each(prompts: Iterable[Prompt]) -> dict[str, str]:
    """The first prompt of every kind, as the model gets it."""
    found: dict[str, str] = {}
    for prompt in prompts:
        found.setdefault(prompt.kind, prompt.text)
    return found


def _part(
    name: str,
    own: PromptSet,
    part: PromptPart,
    wanted: int,
    seed: int,
    tokenizer,
    say,
    seen: set[str],
) -> list[Prompt]:
    """`wanted` prompts of one source, none of them in `seen`, chosen at random (of a stream, among
    its first rows).
    """
    key = f"data.sets.{name}"
    if not part.source:
        raise UserError(f"{key}.source is not given: set it to a file or a hub name.")
    if own.chat and not tokenizer.chat_template:
        raise UserError(
            f"{key}.chat=true, but the tokenizer has no chat template: set {key}.chat=false."
        )
    template = RowTemplate(part.template, part.source, f"{key}.template")
    rows = load_rows(part.source, own.split, 20 * wanted if own.streaming else None)
    template.check(list(rows[0]) if len(rows) else [])
    found: list[Prompt] = []
    long = repeated = 0
    # The template counts too: a sentence to translate in both directions should not come twice.
    drawn = np.random.default_rng(
        list(f"{seed}/{part.source}/{part.template}".encode())
    ).permutation(len(rows))
    for index in drawn:
        if len(found) == wanted:
            break
        text = template.render(rows[int(index)])
        if own.cut:
            text = _first_tokens(text.strip(), own.cut, tokenizer)
        if not text.strip():
            continue
        if own.chat:
            turn = [{"role": "user", "content": text.strip()}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        if (
            len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            > own.max_tokens
        ):
            long += 1
            continue
        prompt = make_prompt(own.kind or name, text, own.chat)
        if prompt.id in seen:
            repeated += 1
            continue
        seen.add(prompt.id)
        found.append(prompt)
    if long:
        say(
            f"{part.source}: {long} prompts of more than {key}.max_tokens={own.max_tokens} tokens"
            " are left out"
        )
    if len(found) < wanted:
        others = f" and {long} longer than {key}.max_tokens" if long else ""
        others += f" and {repeated} that occurred before" if repeated else ""
        raise UserError(
            f"{key}: {wanted} prompts are asked of {part.source!r} (data.prompt_count, in equal"
            f" parts), which has {len(found)}{others}. Lower data.prompt_count, or choose another"
            " split."
        )
    return found


def _first_tokens(text: str, count: int, tokenizer) -> str:
    """The first full words of `text` that fit into `count` tokens; nothing of a text with fewer
    tokens than that.
    """
    window = text[: CHARACTERS_PER_TOKEN * count]
    offsets = tokenizer(
        window, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )["offset_mapping"]
    if len(offsets) <= count:
        return ""
    end = window.rfind(" ", 0, offsets[count - 1][1] + 1)
    return window[:end] if end > 0 else ""
