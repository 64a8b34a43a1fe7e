"""The text of the shipped model: a tokenizer, packed rows and held-out prompts, made once from the frozen list of sources."""

import ast
import json
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nde_talf.data.text.corpus import by_hash
from nde_talf.data.text.prompts import Prompt, make_prompt, prompts_from_documents
from nde_talf.data.text.sources import CODE, DOMAINS, Document
from nde_talf.data.text.tokenizer import pack, train_tokenizer
from nde_talf.decoding.common.files import write_atomically

VOCABULARY = 4096
LENGTH = 512
"""Tokens of a row."""
TOKENIZER_FRACTION = 0.25
"""Fraction of the training documents that the tokenizer is trained on."""
PROMPTS = {"code": 240, "manual": 100, "arithmetic": 80, "tables": 80}
"""Held-out prompts by domain."""
PROMPT_TOKENS = 32, 128
PROMPTS_IN_DOCUMENT = 6
HELD_OUT_ROWS = 96
"""Rows of each domain that the held-out loss is computed on, at most."""
TOKENIZER, ROWS, PROMPT_FILE = "tokenizer", "rows.safetensors", "prompts.jsonl"


@dataclass(frozen=True)
class Text:
    """What a model of the recipe is trained and judged on.

    Attributes:
        train: rows of token ids, [rows, LENGTH], int16.
        held_out: the same by domain.
        bytes_a_token: by domain, of the held-out rows.
    """

    tokenizer: PreTrainedTokenizerBase
    train: Tensor
    held_out: dict[str, Tensor]
    bytes_a_token: dict[str, float]

    def bits_a_byte(self, nats: dict[str, float]) -> dict[str, float]:
        """Convert losses by domain from nats a token."""
        return {d: each / self.bytes_a_token[d] / math.log(2) for d, each in nats.items()}


def prepared(folder: Path, texts: Iterable[Document]) -> Text:
    """Read the text in `folder`, which is made of the documents if it isn't there."""
    if not folder.exists():
        everything = sorted(texts, key=lambda document: by_hash(f"order/{document.name}"))
        write_atomically(folder, lambda temporary: _prepare(temporary, everything))
    tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER)
    rows = load_file(folder / ROWS)
    train = rows.pop("train")
    sizes = {d: _bytes(tokenizer, each) / each.numel() for d, each in rows.items()}
    return Text(tokenizer, train, rows, sizes)


def _bytes(tokenizer: PreTrainedTokenizerBase, rows: Tensor) -> int:
    texts = tokenizer.batch_decode(rows.tolist(), skip_special_tokens=True)
    return sum(len(text.encode()) for text in texts)


def _prepare(folder: Path, documents: list[Document]) -> None:
    folder.mkdir()
    train = [document for document in documents if not document.held_out]
    chosen = [d.text for d in train if by_hash(f"tokenizer/{d.name}") < TOKENIZER_FRACTION]
    tokenizer = train_tokenizer(chosen, VOCABULARY)
    tokenizer.save_pretrained(folder / TOKENIZER)
    rows = {"train": _packed(tokenizer, [document.text for document in train])}
    held_out = {d: [x for x in documents if x.held_out and x.domain == d] for d in DOMAINS}
    for domain, those in held_out.items():
        packed = pack(tokenizer, [document.text for document in those], LENGTH).to(torch.int16)
        step = max(1, len(packed) // HELD_OUT_ROWS)
        rows[domain] = packed[::step][:HELD_OUT_ROWS].contiguous()
    save_file(rows, folder / ROWS)
    prompts = held_out_prompts(held_out, tokenizer)
    lines = [json.dumps({"id": p.id, "kind": p.kind, "text": p.text}) for p in prompts]
    (folder / PROMPT_FILE).write_text("\n".join(lines) + "\n")


def _packed(tokenizer: PreTrainedTokenizerBase, texts: list[str], chunk: int = 256) -> Tensor:
    """Lay documents end to end as `pack` does, in the memory of int16."""
    parts = []
    for start in range(0, len(texts), chunk):
        encoded = tokenizer(
            texts[start : start + chunk], add_special_tokens=False, return_attention_mask=False,
            verbose=False,
        )["input_ids"]  # fmt: skip
        parts += [np.array([tokenizer.eos_token_id, *ids], np.int16) for ids in encoded]
    stream = np.concatenate(parts)
    rows = len(stream) // LENGTH
    return torch.from_numpy(stream[: rows * LENGTH].reshape(rows, LENGTH))


def held_out_prompts(
    documents: dict[str, list[Document]], tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Cut the prompts that ship with the model, the domains in turn."""
    chosen = {}
    for domain, count in PROMPTS.items():
        if domain == CODE:
            chosen[domain] = code_prompts(documents[CODE], tokenizer)[:count]
        else:
            table = datasets.Dataset.from_list(
                [{"name": d.name, "text": d.text, "kind": d.domain} for d in documents[domain]]
            )
            chosen[domain] = prompts_from_documents(
                table, count, 0, tokenizer, PROMPT_TOKENS, PROMPTS_IN_DOCUMENT
            )
    placed = [
        ((at + 0.5) / len(p), d, each) for d, p in chosen.items() for at, each in enumerate(p)
    ]
    return [prompt for *_, prompt in sorted(placed, key=lambda each: each[:2])]


def code_prompts(documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Cut prompts that end after a function's first lines and begin at a statement before it.

    A prompt has as much context as fits. One of each document comes first, then the second of each.
    """
    turns: list[list[Prompt]] = [[] for _ in range(PROMPTS_IN_DOCUMENT)]
    for document in documents:
        generator = random.Random(document.name)
        taken = 0
        for start, end in _function_cuts(document.text, generator):
            longest = generator.randint(PROMPT_TOKENS[0] * 2, PROMPT_TOKENS[1])
            text = next(
                (
                    document.text[s:end]
                    for s in start
                    if len(tokenizer(document.text[s:end], verbose=False)["input_ids"]) <= longest
                ),
                "",
            )
            if len(tokenizer(text)["input_ids"]) >= PROMPT_TOKENS[0]:
                turns[taken].append(make_prompt(CODE, text))
                taken += 1
            if taken == PROMPTS_IN_DOCUMENT:
                break
    return [prompt for turn in turns for prompt in turn]


def _function_cuts(source: str, generator: random.Random) -> list[tuple[list[int], int]]:
    """Return, of each function in random order, where a prompt may begin and where it ends."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    lines = source.split("\n")
    if len(lines) - source.endswith("\n") != len(source.splitlines()) or not source.isascii():
        return []
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    begins = sorted(
        {min([n.lineno, *(d.lineno for d in getattr(n, "decorator_list", []))]) for n in nodes}
    )
    cuts = []
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno > node.lineno:
            ends = [node.body[0].lineno - 1]
            ends += [each.end_lineno or 0 for each in node.body[: min(3, len(node.body) - 1)]]
            before = [starts[line - 1] for line in begins if line <= node.lineno]
            cuts.append((before[-60:], starts[generator.choice(ends)]))
    generator.shuffle(cuts)
    return cuts
