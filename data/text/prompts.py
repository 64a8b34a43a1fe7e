"""Prompts, tagged by kind: the contexts on which decoding is traced and measured.

This module cuts prompts from held-out documents: in Python sources they end in a function's body or
in a docstring, in other text between two words. Tokenizers only measure
length here.
"""

import ast
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from nde_talf.decoding.common.checksums import short_hash
from nde_talf.decoding.common.errors import UserError

if TYPE_CHECKING:
    import datasets

CODE, PROSE, TEXT = "code", "prose", "text"
"""Kinds of prompts: to be continued with Python code, with the prose of a docstring, or with text
of no known kind.
"""

PER_DOCUMENT = 4
"""The most prompts from one document, so that the prompts differ."""
RUN, FEW = 24, 4
"""Tokens in a row that prompts of one document share, and the most prompts that share them."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

CHARACTERS_PER_TOKEN = 8
"""No tokenizer here packs more characters into a token on average: how much text to cut before
counting tokens.
"""


@dataclass(frozen=True)
class Prompt:
    """A text to continue.

    Attributes:
        id: hash of the text.
        kind: domain that it is reported under, such as "code".
        text: as the model gets it.
        tokens: its token ids; empty before it is encoded.
        split: "train" or "validation" (its roots are traced) or "test" (only the evaluation decodes
            it). `Pair` files the two traced splits as "trace".
        chat: whether a chat template has put the special tokens in already.
        question: hash of all that the user asks in it (`question_keys`), however it is shortened;
            "" where nobody asks.
    """

    id: str
    kind: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    split: str = ""
    chat: bool = False
    question: str = ""


def prompts_from_documents(
    documents: "datasets.Dataset",
    count: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    tokens: tuple[int, int],
) -> list[Prompt]:
    """Cut `count` prompts from documents; equal arguments give equal prompts.

    Documents whose name ends with `.py` give *code* prompts, which end after the first lines of a
    function or class, and *prose* prompts, which end inside a docstring between two words. Other
    documents give prompts that end between two words, of the kind in the column `kind` if there is
    one, else "text". Every kind has the same number of prompts as far as possible, and any part of
    the list has about the same mixture. No text occurs twice.

    Args:
        documents: columns `name`, `text` and perhaps `kind`. They should be held out from training.
        count: of prompts.
        seed: of the choice.
        tokenizer: counts tokens.
        tokens: the shortest and the longest prompt, in tokens.

    Raises:
        UserError: the documents give fewer than `count` prompts.
    """
    order = random.Random(seed).sample(range(len(documents)), len(documents))
    pools: dict[str, list[Prompt]] = {}
    seen: set[str] = set()
    for index in order:
        document = documents[index]
        generator = random.Random(f"{seed}/{document['name']}")
        if document["name"].endswith(".py"):
            cuts = _python_cuts(document["text"], generator)
        else:
            words = _word_cuts(document["text"], generator)
            cuts = {str(document.get("kind") or TEXT): words}
        for kind, ends in cuts.items():
            pool = pools.setdefault(kind, [])
            most = min(count, len(pool) + PER_DOCUMENT // len(cuts))
            for end in ends:
                if len(pool) == most:
                    break
                longest = generator.randint(*tokens)
                text = _last_tokens(document["text"][:end], tokenizer, longest, tokens[0])
                if text is not None and text not in seen:
                    seen.add(text)
                    pool.append(make_prompt(kind, text))
    return _mixed(pools, count)


def related(prompts: list[Prompt]) -> list[int]:
    """Return the number of each prompt's group, [n]. Prompts that overlap are of one group.

    For example, two windows of one document share 30 tokens in a row, and the second shares 26 with
    a third: all three are of one group. A run of `RUN` tokens that more than `FEW` prompts hold,
    such as the words of a template, joins nobody.
    """
    holders: dict[int, list[int]] = {}
    for at, prompt in enumerate(prompts):
        starts = range(len(prompt.tokens) - RUN + 1)
        for run in {hash((*prompt.tokens[start : start + RUN],)) for start in starts}:
            holders.setdefault(run, []).append(at)
    groups = [*range(len(prompts))]
    for together in holders.values():
        joined = {groups[at] for at in together}
        if len(together) <= FEW and len(joined) > 1:
            groups = [min(joined) if group in joined else group for group in groups]
    return groups


def one_id_a_group(prompts: list[Prompt]) -> list[Prompt]:
    """Give prompts that overlap (`related`) the id of the first of them.

    Folds and intervals then count them as one prompt. If one group holds more than a quarter of all
    prompts, every prompt keeps its own id, since folds would be too uneven.
    """
    groups, first = related(prompts), dict[int, str]()
    if 4 * max(map(groups.count, groups), default=0) > len(prompts):
        return prompts
    grouped = zip(groups, prompts, strict=True)
    return [replace(prompt, id=first.setdefault(group, prompt.id)) for group, prompt in grouped]


def make_prompt(kind: str, text: str, chat: bool = False, question: str = "") -> Prompt:
    """Make a prompt with the hash of its text as id."""
    return Prompt(short_hash(text), kind, text, chat=chat, question=question)


def encode_prompts(
    prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, special: bool
) -> list[Prompt]:
    """Add token ids to prompts.

    Args:
        prompts: texts.
        tokenizer: the target's.
        special: add the tokenizer's special tokens where no chat template put them in.
    """
    return [
        replace(p, tokens=tokenizer(p.text, add_special_tokens=special and not p.chat)["input_ids"])
        for p in prompts
    ]


def ids_of(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Encode a text without special tokens."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def in_turn(lists: list[list[Prompt]]) -> list[Prompt]:
    """Take one of each list, then the next of each, as long as there are any."""
    return [prompt for turn in zip_longest(*lists) for prompt in turn if prompt is not None]


def _mixed(pools: dict[str, list[Prompt]], count: int) -> list[Prompt]:
    """Take `count` prompts, equally many of each kind; more where another kind has too few.

    Each kind is spread evenly over the list.
    """
    mixed = in_turn([pools[kind] for kind in sorted(pools)])
    if len(mixed) < count:
        raise UserError(
            f"{count} prompts are asked for, but the held-out documents yield {len(mixed)}. Ask for"
            f" at most {len(mixed)}, use a larger source (or hold out more documents), or widen the"
            " range of lengths."
        )
    placed: list[tuple[float, str, Prompt]] = []
    for kind in pools:
        those = [prompt for prompt in mixed[:count] if prompt.kind == kind]
        placed += [((at + 0.5) / len(those), kind, prompt) for at, prompt in enumerate(those)]
    return [prompt for *_, prompt in sorted(placed, key=itemgetter(0, 1))]


def _last_tokens(
    text: str, tokenizer: PreTrainedTokenizerBase, length: int, shortest: int
) -> str | None:
    """Take the last full lines of `text`, or the last words of one long line.

    They fit into `length` tokens; None if they have fewer than `shortest`.
    """
    window = text[-length * CHARACTERS_PER_TOKEN :]
    for boundary in ("\n", " "):
        start = 0 if len(window) == len(text) else window.find(boundary) + 1
        while len(ids := ids_of(window[start:], tokenizer)) > length:
            # Jump over most of what is too long, but never past the last boundary.
            excess = len(window[start:]) * (len(ids) - length) // (2 * len(ids))
            end = window.find(boundary, start + excess)
            if end < 0 or end + 1 >= len(window):
                break
            start = end + 1
        if shortest <= len(ids) <= length and window[start:].strip():
            return window[start:]
    return None


def _word_cuts(text: str, generator: random.Random) -> Iterator[int]:
    """Yield random ends of words in `text`, as offsets of the space that follows them."""
    for _ in range(8 * PER_DOCUMENT):
        end = text.find(" ", generator.randrange(len(text)))
        if end > 0 and not text[end - 1].isspace():
            yield end


def _python_cuts(source: str, generator: random.Random) -> Mapping[str, Iterable[int]]:
    """Find where code and prose prompts may end in a Python source, in random order.

    The ends are character offsets; there are none if the source does not parse. A code prompt does
    not end with a line end: without the next line's indentation that is a token that models have
    seen at the ends of files.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: deep nesting
        return {}
    lines = source.splitlines(keepends=True)
    if len(lines) != len(source.split("\n")) - source.endswith("\n"):
        return {}  # form feeds and the like, which `ast` does not count as line ends
    starts = list(accumulate(map(len, lines), initial=0))
    cuts: dict[str, list[int]] = {CODE: [], PROSE: []}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | Definition) or not node.body:
            continue
        documented = ast.get_docstring(node, clean=False) is not None
        if not isinstance(node, ast.Module):
            line = starts[generator.choice(_code_lines(node, documented))]
            cuts[CODE].append(len(source[:line].rstrip()))
        if documented:
            words = _prose_ends(
                source, starts[node.body[0].lineno - 1 : _last_line(node.body[0]) + 1]
            )
            if len(words) >= 16:
                cuts[PROSE].append(generator.choice(words))
    for ends in cuts.values():
        generator.shuffle(ends)
    return cuts


def _code_lines(node: Definition, documented: bool) -> list[int]:
    """List the lines that end in the first statements of `node`, its docstring passed over."""
    first = node.body[0]
    body = node.body[1:] if documented else node.body
    # without a docstring: the last line before the first statement
    header = _last_line(first) if documented else max(node.lineno, first.lineno - 1)
    return [header, *map(_last_line, body[: min(3, len(body) - 1)])]


def _last_line(statement: ast.stmt) -> int:
    return statement.end_lineno or statement.lineno


def _prose_ends(source: str, starts: list[int]) -> list[int]:
    """List the ends of words in a docstring whose lines begin at `starts`, the last after it.

    Some prose is left after each, so that the continuation can be prose too.
    """
    first, last = starts[0], starts[-1]
    words = [i for i in range(first, last) if source[i] == " " and source[i - 1].isalnum()]
    return words[len(words) // 8 : len(words) - len(words) // 4]
