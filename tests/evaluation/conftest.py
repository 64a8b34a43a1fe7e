import pytest

from nde_talf.evaluation.report import write_report
from tests.evaluation.example import everything, records


@pytest.fixture(scope="session")
def report(tmp_path_factory):
    """A written report's data and folder."""
    folder = tmp_path_factory.mktemp("report")
    data = everything(records(folder))
    write_report(data, folder / "report")
    return data, folder / "report"
