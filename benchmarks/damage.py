"""Damages an export in every way that can be listed, loads it in a process of its own, and says
what came of it.

Each file of an artefact is taken away, emptied, cut at random points, replaced by the same file of
another run, given another format number, and changed in well-formed ways: a JSON value becomes one
of another type, or an absurd number; a tensor gets another shape, another kind of number, NaN, or
is missing. Checksums are written anew afterwards, so that the reader itself has to find what is
wrong. `flips` changes single bits instead, and leaves the checksums.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.forked import TOLD, Outcome, forked
from nde_talf.data.text.pair import Pair
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.checkpoint import resumable
from nde_talf.decoding.common.checksums import CHECKSUMS, write_checksums
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import SEAL, checksum, content_digest
from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.export import NOTE, load_head
from nde_talf.evaluation.benchmark import read_records
from nde_talf.pipelines.manifest import MANIFEST, faults, read_manifest
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.network import Selector

ABSURD = (None, "text", [], {}, -1, 10**12, 10**30, True, float("nan"))
"""What a JSON value becomes."""


@dataclass
class Artefact:
    """name; path: in a run; load: gives a value that two loads of the same artefact have in common;
    files: suffixes of those that are damaged.
    """

    name: str
    path: str
    load: Callable[[Path], Any]
    files: tuple[str, ...] = (".json", ".jsonl", ".safetensors", ".parquet")


def _pair(folder: Path) -> Any:
    pair = Pair(folder)
    where = [pair.where(role)[-6:] for role in ("target", "draft")]
    return where, pair.every_prompt(), pair.rows("train"), pair.rows("held_out")


def _model(folder: Path) -> Any:
    return CausalModel.load(folder).module.state_dict()


def _published(folder: Path) -> Any:
    return load_head(folder, CausalModel.load(folder.parents[1] / "pair/target")).state_dict()


def _checkpoint(path: Path) -> Any:
    if (found := resumable(path.parent)) is None:
        raise UserError(f"{path}: there is nothing to resume from, so the training starts anew")
    return torch.load(found, weights_only=True)["state_dict"]


def _manifest(path: Path) -> Any:
    found = read_manifest(path.parent)
    return found["settings"], found["inputs"], found["artefacts"]


def artefacts() -> list[Artefact]:
    """The artefacts of a run that its readers know."""
    return [
        Artefact(
            "selector",
            "selector/export/traversal",
            lambda path: _selector(Selector.from_pretrained(path)),
        ),
        Artefact("draft head", "draft/export", _published),
        Artefact("published head", "draft/published", _published),
        Artefact("latency table", "latency/table.json", LatencyTable.load),
        Artefact("pair", "pair", _pair, ("pair.json", "prompts.jsonl", "rows.safetensors")),
        Artefact("model", "pair/draft", _model, ("config.json", ".safetensors")),
        Artefact(
            "traces",
            "traces",
            lambda path: [TraceStore(path).read(split) for split in ("train", "validation")],
        ),
        Artefact("manifest", "traces/manifest.json", _manifest),
        Artefact("records", "report/records.jsonl", lambda path: list(read_records(path))),
        Artefact("checkpoint", "draft/training/last.ckpt", _checkpoint, (".ckpt",)),
    ]


def _selector(selector: Selector) -> Any:
    return selector.schema, selector.state_dict(), selector.table


def prepare(run: Path) -> None:
    """Add to a run a head as others publish them: without the project's note and checksums."""
    folder = run / "draft/published"
    shutil.copytree(run / "draft/export", folder)
    (folder / CHECKSUMS).unlink()
    config = json.loads((folder / "config.json").read_text())
    config.pop(NOTE)
    (folder / "config.json").write_text(json.dumps(config))


