"""The campaign calls things by their names: what was told, what crashed, what went wrong in
silence.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.damage import Artefact, damages, digest, loaded
from benchmarks.forked import TOLD, TRACEBACK, forked
from nde_talf.decoding.common.errors import UserError
from nde_talf.selector.selector import Selector

FORMATS = Path(__file__).parents[1] / "formats"


def refuse():
    raise UserError("file.json: no")


def crash():
    raise ValueError("oops")


@pytest.mark.parametrize(
    "work,what",
    [
        (lambda: "answer", "returned"),
        (refuse, TOLD),
        (crash, TRACEBACK),
        (lambda: sys.exit(130), "interrupted"),
        (lambda: sys.exit(0), "ended well"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended by signal 9"),
        (lambda: time.sleep(60), "hangs"),
    ],
)
def test_how_a_case_ended(tmp_path, work, what):
    found = forked(work, tmp_path / "out", seconds=0.5 if what == "hangs" else 60)
    assert found.what == what, found
    if what == TRACEBACK:
        assert "ValueError: oops" in found.text


def test_memory_is_short_in_a_case_that_has_none(tmp_path):
    found = forked(lambda: len(bytearray(1 << 30)), tmp_path / "out", 60, headroom=1 << 20)
    assert found.what == TRACEBACK and "MemoryError" in found.text


@pytest.mark.slow
def test_damage_to_an_export_is_told_or_harmless_and_a_reader_that_notices_nothing_is_found_out(
    tmp_path,
):
    artefact = Artefact(
        "selector", "selector-6", lambda path: Selector.from_pretrained(path).state_dict()
    )
    right, rng = digest(artefact.load(FORMATS / artefact.path)), random.Random(0)
    every = list(damages(FORMATS, FORMATS, artefact, rng))
    found = [
        loaded(FORMATS, artefact, change, tmp_path, right) for _, change in rng.sample(every, 12)
    ]
    assert len(every) > 30 and {each.what for each in found} <= {TOLD, "harmless, equal result"}
    careless = Artefact(
        "selector", "selector-6", lambda path: [f.stat().st_size for f in sorted(path.iterdir())]
    )
    right = digest(careless.load(FORMATS / careless.path))
    what, change = next((what, change) for what, change in every if "is cut" in what)
    assert loaded(FORMATS, careless, change, tmp_path, right).what not in (
        TOLD,
        "harmless, equal result",
    ), what
    assert digest(torch.ones(2)) != digest(torch.ones(2, dtype=torch.bfloat16))
