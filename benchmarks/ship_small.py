"""Write the shipped pair: `python -m benchmarks.ship_small --target FOLDER --draft FOLDER`.

Target and draft, folders that the recipe made (`recipes/small`) or a checkpoint of its stable
phase, go into `checkpoints/small/` in bfloat16, with tokenizer, text, held-out prompts and
checksums. `--head FOLDER` adds an exported head, and `--run FOLDER` what a run with model=small
made: latency table and selectors.
"""

import argparse
import ast
import json
import random
import shutil
from functools import partial
from pathlib import Path

import datasets
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from nde_talf.data.text.corpus import by_hash
from nde_talf.data.text.pair import DOMAINS, Pair
from nde_talf.data.text.prompts import (
    Prompt,
    encode_prompts,
    make_prompt,
    prompts_from_documents,
)
from nde_talf.data.text.shipped import DRAFT, SHIPPED, TARGET
from nde_talf.decoding.common.checksums import write_checksums
from nde_talf.decoding.common.files import write_atomically
from nde_talf.pipelines.config.schema import TABLE
from recipes.small.sources import CODE, Document, documents, read_frozen
from recipes.small.text import prepared
from recipes.small.training import RecipeConfig, weights

COUNTS = {"code": 240, "manual": 100, "arithmetic": 80, "tables": 80}
"""Held-out prompts by domain."""
PROMPT_TOKENS = 32, 128
PROMPTS_IN_DOCUMENT = 6
CHARACTERS = 6
"""Characters of a token of code, at most: a prompt's beginning is looked for no further back."""
TEST_PROMPTS = 200
TRAIN_ROWS = 1600
"""Rows of the training text that ship, for the heads that a run trains."""


def ship(out: Path, state: Path, models: dict[str, Path]) -> None:
    """Write the shipped pair to `out`: models by role, text and prompts."""
    text = prepared(state / "text", documents(read_frozen()))
    held_out = (each for each in documents(read_frozen()) if each.held_out)
    texts = sorted(held_out, key=lambda d: by_hash(f"order/{d.name}"))
    for role, where in models.items():
        model = (
            weights(where, RecipeConfig(), len(text.tokenizer))
            if where.is_file()
            else AutoModelForCausalLM.from_pretrained(
                where, dtype=torch.float32, trust_remote_code=False
            )
        )

        def save(path: Path, model: torch.nn.Module = model) -> None:
            model.to(torch.bfloat16).save_pretrained(path)
            text.tokenizer.save_pretrained(path)
            write_checksums(path)

        write_atomically(out / "pair" / role, save)
    prompts = encode_prompts(held_out_prompts(texts, text.tokenizer), text.tokenizer, special=True)
    rows = text.train[:: len(text.train) // TRAIN_ROWS][:TRAIN_ROWS]
    held_out = torch.cat([*text.held_out.values()])
    Pair(out / "pair").write(TARGET, DRAFT, prompts, TEST_PROMPTS, rows, held_out)
    counts = {domain: len(part) for domain, part in text.held_out.items()}
    (out / DOMAINS).write_text(json.dumps(counts) + "\n")


def add(out: Path, run: Path) -> None:
    """Copy what a run made of the shipped pair: latency table, selectors, head and its tree."""
    made = [run / "latency" / TABLE, run / "selector" / "export"]
    for path in [*made, *(run / "report").glob("tuned-*.json")]:
        copy = shutil.copytree if path.is_dir() else shutil.copy
        write_atomically(out / path.relative_to(run), partial(copy, path))


def add_head(out: Path, export: Path) -> None:
    """Copy an exported head, its weights in bfloat16."""

    def copy(temporary: Path) -> None:
        shutil.copytree(export, temporary)
        file = temporary / "model.safetensors"
        save_file({k: v.bfloat16() for k, v in load_file(file).items()}, file)
        write_checksums(temporary)

    write_atomically(out / "draft" / "export", copy)


def held_out_prompts(documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Cut the prompts that ship with the model from the held-out documents, the domains in turn."""
    placed = []
    for domain, count in COUNTS.items():
        own = [document for document in documents if document.domain == domain]
        if domain == CODE:
            prompts = code_prompts(own, tokenizer)[:count]
        else:
            rows = [{"name": d.name, "text": d.text, "kind": domain} for d in own]
            table = datasets.Dataset.from_list(rows)
            prompts = prompts_from_documents(table, count, 0, tokenizer, PROMPT_TOKENS)
        placed += [((at + 0.5) / len(prompts), domain, each) for at, each in enumerate(prompts)]
    return [prompt for *_, prompt in sorted(placed, key=lambda each: each[:2])]


def code_prompts(documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Cut prompts that begin at a statement outside functions and end in a function's first lines.

    A prompt has as much context as fits, and does not end with a line end: a line end without the
    next line's indentation is a token that the target knows from the ends of files. One of each
    document comes first, then the second of each.
    """
    turns: list[list[Prompt]] = [[] for _ in range(PROMPTS_IN_DOCUMENT)]
    for document in documents:
        generator, found = random.Random(document.name), []
        for starts, end in function_cuts(document.text, generator):
            longest = generator.randint(PROMPT_TOKENS[0] * 2, PROMPT_TOKENS[1])
            texts = [document.text[s:end] for s in starts if end - s <= CHARACTERS * longest]
            sizes = [len(ids) for ids in tokenizer(texts)["input_ids"]] if texts else []
            fitting = (
                t for t, n in zip(texts, sizes, strict=True) if PROMPT_TOKENS[0] <= n <= longest
            )
            found += [make_prompt(CODE, text) for text in [next(fitting, None)] if text]
        for turn, prompt in zip(turns, found, strict=False):
            turn.append(prompt)
    return [prompt for turn in turns for prompt in turn]


def function_cuts(source: str, generator: random.Random) -> list[tuple[list[int], int]]:
    r"""Return, of each function in random order, where a prompt may begin and where it ends.

    >>> text = "import os\n\n\ndef f(a):\n    return a\n"
    >>> [(start, text[start[-1] : end]) for start, end in function_cuts(text, random.Random(0))]
    [([0, 12], 'def f(a):')]
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    lines = source.split("\n")
    if len(lines) - source.endswith("\n") != len(source.splitlines()) or not source.isascii():
        return []  # lines or columns that `ast` counts in another way
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line) + 1)
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef)]
    outer = [statement for node in inside for statement in node.body]
    begins = sorted({_first_line(node) for node in outer})
    cuts = []
    for node in outer:
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno > node.lineno:
            ends = [node.body[0].lineno - 1]
            ends += [each.end_lineno or 0 for each in node.body[: min(3, len(node.body) - 1)]]
            starts = [offsets[line - 1] for line in begins if line <= node.lineno]
            cuts.append((starts, len(source[: offsets[generator.choice(ends)]].rstrip())))
    generator.shuffle(cuts)
    return cuts


def _first_line(node: ast.stmt) -> int:
    decorated = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    decorators = node.decorator_list if isinstance(node, decorated) else []
    return min([node.lineno, *(each.lineno for each in decorators)])


def main() -> None:
    """Ship what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    state = Path("~/.local/state/nde-talf/small").expanduser()
    parser.add_argument("--state", type=Path, default=state)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    options = parser.parse_args()
    models = {TARGET: options.target, DRAFT: options.draft}
    if given := {role: path for role, path in models.items() if path}:
        ship(options.out, options.state, given)
    if options.head:
        add_head(options.out, options.head)
    if options.run:
        add(options.out, options.run)
    write_checksums(options.out)
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    print(f"{options.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
