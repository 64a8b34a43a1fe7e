"""The report: every number in the page, the terminal and the file; its pictures; what is left out."""

import json
import re

import pytest
from matplotlib.image import imread

from nde_talf.decoding.common.bootstrap import times
from nde_talf.evaluation.protocol import BASELINE, PROTOCOL
from nde_talf.evaluation.report import in_markdown, write_report
from nde_talf.evaluation.table import tabulate
from tests.evaluation.example import NDE, SETTING, STATIC, everything, records


def test_rows_are_ratios_to_the_same_prompts_baseline(tmp_path):
    rows = {row.method: row for row in tabulate(records(tmp_path))[str(SETTING)]}
    assert rows[BASELINE].speedup == pytest.approx([1, 1, 1])
    assert rows[BASELINE].block_efficiency[0] == 1
    fast = rows[NDE]
    assert fast.speedup == pytest.approx([2.5] * 3)
    assert fast.block_efficiency == pytest.approx([4, 4, 4])
    assert fast.tokens_per_second == pytest.approx(250) and fast.nodes == 5
    assert sum(fast.shares.values()) == pytest.approx(1)


@pytest.mark.slow
def test_the_report_holds_every_number_and_nothing_from_outside(tmp_path):
    data, folder = everything(records(tmp_path)), tmp_path / "report"
    write_report(data, folder)
    page = (folder / "index.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "<run" not in page and "&lt;run &amp; co&gt;" in page
    assert not re.search(r'(src|href)="?(http|//)|url\(http', page) and "<script" not in page
    for row in data.tables[str(SETTING)]:
        for text in (page, in_markdown(data)):
            assert times(row.speedup) in text and row.method in text
    for words in (
        "BV (1, 0, 4): the same method as",
        "SpecInfer + selector (NDE) is static here",
        PROTOCOL[0][:40],
        f"over its best static tree, {STATIC}",
        "5 prompts: indicative.",
    ):
        assert words in page
    names = ["speedup", "positions", "actions", "curves"]
    for name in names:
        height, width, _ = imread(folder / f"{name}.png").shape
        assert width > 500 and height > 150
    assert page.count('<img src="data:image/png;base64,') == len(names)
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    (part,) = data.parts[str(SETTING)]  # 250, 200 and 100 tokens/s
    assert part.over_static == pytest.approx([1.25] * 3) and part.plain == pytest.approx([2.5] * 3)
    kept = json.loads((folder / "results.json").read_text())
    assert kept["tables"][str(SETTING)][3]["speedup"][0] == pytest.approx(2.5)
    assert kept["summary"][0].startswith(data.verdicts[str(SETTING)].sentence)
    assert kept["histograms"][str(SETTING)][NDE] == [0, 0, 0, 25]
