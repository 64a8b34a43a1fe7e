"""The report: every number in the page, the terminal and the file; its pictures; what is left out."""

import json
import re

import pytest
from matplotlib.image import imread

from nde_talf.decoding.common.bootstrap import times
from nde_talf.evaluation.protocol import CONTROL, NOT_TRUSTED, PROTOCOL
from nde_talf.evaluation.report import ReportData, in_markdown, table_of_domains, write_report
from tests.evaluation.example import NDE, SETTING, records


@pytest.mark.slow
def test_the_report_holds_every_number_and_nothing_from_outside(report):
    data, folder = report
    page = (folder / "index.html").read_text()
    assert "<run" not in page and "&lt;run &amp; co&gt;" in page and "def &lt;b&gt;" in page
    assert not re.search(r'(src|href)="?(http|//)|url\(http', page) and "<script" not in page
    for row in data.tables[str(SETTING)]:
        for text in (page, in_markdown(data)):
            assert times(row.speedup) in text and row.method in text
    for words in (
        "BV (1, 0, 4): the same method as",
        "SpecInfer + selector (NDE) is static here",
        PROTOCOL[0][:40],
        "The runner-up, ",
        "5 prompts: indicative.",
        "Clock trusted",
        "overlap of both distributions, 1.0</dt><dd>0.8125",
    ):
        assert words in page
    names = ["speedup", "positions", "actions", "curves"]
    for name in names:
        height, width, _ = imread(folder / f"{name}.png").shape
        assert width > 500 and height > 150
    assert page.count("<svg") == len(names)  # one panel each
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    kept = json.loads((folder / "results.json").read_text())
    assert kept["tables"][str(SETTING)][3]["speedup"][0] == pytest.approx(2.5)
    assert kept["summary"][0].startswith(data.verdicts[str(SETTING)].sentence)
    assert "learned here: 2.50× [2.50, 2.50] plain decoding, place 1 of" in kept["summary"][0]
    assert kept["histograms"][str(SETTING)][NDE] == [0, 0, 0, 25]


def test_an_untrusted_clock_is_told_everywhere_and_nothing_is_claimed(tmp_path):
    data = ReportData.of("doubtful", records(tmp_path, twin=110), "")
    page = write_report(data, tmp_path / "report").read_text()
    kept = json.loads((tmp_path / "report/results.json").read_text())
    assert kept["verdicts"][str(SETTING)]["clock"] == NOT_TRUSTED
    for text in (
        page,
        (tmp_path / "report/results.md").read_text(),
        kept["summary"][0],
    ):
        assert NOT_TRUSTED in text and "as fast as plain" not in text


def test_a_domain_answers_for_its_own_clock_and_one_prompt_is_none(tmp_path):
    measured = records(tmp_path)
    for record in measured:
        record.kind = {"0": "one", "1": "slow", "2": "slow"}.get(record.prompt[-1], "steady")
        if record.kind == "slow" and record.method == CONTROL:
            record.seconds *= 2
    heads = table_of_domains(ReportData.of("domains", measured, ""), str(SETTING)).columns
    assert heads == ["speed-up", f"slow: {NOT_TRUSTED}", "steady"]
