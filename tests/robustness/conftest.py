"""A finished small run that cases damage copies of, and how many of the cases are run."""

from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--every", type=int, default=1, help="run every n-th case alone")


def pytest_collection_modifyitems(config, items):
    here = [item for item in items if Path(item.path).parent == Path(__file__).parent]
    step = config.getoption("every", 1)
    kept = {id(item) for item in here[::step]}
    config.hook.pytest_deselected(items=[item for item in here if id(item) not in kept])
    items[:] = [item for item in items if item not in here or id(item) in kept]


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The folder of a corpus and of checkpoints, which hold one finished run, `default`."""
    from tests.pipelines import micro

    folder = tmp_path_factory.mktemp("finished")
    done = micro.run(folder, "model=tiny_ci", "tracking=disabled", "model.threads=1")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
