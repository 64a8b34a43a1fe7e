"""The pair on disk, from which every later stage starts: models, held-out prompts, rows of text."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import TypedDict

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.data.text.prompts import Prompt, related
from nde_talf.data.text.shipped import AGAIN, PORTABLE, SHIPPED, portable, shipped
from nde_talf.data.text.templates import text_ends
from nde_talf.decoding.common.checksums import check_checksums, file_digest
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json, reading, write_atomically, write_sealed
from nde_talf.decoding.common.formats import Format
from nde_talf.decoding.common.json_validation import typed
from nde_talf.decoding.common.model_record import changed, recorded
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.common.tensors import read_tensors
from nde_talf.decoding.models.base import Model
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.gguf import model_folder
from nde_talf.decoding.models.precision import type_of_draft

Rows = TypeVar("Rows", Tensor, TokenRows)
PROMPTS, ROWS = "prompts.jsonl", "rows.safetensors"
ROLES = ("target", "draft")
DOMAINS = "domains.json"
"""The file with the number of held-out rows by domain, in the order of the rows."""

Files = TypedDict("Files", {"prompts.jsonl": str, "rows.safetensors": str})
"""Checksums of the files beside `pair.json`."""


class Index(TypedDict):
    """Content of `pair.json`, see `Pair.write`."""

    target: str
    draft: str | None
    files: Files
    models: dict[Literal["target", "draft"], dict[str, dict[str, Any]]]


FORMAT = Format("pair", "make the pair again with stage=pair force=true", Index)


class Pair:
    """The pair of a run: its models, its prompts and its text.

    In the folder are `pair.json` (where the models are, and the checksums of the other files),
    `prompts.jsonl` and `rows.safetensors` (packed text). What is read is checked; a file that was
    changed since is a UserError.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def write(
        self,
        target: str,
        draft: str | None,
        prompts: list[Prompt],
        test: int,
        train: Tensor,
        held_out: Tensor,
    ) -> None:
        """Write everything but the models that the run trained itself.

        Args:
            target: "target", a folder in this one, or a folder or hub name of your own model,
                whose files are recorded so that `check_models` notices a change.
            draft: likewise; None where there is no draft model.
            prompts: with their token ids.
            test: how many prompts go to the test split.
            train: rows of token ids [rows, length].
            held_out: likewise.
        """
        kept = ("id", "kind", "text", "tokens", "question")
        lines = [
            {name: getattr(prompt, name) for name in kept} | {"split": split}
            for prompt, split in zip(prompts, assign_splits(prompts, test), strict=True)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_atomically(self.folder / PROMPTS, lambda path: path.write_text(text))
        write_atomically(
            self.folder / ROWS,
            lambda path: save_file({"train": narrow(train), "held_out": narrow(held_out)}, path),
        )
        where = {"target": target, "draft": draft}
        records = {
            role: recorded(model_folder(place))
            for role, place in where.items()
            if place not in (None, role)
        }
        files = {name: file_digest(self.folder / name) for name in (PROMPTS, ROWS)}
        places = {role: place and portable(place) for role, place in where.items()}
        content = {"format": FORMAT.number, **places, "files": files, "models": records}
        write_sealed(self._index, content)

    def models(self, *placed: Any) -> tuple[CausalModel, CausalModel]:
        """Load target and draft, checked to be the models that the pair was made from.

        placed: device, dtype and perhaps more, see `load_models`.
        """
        self.check_models()
        target, draft = load_models(map(self.where, ROLES), *placed)
        return target, draft

    def target(self, *placed: Any) -> CausalModel:
        """Load the target alone, checked like both."""
        self.check_models()
        return load_models([self.where("target")], *placed)[0]

    @property
    def has_draft(self) -> bool:
        """Tell whether there is a draft model."""
        return self._content()["draft"] is not None

    def check_models(self) -> None:
        """Check that your own models are those that the pair was made from.

        The run's own models carry checksums, which are checked when they are loaded.

        Raises:
            UserError: a model has changed.
        """
        for role, record in self._content()["models"].items():
            if fault := changed(model_folder(self.where(role)), record):
                raise UserError(
                    f"model.{role}={self.where(role)}: {fault} since this run's pair was made from"
                    f" it ({self._index}). Put the model back as it was, or {FORMAT.again}."
                )

    def where(self, role: str) -> str:
        """Return the folder or hub name of the "target" or "draft".

        Raises UserError for a draft where there is none.
        """
        content = self._content()
        where = content[role]
        if where is None:
            raise UserError(
                f"{self._index}: this pair has no draft model. Decode with its draft head, or give"
                " model.draft and make the pair again with stage=pair force=true."
            )
        if where != role and role not in content["models"]:
            raise UserError(
                f"{self._index}: its {role} {where!r} is neither its own nor recorded there:"
                f" {FORMAT.again}."
            )
        if where.startswith(PORTABLE):
            return str(SHIPPED / where.removeprefix(PORTABLE))
        return str(self.folder / where) if where == role else where

    def prompts(self, split: str, count: int, key: str) -> list[Prompt]:
        """Return the first `count` prompts of a split.

        Raises UserError naming the config `key` if there are fewer.
        """
        prompts = self.of_split(split)
        if len(prompts) < count:
            raise UserError(
                f"{key} asks for {count} prompts, but the {split} split holds {len(prompts)}: lower"
                " it, or raise data.prompt_count and run stage=pair force=true."
            )
        return prompts[:count]

    def of_split(self, split: str) -> list[Prompt]:
        """Read the prompts of a split: "trace" or "test"."""
        return [prompt for prompt in self.every_prompt() if prompt.split == split]

    def every_prompt(self) -> list[Prompt]:
        """Read the prompts of both splits."""
        self._check(PROMPTS)
        path = self.folder / PROMPTS
        with reading(path, FORMAT.again):
            lines = path.read_bytes().splitlines()
            prompts: list[Prompt] = [typed(json.loads(line), Prompt) for line in lines]
            if not all(p.tokens and min(p.tokens) >= 0 for p in prompts):
                raise ValueError("a prompt has no tokens, or negative ones")
            if not {p.split for p in prompts} <= {"trace", "test"}:
                raise ValueError("a split is not trace or test")
        return prompts

    def rows(self, name: str) -> Tensor:
        """Read packed text, [rows, length] token ids; name is "train" or "held_out"."""
        self._check(ROWS)
        rows = read_tensors(self.folder / ROWS, FORMAT.again)[name].long()
        if rows.numel() and rows.min() < 0:
            raise UserError(f"{self.folder / ROWS}: {name} holds negative tokens: {FORMAT.again}.")
        return rows

    @property
    def _index(self) -> Path:
        return self.folder / "pair.json"

    def _content(self) -> dict[str, Any]:
        return FORMAT.load(self._index)

    def _check(self, name: str) -> None:
        expected = self._content()["files"][name]
        with reading(self.folder / name, FORMAT.again):
            digest = file_digest(self.folder / name)
        if digest != expected:
            raise UserError(
                f"{self.folder / name}: it is not as it was written: its checksum is another. Take"
                f" a good copy, or {FORMAT.again}."
            )


class LoneTarget(Pair):
    """A target by folder or hub name, which no run recorded."""

    has_draft = False

    def __init__(self, target: str):
        self._target = target

    def where(self, role: str) -> str:
        """Return the folder or hub name."""
        return self._target

    def check_models(self) -> None:
        """Do nothing."""

    def every_prompt(self) -> list[Prompt]:
        """Raise UserError: without a run no prompts were held out."""
        raise UserError(
            f"{self._target}: no prompts were held out for it, as no run did so. nde generate takes"
            " prompt=TEXT; nde check takes a finished run."
        )


def load_models(
    where: Iterable[str],
    device: str,
    dtype: str,
    device_map: str | None = None,
    forward: str = "auto",
    products: str = "auto",
    draft_dtype: str | None = None,
) -> list[CausalModel]:
    """Load the models in one or two folders, or of these hub names: target, and perhaps draft.

    Every stage loads its models here, so that a draft whose output layer has another number of rows
    is fitted to the target's once, and the target's texts end where its tokenizer ends them too.
    Prints which forward passes they have. Raises UserError as `CausalModel.load` does.

    Args:
        where: of the target, and perhaps of the draft.
        device: of both, and of all that they return.
        dtype: of both, or of the target.
        device_map: of the target, see `CausalModel.load`.
        forward: see `CausalModel`.
        products: see `CausalModel`.
        draft_dtype: of the draft, see `type_of_draft`; None: the target's.
    """
    models: list[CausalModel] = []
    places = [*where]
    for role, name in zip(ROLES, places, strict=False):
        key, across = f"model.{role}", None if models else device_map
        device = str(models[0].device) if models and device_map else device
        kind = type_of_draft(draft_dtype or dtype, dtype, device) if models else dtype
        models.append(CausalModel.load(name, device, kind, key, forward, across, products))
    for model in models:
        model.match(models[0].vocab_size)
        console.print(f"{model.name}: forward {model.forward}", style="dim")
    if models:
        set_ends(models[0], places[0])
    return models


def set_ends(target: CausalModel, where: str) -> None:
    """Let texts end where a target in the folder or hub name `where` and its template end them."""
    eos = target.module.generation_config.eos_token_id
    target.chat_ends = text_ends(where, eos, target.vocab_size)


def check_tokenizers(target: dict[str, int], draft: dict[str, int], name: str) -> None:
    """Check that every id in both vocabularies means the same token.

    They are token -> id, special tokens included. Either may have more: Gemma-3 27B has a token for
    images at an id that the 270M model has no row for.

    Raises:
        UserError: they do not. The message begins with `name`, the draft's, and names up to three
            ids.
    """
    ours, theirs = ({index: token for token, index in known.items()} for known in (target, draft))
    other = [index for index in sorted(ours.keys() & theirs.keys()) if ours[index] != theirs[index]]
    if other or not ours.keys() & theirs.keys():
        listed = "; ".join(
            f"id {i} is {theirs[i]!r} in the draft and {ours[i]!r} in the target" for i in other[:3]
        )
        what = (
            f"{len(other)} ids stand for other tokens ({listed})" if other else "no id is in both"
        )
        raise UserError(
            f"{name} has another vocabulary than the target: {what}. Speculative"
            " decoding needs one tokenizer for both. Choose a draft of the target's family."
        )


def narrow(rows: Tensor) -> Tensor:
    """Return token ids in two bytes each where they fit, or else in four."""
    largest = int(rows.max()) if len(rows) else 0
    return rows.to(torch.int16 if largest < 1 << 15 else torch.int32).contiguous()


def assign_splits(prompts: list[Prompt], test: int) -> list[str]:
    """Split prompts: `test` of them are "test", the others "trace".

    Prompts that overlap (`related`) are on one side, and every kind has its share, as far as the
    numbers allow.
    """
    groups, tests = dict[int, list[int]](), set[int]()
    for at, group in enumerate(related(prompts)):
        groups.setdefault(group, []).append(at)
    seen, taken = Counter[str](), Counter[str]()
    first = {members[0]: members for members in groups.values()}
    for at, prompt in enumerate(prompts):
        seen[prompt.kind] += 1
        due = taken[prompt.kind] < -(-seen[prompt.kind] * test // len(prompts))
        members = first.get(at, [])
        if members and due and len(tests) + len(members) <= test:
            tests |= {*members}
            taken.update(prompts[each].kind for each in members)
    # Those of small groups first.
    others = [at for own in sorted(groups.values(), key=len) for at in own if at not in tests]
    tests |= {*others[: test - len(tests)]}
    return ["test" if at in tests else "trace" for at in range(len(prompts))]


def check_prompts(prompts: list[Prompt], new_tokens: int, target: Model, *others: Any) -> None:
    """Raise UserError for a prompt that does not fit the contexts or the vocabulary.

    It has to leave room for `new_tokens` in the contexts of the target and of `others`.
    """
    context = min(each.max_context for each in (target, *others))
    for prompt in prompts:
        if len(prompt.tokens) + new_tokens > context:
            raise UserError(
                f"prompt {prompt.id} has {len(prompt.tokens)} tokens; with {new_tokens} new ones it"
                f" does not fit the context of {context}. Shorten the prompts (data.prompt_tokens)"
                " or lower new_tokens."
            )
        if max(prompt.tokens) >= target.vocab_size:
            raise UserError(
                f"prompt {prompt.id} was encoded with another tokenizer than the target's."
            )


def check_rows(rows: Tensor, target: CausalModel) -> None:
    """Raise UserError for text with a token that has no row in the target's embedding."""
    if rows.numel() and (token := int(rows.max())) >= target.vocab_size:
        raise UserError(
            f"data: its text holds token {token} of the tokenizer, and {target.name} has"
            f" {target.vocab_size}. Take such words out of it."
        )


def spread(rows: Rows, count: int) -> Rows:
    """Take at most `count` of `rows`, evenly: neighbours come from the same few documents."""
    return rows[:: max(1, len(rows) // count)][:count]


def shipped_pair(folder: Path = SHIPPED) -> Pair:
    """Open the shipped pair. Raises UserError if a file is missing, or not as it was shipped."""
    shipped("pair.json", folder)
    check_checksums(folder, again=AGAIN)
    return Pair(folder / "pair")


def shipped_prompts(count: int | None = None, folder: Path = SHIPPED) -> list[Prompt]:
    """Read the held-out prompts; the domains are in turn.

    Raises:
        UserError: a file was changed or damaged, or there are fewer than `count`.
    """
    prompts = shipped_pair(folder).every_prompt()
    if count is not None and count > len(prompts):
        raise UserError(f"data.prompt_count={count}: the shipped pair has {len(prompts)} prompts.")
    return prompts[:count]


def shipped_rows(folder: Path = SHIPPED) -> tuple[Tensor, dict[str, Tensor]]:
    """Read rows of token ids, [rows, length]: of the training text, and held-out ones by domain."""
    pair = shipped_pair(folder)
    counts = read_json(folder / DOMAINS, dict[str, int], AGAIN)
    parts = pair.rows("held_out").split([*counts.values()])
    return pair.rows("train"), dict(zip(counts, parts, strict=True))