def digest(value: Any) -> str:
    """A hash of nested values, tensors and arrays included."""
    if isinstance(value, dict):
        value = sorted((str(key), digest(part)) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        value = [digest(part) for part in value]
    elif isinstance(value, torch.Tensor):
        own = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        value = [str(value.dtype), list(value.shape), hashlib.sha256(own).hexdigest()]
    elif hasattr(value, "tolist"):
        value = (
            hashlib.sha256(value.tobytes()).hexdigest() if value.dtype != object else value.tolist()
        )
    return content_digest(repr(value))


def damages(
    run: Path, other: Path, artefact: Artefact, rng: random.Random
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """What is done to an artefact of `run`: in words, and as a function of a copy's path. other:
    another finished run.
    """
    source = run / artefact.path
    for file in [source] if source.is_file() else sorted(source.rglob("*")):
        if not file.is_file() or not file.name.endswith(artefact.files):
            continue
        name = file.relative_to(source) if source.is_dir() else Path()
        said = file.name
        yield f"{said} is missing", lambda path, name=name: (path / name).unlink()
        yield f"{said} is empty", lambda path, name=name: (path / name).write_bytes(b"")
        size = file.stat().st_size
        for at in sorted(rng.sample(range(1, size), min(2, size - 1))):
            yield (
                f"{said} is cut at {at} of {size} bytes",
                lambda path, name=name, at=at: _cut(path / name, at),
            )
        foreign = other / artefact.path / name
        if (
            foreign.is_file()
            and file.suffix != ".ckpt"
            and foreign.read_bytes() != file.read_bytes()
        ):
            yield (
                f"{said} is another run's",
                lambda path, name=name, foreign=foreign: _copy(foreign, path / name),
            )
        if file.suffix == ".json":
            for key, value in _changes(json.loads(file.read_text()), rng):
                shown = repr(value) if len(repr(value)) < 20 else f"{repr(value)[:17]}..."
                yield (
                    f"{said}: {key} = {shown}",
                    lambda path, name=name, key=key, value=value: _set(path, name, key, value),
                )
        if file.suffix == ".safetensors":
            for what, change in _tensor_changes(rng.choice(sorted(load_file(file)))):
                yield (
                    f"{said}: {what}",
                    lambda path, name=name, change=change: _save(path, name, change),
                )


def _changes(content: dict, rng: random.Random) -> Iterator[tuple[str, Any]]:
    """Keys of a JSON object, some inside others, and what they become."""
    keys = [key for key in content if key not in (SEAL, "settings", "metrics", "machine", "sha256")]
    for key in keys:
        value = rng.choice([other for other in ABSURD if type(other) is not type(content[key])])
        yield key, value
        if isinstance(content[key], dict) and content[key]:
            yield f"{key}.{rng.choice(sorted(content[key]))}", rng.choice(ABSURD[:4])
    if "format" in content:
        yield "format", content["format"] + 1


def _set(path: Path, name: Path, key: str, value: Any) -> None:
    file = path / name
    content = json.loads(file.read_text())
    *outer, last = key.split(".", 1)
    inside = content[outer[0]] if outer else content
    inside[last] = value
    if SEAL in content:
        content.pop(SEAL)
        content[SEAL] = content_digest(content)
    file.write_text(json.dumps(content))
    _seal(path, name)


def _tensor_changes(name: str) -> list[tuple[str, Callable[[dict], None]]]:
    """What is done to the tensor `name` of a file: in words, and as a function of its tensors."""

    def put(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict], None]:
        return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})

    return [
        (f"{name} has one row more", put(lambda x: torch.cat([x, x[:1]]))),
        (f"{name} is flat", put(lambda x: x.flatten()[:-1])),
        (
            f"{name} holds other numbers",
            put(lambda x: x.to(torch.int32) if x.is_floating_point() else x.double()),
        ),
        (f"{name} holds NaN", put(lambda x: x.float() * torch.nan)),
        (f"{name} is missing", lambda tensors: tensors.pop(name)),
        (
            f"{name} has another name",
            lambda tensors: tensors.update({f"{name}.other": tensors.pop(name)}),
        ),
    ]


def _save(path: Path, name: Path, change: Callable[[dict], None]) -> None:
    tensors = load_file(path / name)
    change(tensors)
    save_file(tensors, path / name, metadata={"format": "pt"})
    _seal(path, name)


def _seal(path: Path, name: Path) -> None:
    """Write the checksums of a copy anew: its own, and the pair's of its files."""
    if path.is_dir() and (path / CHECKSUMS).exists() and name.name != CHECKSUMS:
        (path / CHECKSUMS).unlink()
        write_checksums(path)
    index = path / "pair.json"
    if name.name in ("rows.safetensors", "prompts.jsonl") and index.exists():
        content = json.loads(index.read_text())
        content["files"][name.name] = checksum(path / name)
        content.pop(SEAL)
        index.write_text(json.dumps({**content, SEAL: content_digest(content)}))


def _cut(file: Path, at: int) -> None:
    file.write_bytes(file.read_bytes()[:at])


def _copy(source: Path, file: Path) -> None:
    file.write_bytes(source.read_bytes())


def flip(file: Path, at: int, bit: int) -> None:
    """Change one bit."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)


def loaded(
    run: Path, artefact: Artefact, change: Callable[[Path], None], scratch: Path, right: str
) -> Outcome:
    """What loading a changed copy of an artefact comes to. right: the digest of an unchanged one."""
    copy = scratch / "run"
    shutil.rmtree(copy, ignore_errors=True)
    stage = Path(artefact.path).parts[0]
    beside = (
        {"pair": shutil.ignore_patterns("training")} if stage == "draft" else {}
    )  # a head is loaded beside its target
    for part, passed_over in {**beside, stage: shutil.ignore_patterns("curves", "wandb")}.items():
        shutil.copytree(run / part, copy / part, ignore=passed_over)
    change(copy / artefact.path)
    found = forked(
        lambda: digest(artefact.load(copy / artefact.path)),
        scratch / "out",
        seconds=120,
        headroom=4 << 30,
    )
    if found.value is None:
        return found
    if found.value == right:
        return Outcome("harmless, equal result", found.text)
    broken = (
        faults(copy / stage, read_manifest(copy / stage))
        if (copy / stage / MANIFEST).exists()
        else {}
    )
    if broken or "damaged" in found.text or "changed by hand" in found.text:
        return Outcome(TOLD, f"{found.text} by the next stage: {broken}" if broken else found.text)
    return Outcome("silent wrong result", found.text)
