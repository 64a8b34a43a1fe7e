"""The page of all papers: verdicts first, then where the tables are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json
from nde_talf.evaluation.papers.frame import FAILS, HOLDS, UNSEEN, verdict_table

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
- Claims that need no selector are counted on the traces that the run's selectors learned from: more prompts, under the settings
  that were traced. Claims about selectors are counted on prompts of the test split, which no selector has seen.
- Brackets are 95 % bootstrap intervals over prompts, resampled within each set and jointly for all methods.
- A claim holds if every interval of its ratios is above 1, does not hold if one is below 1, and cannot be seen otherwise.

The committed results are of this pair and run, with `--prompts 5` for `nde`, `gbv` and `dyspec`, 8 for NDE's Figure 1 and
`dynatree`, 4 for `talf`, and `--new-tokens 48` for `dynatree`, 24 for `dyspec` and `talf`. Some measurements had less time.
`--heads` takes the heads that `python -m benchmarks.heads --as-printed --own-text` trained on the same target.

NDE's claims are priced here. The same run was decoded too, 260 prompts under four settings
([selector.md](../benchmarks/results/selector.md)): SpecInfer with NDE is 1.138 [1.099, 1.176] times as fast as with its own
best static tree and 1.092 [1.057, 1.126] times as fast as Traversal with its best one, but 0.964 [0.940, 0.986] times as fast
as Traversal with one static tree for each set of prompts, of up to 16 tokens. Labels read lower than decoding: tokens a target
call by 1 to 19 % (NDE's Table 3 in the loop), most for NDE. So compare them with each other, not with decoded ones.

Which loss is best depends on the training. The heads behind the verdicts had 900 steps on the target's own text. Heads of 300
steps on the corpus ([heads_printed.md](../benchmarks/results/heads_printed.md)) say, with beam search at temperature 0: TALF
over HASS +5.8 % [+0.8, +10.5], HASS over EAGLE +10.8 % [+2.2, +21.5]; with SALF: -0.8 % [-4.9, +3.3] and +9.0 % [+1.4, +19.4].

```bash
python -m pipelines.run run=paper model=paper stage=pair
M="model.target=checkpoints/paper/pair/target model.draft=checkpoints/paper/pair/draft"
D="data=traffic_full data.prompt_count=520 data.test_fraction=0.5 traces=testbed traces.stride=16 traces.validation_samples=4"
S="selector=small selector.across=true selector.verifiers=[traversal,specinfer,spectr,khisti,naivetree,nss,gbv]"
for stage in pair latency traces selector; do python -m pipelines.run run=papers $M $D $S stage=$stage; done
```
"""

NOT_DONE = """## What is not here

- **SpecTr-GBV** (arXiv 2604.25925) and **UniVer** (2605.04543) verify multi-path drafts with more tokens accepted, by their
  abstracts. We could read no more than these: no code is public, and their rules cannot be stated exactly from the abstracts,
  so they are neither implemented nor proved or refuted.
- **Depth-first order of nodes** (DySpec's Appendix C) is counted (DySpec's Table 5 and Figure 9, and
  [block_order.md](../benchmarks/results/block_order.md)) and not used for decoding: it pays only where a kernel skips the empty
  blocks of a mask over more than 256 nodes, and no forward here has such a kernel.
- **Spec-Bench** and **SPEED-Bench**: `data.sets` reads their files, but there is no table of them, for this pair, which learned
  Python sources, manuals, sums and tables, writes no answers to their questions.
"""


def write_page(results: Path, page: Path, papers: Sequence[str]) -> None:
    """Write `page` from the JSON files in `results`. Raises UserError if there are none."""
    found = {
        name: read_json(results / f"{name}.json")
        for name in papers
        if (results / f"{name}.json").exists()
    }
    if not found:
        raise UserError(
            f"--out {results}: it holds no results. Run a paper first: python -m evaluation.papers"
            " nde --all."
        )
    verdicts = [verdict for own in found.values() for verdict in own["verdicts"]]
    counts = {
        name: sum(own["verdict"] == name for own in verdicts) for name in (HOLDS, FAILS, UNSEEN)
    }
    where = Path(os.path.relpath(results, page.parent)).as_posix()
    links = [
        f"- [{name}.md]({where}/{name}.md): {', '.join(own['tables'])}. {own['conditions']}"
        for name, own in found.items()
    ]
    total = (
        f"{counts[HOLDS]} of {len(verdicts)} claims hold, {counts[FAILS]} do not, {counts[UNSEEN]}"
        " cannot be seen here."
    )
    parts = [
        HEAD,
        "## Verdicts",
        total,
        verdict_table(verdicts),
        HOW,
        "## Tables and figures",
        "\n".join(links),
        NOT_DONE,
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(part.strip() for part in parts) + "\n")
