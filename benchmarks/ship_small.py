"""Write the shipped pair: `python -m benchmarks.ship_small --target FOLDER --draft FOLDER`.

Target and draft, folders that the recipe made (`recipes/small`), go into `checkpoints/small/` in
bfloat16, with tokenizer, text, held-out prompts and checksums. `--head FOLDER` adds an exported
head, and `--run FOLDER` adds latency table and selectors of a run with model=small.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import datasets
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from benchmarks.timing import parser_of
from nde_talf.data.text.corpus import by_hash
from nde_talf.data.text.pair import DOMAINS, Pair
from nde_talf.data.text.prompts import (
    Prompt,
    encode_prompts,
    prompts_from_documents,
)
from nde_talf.data.text.shipped import DRAFT, SHIPPED, TARGET
from nde_talf.decoding.common.checksums import write_checksums
from nde_talf.decoding.common.files import write_atomically
from nde_talf.pipelines.config.schema import TABLE
from recipes.small.sources import CODE, Document, documents, read_frozen
from recipes.small.text import prepared

COUNTS = {"code": 240, "manual": 100, "arithmetic": 80, "tables": 80}
"""Held-out prompts by domain."""
PROMPT_TOKENS = 32, 128
TEST_PROMPTS = 200
TRAIN_ROWS = 1600
"""Rows of the training text that ship, for the heads that a run trains."""


def ship(out: Path, state: Path, models: dict[str, Path]) -> None:
    """Write the shipped pair to `out`: models by role, text and prompts."""
    text = prepared(state / "text", documents(read_frozen()))
    held_out = (each for each in documents(read_frozen()) if each.held_out)
    texts = sorted(held_out, key=lambda d: by_hash(f"order/{d.name}"))
    for role, where in models.items():
        model = AutoModelForCausalLM.from_pretrained(
            where, dtype=torch.float32, trust_remote_code=False
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
        rows = [{"name": d.name, "text": d.text, "kind": domain} for d in own]
        table = datasets.Dataset.from_list(rows)
        asked = 2 * count if domain == CODE else count  # half of a source's are of its docstrings
        prompts = prompts_from_documents(table, asked, 0, tokenizer, PROMPT_TOKENS)
        prompts = [prompt for prompt in prompts if prompt.kind == domain][:count]
        placed += [((at + 0.5) / len(prompts), domain, each) for at, each in enumerate(prompts)]
    return [prompt for *_, prompt in sorted(placed, key=lambda each: each[:2])]


def main() -> None:
    """Ship what the command line names."""
    parser = parser_of(__doc__)
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
