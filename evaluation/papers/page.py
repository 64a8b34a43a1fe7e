"""The page of all papers: verdicts first, then where the tables are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from decoding.common.errors import UserError
from decoding.common.files import read_json
from evaluation.papers.frame import FAILS, HOLDS, UNSEEN, verdict_table

HEAD = """# Reproduction of the five papers

This page says which claims of the five papers hold on a pair of this project, and where every table and figure is. It is made
from the results by `python -m evaluation.papers page`; do not edit it.
"""

HOW = """## How to run it

`python -m evaluation.papers PAPER --all --run FOLDER` measures every table, figure and verdict of one paper (`nde`, `gbv`,
`dynatree`, `talf`, `dyspec`) on the pair of a run. `--table 5` or `--figure 2` asks for one; without such an option the command
lists what there is, and about how long it takes. The run needs stages pair and latency. The rows of NDE also need its
selectors (stages traces and selector, with `traces=nde`).

What was measured is kept in `FOLDER/papers`: a command goes on where another one stopped, and a larger `--prompts N` only adds
what is missing. `--minutes` (90) bounds a command; a cell that was not measured is empty. With a run of a real pair, and
`--device cuda --dtype bfloat16`, the same command is the reproduction at a paper's own size.

- Block efficiency, and with the latency table tokens/s, of the NDE and GBV papers come from labels: the expected tokens a
  step of every rule and tree on one shared trace. Winners are decoded too (“in the loop”), against plain decoding and an A/A
  control.
- Brackets are 95 % bootstrap intervals over prompts, resampled within each set and jointly for all methods.
- A claim holds if every interval of its ratios is above 1, does not hold if one is below 1, and cannot be seen otherwise.
"""


def write_page(results: Path, page: Path, papers: Sequence[str]) -> None:
    """Write `page` from the JSON files in `results`. Raises UserError if there are none."""
    found = {name: read_json(results / f"{name}.json") for name in papers if (results / f"{name}.json").exists()}
    if not found:
        raise UserError(f"--out {results}: it holds no results. Run a paper first: python -m evaluation.papers nde --all.")
    verdicts = [verdict for own in found.values() for verdict in own["verdicts"]]
    counts = {name: sum(own["verdict"] == name for own in verdicts) for name in (HOLDS, FAILS, UNSEEN)}
    where = Path(os.path.relpath(results, page.parent)).as_posix()
    links = [
        f"- [{name}.md]({where}/{name}.md): {', '.join(own['tables'])}. {own['conditions']}" for name, own in found.items()
    ]
    total = f"{counts[HOLDS]} of {len(verdicts)} claims hold, {counts[FAILS]} do not, {counts[UNSEEN]} cannot be seen here."
    parts = [HEAD, "## Verdicts", total, verdict_table(verdicts), HOW, "## Tables and figures", "\n".join(links)]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(part.strip() for part in parts) + "\n")
