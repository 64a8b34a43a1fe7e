"""Changes of artefacts, and the readers that have to notice them.

A change names a file and one of: `set`, values of a JSON file by dotted key; `fill`, a number for
all of the tensor `tensor`; `line`, fields of its first line; `text`, its content; `how`, one of
`SHAPES` or of the damages below.
Checksums are made anew, so that the reader itself has to find it.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from nde_talf import (
    CausalModel,
    LatencyTable,
    LMDrafter,
    NeuralPolicy,
    Rng,
    SamplingSetting,
    Selector,
    SpeculativeDecoder,
)
from nde_talf.data.text.pair import Pair
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.checksums import CHECKSUMS, file_digest, write_checksums
from nde_talf.decoding.common.files import SEAL, content_digest
from nde_talf.decoding.policies.delayed import delayed
from nde_talf.draft_training.export.head_format import load_head
from nde_talf.pipelines.runs.manifest import read_manifest

SHAPES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "bom": lambda content: b"\xef\xbb\xbf" + content,
    "utf-16": lambda content: content.decode(errors="replace").encode("utf-16"),
    "utf-32": lambda content: content.decode(errors="replace").encode("utf-32"),
    "nul": lambda content: content[:9] + b"\0" + content[9:],
    "long line": lambda content: b'{"a": "' + b"x" * 5_000_000 + b'"}\n',
    "deep": lambda content: b"[" * 100_000,
    "long number": lambda content: b'{"format": ' + b"9" * 5000 + b"}",
}
"""Contents of a file, made of its own."""


def load_pair(path: Path) -> Any:
    pair = Pair(path)
    pair.check_models()
    return pair.every_prompt(), pair.rows("train"), pair.rows("held_out")


def load_selector(path: Path) -> Any:
    selector = Selector.from_pretrained(path)
    NeuralPolicy(selector)
    return selector.state_dict(), selector.schema, selector.table


def load_draft_head(path: Path) -> Any:
    return load_head(path, CausalModel.load(path.parents[1] / "pair/target")).state_dict()


def load_settings(path: Path) -> Any:
    manifest = read_manifest(path.parent)
    return manifest["settings"], manifest["inputs"], manifest["artefacts"]


def decode(path: Path) -> Any:
    """A few tokens of the pair in `path`."""
    target, draft = Pair(path).models("cpu", "float32")
    decoder = SpeculativeDecoder(target, LMDrafter(draft), delayed(), "traversal")
    return decoder.generate([1, 2, 3], 8, SamplingSetting(0.6), Rng.seeded(0)).tokens


LOADERS: dict[str, Callable[[Path], Any]] = {
    "selector": load_selector,
    "head": load_draft_head,
    "latency": LatencyTable.load,
    "pair": load_pair,
    "decode": decode,
    "model": lambda path: CausalModel.load(path).module.state_dict(),
    "traces": lambda path: [TraceStore(path).read(split) for split in ("train", "validation")],
    "manifest": load_settings,
}


REPLACED: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: None,
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "endless": lambda file: file.symlink_to("/dev/zero"),
}
"""What there is in the place of a file."""


def apply(damage: dict[str, Any], file: Path) -> object:
    """Damage `file`."""
    how = damage.get("how")
    if how in REPLACED:
        file.unlink(missing_ok=True)
        return REPLACED[how](file)
    content = bytearray(file.read_bytes() if file.exists() else b"")
    if how == "cut":
        return file.write_bytes(content[: int(damage["at"] * len(content))])
    if how == "flip":
        content[int(damage["at"] * len(content))] ^= 4
        return file.write_bytes(content)
    if how in SHAPES:
        file.write_bytes(SHAPES[how](bytes(content)))
    elif "text" in damage:
        file.write_text(damage["text"])
    elif "line" in damage:
        first, *others = content.decode().splitlines()
        file.write_text("\n".join([json.dumps(json.loads(first) | damage["line"]), *others]) + "\n")
    elif "set" in damage or how == "format":
        set_fields(file, json.loads(content), damage.get("set", {"format": 2}))
    else:
        set_tensor(file, damage)
    return seal(file)


def set_fields(file: Path, fields: dict[str, Any], values: dict[str, Any]) -> None:
    """Set fields of a JSON object, of which a dotted key names inner ones, and seal it anew."""
    for key, value in values.items():
        *outer, last = key.split(".")
        inner = fields
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = value
    if fields.pop(SEAL, None):
        fields[SEAL] = content_digest(fields)
    file.write_text(json.dumps(fields))


def set_tensor(file: Path, damage: dict[str, Any]) -> None:
    """Fill a tensor, by default the first, or give it one row more."""
    tensors = load_file(file)
    name = damage.get("tensor", min(tensors))
    if damage.get("how") == "one row more":
        other = torch.cat([tensors[name], tensors[name][:1]])
    else:
        dtype, fill = tensors[name].dtype, float(damage.get("fill", "nan"))
        fill = fill if dtype.is_floating_point else torch.iinfo(dtype).min
        other = torch.full_like(tensors[name], fill)
    save_file(tensors | {name: other}, file, metadata={"format": "pt"})


def seal(file: Path) -> None:
    """Write checksums of a changed file anew: its folder's, or the pair's."""
    if (file.parent / CHECKSUMS).exists() and file.name != CHECKSUMS:
        (file.parent / CHECKSUMS).unlink()
        write_checksums(file.parent)
    index = file.parent / "pair.json"
    if index.exists() and file.name != index.name:
        content = json.loads(index.read_text())
        content["files"][file.name] = file_digest(file)
        content.pop(SEAL)
        index.write_text(json.dumps({**content, SEAL: content_digest(content)}))
