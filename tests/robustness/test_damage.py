"""Damaged artefacts: a file that is missing, cut, flipped or changed is told when it is loaded.

damage.json lists what is damaged and how. Well-formed changes get checksums of their own, so that
the reader itself has to find them.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nde_talf.data.text.pair import Pair
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.checksums import CHECKSUMS, file_digest, write_checksums
from nde_talf.decoding.common.files import SEAL, content_digest
from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.export import load_head
from nde_talf.pipelines.manifest import read_manifest
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.network import Selector
from tests.robustness import child

pytestmark = pytest.mark.nightly
TABLE = json.loads(Path(__file__).with_name("damage.json").read_text())
CASES = [
    (artefact, pattern, damage)
    for artefact in TABLE["artefacts"]
    for pattern in artefact["files"]
    for damage in TABLE["damages"]
    if pattern.endswith(damage["suffix"])
]


def load_pair(path: Path) -> Any:
    pair = Pair(path)
    pair.check_models()
    return pair.every_prompt(), pair.rows("train"), pair.rows("held_out")


def load_selector(path: Path) -> Any:
    selector = Selector.from_pretrained(path)
    return selector.state_dict(), selector.schema, selector.table


def load_draft_head(path: Path) -> Any:
    return load_head(path, CausalModel.load(path.parents[1] / "pair/target")).state_dict()


def load_settings(path: Path) -> Any:
    manifest = read_manifest(path.parent)
    return manifest["settings"], manifest["inputs"], manifest["artefacts"]


LOADERS: dict[str, Callable[[Path], Any]] = {
    "selector": load_selector,
    "head": load_draft_head,
    "latency": LatencyTable.load,
    "pair": load_pair,
    "model": lambda path: CausalModel.load(path).module.state_dict(),
    "traces": lambda path: [TraceStore(path).read(split) for split in ("train", "validation")],
    "manifest": load_settings,
}


def digest(value: Any) -> str:
    """A hash of nested values, tensors and arrays included."""
    if isinstance(value, dict):
        value = sorted((str(key), digest(part)) for key, part in value.items())
    elif isinstance(value, list | tuple):
        value = [digest(part) for part in value]
    elif isinstance(value, torch.Tensor):
        value = [str(value.dtype), list(value.shape), value.flatten().tolist()]
    return hashlib.sha256(repr(value).encode()).hexdigest()


def apply(damage: dict[str, Any], file: Path) -> None:
    content = bytearray(file.read_bytes())
    if damage["how"] == "missing":
        return file.unlink()
    if damage["how"] == "cut":
        return file.write_bytes(content[: int(damage["at"] * len(content))])
    if damage["how"] == "flip":
        content[int(damage["at"] * len(content))] ^= 4
        return file.write_bytes(content)
    if damage["how"] == "format":
        fields = {"format": 1, **json.loads(content)}
        fields["format"] += 1
        if fields.pop(SEAL, None):
            fields[SEAL] = content_digest(fields)
        file.write_text(json.dumps(fields))
    else:
        tensors = load_file(file)
        name = min(tensors)
        other = tensors[name].float() * torch.nan
        if damage["how"] == "one row more":
            other = torch.cat([tensors[name], tensors[name][:1]])
        save_file(tensors | {name: other}, file, metadata={"format": "pt"})
    seal(file)


def seal(file: Path) -> None:
    """Write checksums of a changed file anew: its folder's, or the pair's."""
    if (file.parent / CHECKSUMS).exists():
        (file.parent / CHECKSUMS).unlink()
        write_checksums(file.parent)
    index = file.parent / "pair.json"
    if index.exists() and file.name != index.name:
        content = json.loads(index.read_text())
        content["files"][file.name] = file_digest(file)
        content.pop(SEAL)
        index.write_text(json.dumps({**content, SEAL: content_digest(content)}))


@pytest.fixture(scope="session")
def undamaged(finished) -> dict[str, str]:
    run = finished / "checkpoints/default"
    return {
        artefact["name"]: digest(LOADERS[artefact["name"]](run / artefact["path"]))
        for artefact in TABLE["artefacts"]
    }


@pytest.mark.parametrize(
    ("artefact", "pattern", "damage"),
    CASES,
    ids=lambda value: (
        value if isinstance(value, str) else str(value.get("name", [*value.values()]))
    ),
)
def test_damage_is_told_or_changes_nothing(
    artefact, pattern, damage, finished, undamaged, tmp_path
):
    ignored = shutil.ignore_patterns("training", "curves", "wandb")
    for stage in {"pair", artefact["path"].split("/")[0]}:  # a head is loaded beside its target
        shutil.copytree(
            finished / "checkpoints/default" / stage, tmp_path / "run" / stage, ignore=ignored
        )
    path = tmp_path / "run" / artefact["path"]
    file = path if path.is_file() else min(path.glob(pattern))
    apply(damage, file)
    outcome = child.run(
        lambda: digest(LOADERS[artefact["name"]](path)), tmp_path, seconds=120, memory=4 << 30
    )
    if outcome.kind == child.WORKS:
        assert outcome.value == undamaged[artefact["name"]], "a wrong result, in silence"
    else:
        assert outcome.kind == child.TOLD and str(path.parent) in outcome.text, outcome.text[-1000:]
