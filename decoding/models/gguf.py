"""Convert GGUF files into ordinary model folders, by transformers' own reader.

A conversion holds dequantised bfloat16 weights, tokenizer and chat template. It is made once and
kept in the user's cache under the file's checksum. Imports no torch.
"""

import tempfile
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock

from nde_talf.decoding.common.checksums import file_digest, write_checksums
from nde_talf.decoding.common.errors import UserError, first_line
from nde_talf.decoding.common.files import (
    model_cache,
    reading,
    remove_temporaries,
    write_atomically,
    write_json,
)
from nde_talf.decoding.common.progress import console

SUFFIX = ".gguf"
AGAIN = "download it again, or give a folder with the safetensors weights of the model"


def model_folder(where: str | Path, name: str = "model") -> str:
    """Return the folder of a GGUF file's conversion, made at its first use; others as they are.

    Raises:
        UserError: there is no such file, it cannot be converted, or the cache cannot be written.
            The message names `name` and the file.
    """
    file = Path(where)
    if file.suffix != SUFFIX or file.is_dir():
        return str(where)
    if not file.is_file():
        raise UserError(f"{name}={where}: there is no such file.")
    return _converted(file.resolve(), file.stat().st_mtime_ns, f"{name}={where}")


def conversion(stem: str, digest: str) -> Path:
    """Return the folder of a conversion in the user's cache.

    stem: the file's name without its suffix. digest: its SHA-256.
    """
    return model_cache() / f"{stem}-{digest[:16]}"


def check_reader(where: str) -> None:
    """Raise UserError if the package that reads GGUF is missing."""
    if find_spec("gguf") is None:
        raise UserError(
            f"{where}: a GGUF file is read by the package gguf, which is not installed:"
            " pip install 'gguf>=0.10'"
        )


@cache
def _converted(file: Path, changed: int, where: str) -> str:
    """Convert `file`, or find its conversion. changed: the file's time, so that it is read anew."""
    digest = file_digest(file)
    folder = conversion(file.stem, digest)
    if folder.is_dir():
        return str(folder)
    check_reader(where)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / ".lock"):
            if not folder.is_dir():  # another process may have made it
                remove_temporaries(folder.parent)
                console.print(f"{where}: converted to bfloat16, once, in {folder} ...")
                write_atomically(folder, partial(_convert, file, digest, where))
    except OSError as error:
        raise _no_room(folder, first_line(error)) from error
    return str(folder)


def _no_room(folder: Path, why: str) -> UserError:
    return UserError(
        f"{folder.parent}: the converted model cannot be written there ({why}). Make room there, or"
        " set HF_HOME to a folder that can hold it."
    )


def _convert(file: Path, digest: str, where: str, folder: Path) -> None:
    """Write the model in `file` to `folder`."""
    import torch

    with reading(where, AGAIN):
        _check_positions(file)
        loaded, tokenizer = _read(file)
        facts = loaded.config.to_dict()
        for one in ("quantization_config", "_name_or_path"):  # the weights are dequantised
            facts.pop(one, None)
        with torch.device("meta"):
            plain = type(loaded)(type(loaded.config)(**facts))
        plain.load_state_dict(loaded.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = loaded.generation_config
    try:
        for part in (plain, tokenizer):
            part.save_pretrained(folder)
        write_json(folder / "source.json", {"file": file.name, "sha256": digest})
        write_checksums(folder)
    except Exception as error:  # safetensors says in an error of its own that the disk is full
        raise _no_room(folder, first_line(error)) from error


def _check_positions(file: Path) -> None:
    """Raise ValueError if the file scales its positions, which transformers' reader leaves out."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    scaled = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")]
    scaled += [name for name in reader.fields if ".rope.scaling." in name]
    if scaled:
        raise ValueError(f"{scaled[0]}: transformers' reader leaves scaled positions out")


def _read(file: Path) -> tuple[Any, Any]:
    """Load model and tokenizer of a GGUF file.

    Raises:
        ValueError: a weight of the model is not in it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as alone:  # transformers looks for JSON files beside it
        Path(alone, file.name).symlink_to(file)
        made: Any = AutoModelForCausalLM.from_pretrained(
            alone,
            gguf_file=file.name,
            dtype=torch.bfloat16,
            output_loading_info=True,
            trust_remote_code=False,
        )
        loaded, report = made
        if missing := report["missing_keys"]:
            raise ValueError(f"it lacks {min(missing)}")
        tokenizer = AutoTokenizer.from_pretrained(
            alone, gguf_file=file.name, trust_remote_code=False
        )
        return loaded, tokenizer
