"""Damaged artefacts: a file that is missing, cut, flipped or changed is told when it is loaded.

damage.json lists what is damaged and how. Well-formed changes get checksums of their own, so that
the reader itself has to find them.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.robustness import child
from tests.robustness.damage import LOADERS, apply

pytestmark = pytest.mark.nightly
TABLE = json.loads(Path(__file__).with_name("damage.json").read_text())
CASES = [
    (artefact, pattern, damage)
    for artefact in TABLE["artefacts"]
    for pattern in artefact["files"]
    for damage in TABLE["damages"]
    if pattern.endswith(damage["suffix"])
]


def digest(value):
    """A hash of nested values, tensors and arrays included."""
    if isinstance(value, dict):
        value = sorted((str(key), digest(part)) for key, part in value.items())
    elif isinstance(value, list | tuple):
        value = [digest(part) for part in value]
    elif isinstance(value, torch.Tensor):
        value = [str(value.dtype), list(value.shape), value.flatten().tolist()]
    return hashlib.sha256(repr(value).encode()).hexdigest()


@pytest.fixture(scope="session")
def undamaged(finished):
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
    limits = child.Limits(seconds=120, memory=4 << 30)
    outcome = child.run(lambda: digest(LOADERS[artefact["name"]](path)), tmp_path, limits)
    if outcome.kind == child.WORKS:
        assert outcome.value == undamaged[artefact["name"]], "a wrong result, in silence"
    else:
        assert outcome.kind == child.TOLD and str(path.parent) in outcome.text, outcome.text[-1000:]
