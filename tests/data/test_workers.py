"""Work spread over a local Ray cluster of two: nothing is lost or doubled when a worker is killed."""

import importlib.util
import os
from functools import partial
from pathlib import Path

import pytest

from decoding.common.errors import UserError
from decoding.common.parallel import map_units

ray_only = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]


class Squares:
    """Squares numbers; dies the first time it is asked for the square of 3, and complains of 99."""

    def __init__(self, folder: Path):
        self.folder = folder

    def square(self, x: int) -> int:
        if x == 3 and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os.kill(os.getpid(), 9)
        if x == 99:
            raise UserError("99 is too much")
        return x * x


def squares(folder: Path, numbers: list[int], workers: int) -> list[tuple[int, int]]:
    return list(map_units(partial(Squares, folder), "square", [(x,) for x in numbers], workers, None, 0))


def test_in_one_process_items_come_in_order(tmp_path):
    assert squares(tmp_path, [2, 4, 5], 1) == [(0, 4), (1, 16), (2, 25)]
    with pytest.raises(UserError, match="too much"):
        squares(tmp_path, [99], 1)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=ray_only)])
def test_a_killed_worker_is_replaced_and_nothing_is_lost_or_doubled(tmp_path, mark):
    found = squares(tmp_path, list(range(8)), 2)
    assert (tmp_path / "died").exists()
    assert sorted(found) == [(i, i * i) for i in range(8)]
    with pytest.raises(UserError, match="too much"):
        squares(tmp_path, [1, 99], 2)
