"""The parts that run on a GPU are rehearsed on the CPU, and need few packages."""

import json
import subprocess
import sys

import pytest

from benchmarks import gpu, timing

ABSENT = (
    "pytorch_lightning",
    "hydra",
    "omegaconf",
    "datasets",
    "pyarrow",
    "wandb",
    "matplotlib",
    "ray",
)
pytestmark = pytest.mark.long
IMPORT = "import sys, benchmarks.gpu; print(*{name.split('.')[0] for name in sys.modules})"


def test_it_needs_torch_transformers_and_safetensors_alone():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    assert "transformers" in done.stdout.split() and not {*ABSENT} & {*done.stdout.split()}


def test_every_part_is_rehearsed_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "RESULTS", tmp_path)

    def part(name, *more):
        common = f"--size small --device cpu --folder {tmp_path}/pair --results {tmp_path} --part"
        gpu.main([*common.split(), name, *more])
        return json.loads((tmp_path / f"gpu_{name}.json").read_text())["rows"]

    with pytest.raises(SystemExit, match="run --part pair first"):
        part("decode")
    with pytest.raises(SystemExit, match=r"target: 0 of 4 steps.*Start the part again"):
        part("pair", "--minutes", "0")
    assert [row[2] for row in part("pair")] == [4, 4]
    assert part("traces")[1][2] > 0
    methods = {row[0]: row for row in part("decode")}
    assert len(methods) == 9 and all(row[2] > 0 for row in methods.values())
    for name in ("autoregressive", "specinfer (3, 0, 5)"):  # static shapes change no token
        assert methods[name][1] == methods[f"{name}, static"][1]
    assert [row[0] for row in part("heads")] == ["talf", "hass", "eagle"]
    assert [row[:2] for row in part("attention")] == [
        [context, rows] for context in (64, 256) for rows in (1, 8, 64)
    ]
