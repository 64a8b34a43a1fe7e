"""Models of others: record what they are, and notice later if they have changed.

JSON files are compared byte by byte, weights by their headers and sizes, or by all of their bytes.
Reading the header of a safetensors file takes no time however large the file is. It names every
tensor with its type, shape and offset, so that a model of another architecture, a revision with
other tensors or a truncated file is noticed. Other numbers in the same tensors are not, unless the
full file is read.
"""

import json
from pathlib import Path
from typing import Any

from nde_talf.decoding.common.checksums import CHECKSUMS
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import checksum, content_digest

SMALL = 64 << 20
"""Size in bytes up to which a JSON file or a header is read."""
WHOLE = 2 << 30
"""Size in bytes of all weights up to which all of them is read when they are recorded."""
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


def recorded(where: str, whole: bool = False) -> dict[str, Any]:
    """Record a model, for a later comparison by `changed`.

    whole: read all weights, which is done up to 2 GiB anyway.
    """
    folder = place_of(where)
    if folder is None:
        return {}
    # The JSON files that every load reads: config.json, indices, the tokenizer.
    small = [
        p
        for p in sorted(folder.glob("*.json"))
        if p.stat().st_size <= SMALL and p.name not in UNREAD
    ]
    record: dict[str, Any] = {path.name: {"sha256": checksum(path)} for path in small}
    weights = sorted(path for kind in ("*.safetensors", "*.bin") for path in folder.glob(kind))
    whole = whole or sum(path.stat().st_size for path in weights) <= WHOLE
    for path in weights:
        record[path.name] = _outside(path) | ({"sha256": checksum(path)} if whole else {})
    return record


def changed(where: str, record: dict[str, Any], whole: bool = False) -> str | None:
    """Describe in words how the model at `where` differs from its record; None if it does not.

    Raises:
        UserError: whole is asked of a record that does not hold the checksums of all bytes.
    """
    folder = place_of(where)
    if folder is None or not record:
        return None
    for name, expected in record.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is gone"
        if whole and "sha256" not in expected:
            raise UserError(
                f"model.verify=true: of {path} only header and size are known, because it is large."
                " Make the pair again with stage=pair force=true model.verify=true, then all of"
                " its bytes are."
            )
        if "bytes" in expected and not whole:
            if not _outside(path).items() <= expected.items():
                return f"{name} has changed (its header or size)"
        elif checksum(path) != expected["sha256"]:
            return f"{name} has changed"
    return None


def _outside(path: Path) -> dict[str, Any]:
    """A weight file's size, and its header if it is of safetensors."""
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
