"""The pair on disk: which models, which held-out prompts, which rows of text; what every later stage starts from."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from safetensors.torch import load_file, save_file
from torch import Tensor

from data.files import read_json, write_atomically, write_json
from data.prompts import Prompt
from data.rows import TokenRows
from decoding.errors import UserError
from decoding.model import CausalModel, check_pair

Rows = TypeVar("Rows", Tensor, TokenRows)


@dataclass(frozen=True)
class HeldOutPrompt:
    """A prompt as text and token ids. split: "trace" or "test"; nothing of the test split is ever traced."""

    id: str
    kind: str
    split: str
    text: str
    tokens: list[int]


class Pair:
    """`<folder>/pair.json` (where the models are), `prompts.jsonl`, `rows.safetensors` (packed text)."""

    def __init__(self, folder: Path):
        self.folder = folder

    def write(
        self,
        target: str,
        draft: str,
        prompts: list[Prompt],
        tokens: list[list[int]],
        test: int,
        train: Tensor,
        held_out: Tensor,
    ) -> None:
        """test: how many prompts go to the test split. train, held_out: rows of token ids [rows, length]."""
        splits = test_splits([p.kind for p in prompts], test)
        lines = [
            {"id": p.id, "kind": p.kind, "split": split, "text": p.text, "tokens": ids}
            for p, split, ids in zip(prompts, splits, tokens, strict=True)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_atomically(self.folder / "prompts.jsonl", lambda path: path.write_text(text))
        rows = {"train": train.int(), "held_out": held_out.int()}
        write_atomically(self.folder / "rows.safetensors", lambda path: save_file(rows, path))
        write_json(self.folder / "pair.json", {"target": target, "draft": draft})

    def models(self, device: str, dtype: str) -> tuple[CausalModel, CausalModel]:
        """Target and draft, checked to share a vocabulary."""
        target, draft = (CausalModel.load(self.where(role), device, dtype, f"model.{role}") for role in ("target", "draft"))
        check_pair(target, draft)
        return target, draft

    def target(self, device: str, dtype: str) -> CausalModel:
        return CausalModel.load(self.where("target"), device, dtype, "model.target")

    def where(self, role: str) -> str:
        """Folder or hub name of the "target" or "draft"."""
        where = read_json(self.folder / "pair.json")[role]
        inside = self.folder / where
        return str(inside) if inside.is_dir() else where

    def prompts(self, split: str, count: int, key: str) -> list[HeldOutPrompt]:
        """The first `count` prompts of a split. Raises UserError naming the config `key` if there are fewer."""
        found = [p for p in self.every_prompt() if p.split == split]
        if len(found) < count:
            raise UserError(
                f"{key} asks for {count} prompts, but the {split} split holds {len(found)}: lower it, or raise "
                "data.prompt_count and run stage=pair force=true."
            )
        return found[:count]

    def every_prompt(self) -> list[HeldOutPrompt]:
        """The prompts of both splits."""
        lines = (self.folder / "prompts.jsonl").read_text().splitlines()
        return [HeldOutPrompt(**json.loads(line)) for line in lines]

    def rows(self, name: str) -> Tensor:
        """Packed text, [rows, length] token ids; name is "train" or "held_out"."""
        return load_file(self.folder / "rows.safetensors")[name].long()


def test_splits(kinds: list[str], test: int) -> list[str]:
    """ "test" for `test` of the prompts, the same share of every kind (to one prompt), spread evenly; "trace" for the rest."""
    seen: dict[str, int] = {}
    splits = []
    for kind in kinds:
        at = seen[kind] = seen.get(kind, -1) + 1
        due = -(-(at + 1) * test // len(kinds)) > -(-at * test // len(kinds))
        splits.append("test" if due and splits.count("test") < test else "trace")
    return splits


def check_prompts(prompts: list[HeldOutPrompt], target: CausalModel, new_tokens: int, context: int) -> None:
    """Raise UserError for a prompt that leaves no room for `new_tokens` in a context of `context` tokens, or that has
    tokens outside the vocabulary."""
    for prompt in prompts:
        if len(prompt.tokens) + new_tokens > context:
            raise UserError(
                f"prompt {prompt.id} has {len(prompt.tokens)} tokens; with {new_tokens} new ones it does not fit the "
                f"context of {context}. Shorten the prompts (data.prompt_tokens) or lower new_tokens."
            )
        if max(prompt.tokens) >= target.vocab_size:
            raise UserError(f"prompt {prompt.id} was encoded with another tokenizer than the target's.")


def spread(rows: Rows, count: int) -> Rows:
    """At most `count` of `rows`, evenly over all of them: neighbours come from the same few documents."""
    return rows[:: max(1, len(rows) // count)][:count]
