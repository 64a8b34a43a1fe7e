"""Models of others: record what they are, and notice later if they have changed.

JSON files are compared byte by byte, weights by their sizes and headers. Reading the header of a
safetensors file takes no time however large the file is. It names every tensor with its type, shape
and offset, so that a model of another architecture, a revision with other tensors or a truncated
file is noticed. Other numbers in the same tensors are not.
"""

import json
from pathlib import Path
from typing import Any

from nde_talf.decoding.common.checksums import CHECKSUMS, file_digest
from nde_talf.decoding.common.files import content_digest, read_json

SMALL = 64 << 20
"""Size in bytes up to which a JSON file or a header is read."""
UNREAD = ("generation_config.json", CHECKSUMS)


def place_of(where: str) -> Path | None:
    """Return a model's folder: the given one, or the one in the hub's cache; None if unknown."""
    if Path(where).is_dir():
        return Path(where)
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(where, "config.json")
    except (ImportError, ValueError, OSError):
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def lacks(path: Path) -> str | None:
    """Tell what a folder lacks to be a model, where it holds GGUF or a LoRA adapter."""
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        base = read_json(adapter).get("base_model_name_or_path")
        return (
            f"it holds a LoRA adapter for {base}, which is not applied here. Merge the two with"
            " peft's merge_and_unload() and save them as one model; if the weights in the folder"
            " are already merged, take the adapter's files away"
        )
    files = [*path.glob("*.gguf")]
    if files and not (path / "config.json").exists():
        return f"it holds GGUF. Give one such file, such as {files[0]}"
    return None


def recorded(where: str) -> dict[str, Any]:
    """Record a model, for a later comparison by `changed`."""
    folder = place_of(where)
    if folder is None:
        return {}
    # The JSON files that every load reads: config.json, indices, the tokenizer.
    files = [path for path in sorted(folder.glob("*.json")) if path.name not in UNREAD]
    files += sorted(path for kind in ("*.safetensors", "*.bin") for path in folder.glob(kind))
    return {path.name: _outside(path) for path in files}


def changed(where: str, record: dict[str, Any]) -> str | None:
    """Name what has changed in the model at `where` since its record; None if nothing has."""
    folder = place_of(where)
    if folder is None:
        gone = "its folder is gone (relative paths start at the working folder)"
        return gone if where[0] in "./" else None
    for name, expected in record.items():
        if not (folder / name).is_file():
            return f"{name} is gone"
        if _outside(folder / name) != expected:
            return f"{name} has changed"
    return None


def _outside(path: Path) -> dict[str, Any]:
    """Return a JSON file's checksum, or a weight file's size and its header if it has one."""
    if path.suffix == ".json":
        return {"sha256": file_digest(path)}
    size = path.stat().st_size
    if path.suffix != ".safetensors":
        return {"bytes": size}
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(length) if length < min(size, SMALL) else b""
    try:
        tensors = json.loads(header)
    except ValueError:
        tensors = None
    return {"bytes": size, "header": content_digest(tensors)}
