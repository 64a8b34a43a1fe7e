"""Figure 1 of the NDE paper: acceptance rates by depth along paths drawn from the draft, a line a
prompt and setting.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import torch

from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.common.progress import track
from nde_talf.decoding.super_tree import super_tree_layout
from nde_talf.evaluation.loops import TITLES
from nde_talf.evaluation.papers.bench import Bench, OutOfTime, Work
from nde_talf.evaluation.papers.labelled import EIGHT
from nde_talf.evaluation.papers.resampled import Prompts, Samples, mean
from nde_talf.evaluation.solver_acceptance import OPTIMAL, acceptance_by_depth, trajectory_trees

DEPTHS = 8
L1 = "L1 distance"
CURVES = {TITLES[rule]: rule for rule in ("naivetree", "nss", "specinfer", "spectr", "khisti")} | {
    OPTIMAL: OPTIMAL,
    L1: L1,
}


class Rates:
    """The rates measured so far.

    Attributes:
        prompts: whose they are.
    """

    def __init__(self, bench: Bench):
        file = _file(bench)
        lines = file.read_text().splitlines() if file.exists() else []
        self.lines = [own for own in map(json.loads, lines) if own["prompt"] in bench.prompts.row]
        done = {own["prompt"] for own in self.lines}
        self.prompts = Prompts([prompt for prompt in bench.prompts.every if prompt.id in done])

    def curve(self, row: tuple[str, ...], column: str) -> Samples | None:
        """The mean over the settings of a method's rate at a depth; a cell of the figure."""
        found = []
        for setting in EIGHT:
            sums = np.zeros((2, len(self.prompts.every)))
            for own in self.lines:
                if own["setting"] == setting:
                    rate = own["rates"][CURVES[row[0]]][int(column)]
                    sums[:, self.prompts.row[own["prompt"]]] += own["roots"] * rate, own["roots"]
            found.append(self.prompts.ratio(*sums) if self.lines else None)
        return mean(found)


def measuring(bench: Bench) -> Work:
    """The measurement. One prompt's distributions are in memory at a time."""
    file = _file(bench)

    def todo() -> list:
        done = Rates(bench).prompts.row
        return [prompt for prompt in bench.prompts.every if prompt.id not in done]

    def seconds() -> float:
        return len(todo()) * len(EIGHT) * bench.tokens(64) * 2 * bench.table.target[0][0]

    def run(deadline: float) -> None:
        missing = todo()
        for prompt in track(missing, "acceptance", len(missing), "prompt") if missing else ():
            if time.monotonic() > deadline:
                raise OutOfTime
            lines = [json.dumps(_rates(bench, prompt, name)) + "\n" for name in EIGHT]
            with file.open("a") as stream:
                stream.write("".join(line for line in lines if line != "null\n"))

    return Work("acceptance", seconds, run, lambda: Rates(bench).prompts)


@torch.inference_mode()
def _rates(bench: Bench, prompt, name: str) -> dict | None:
    """Rates by solver and depth of one prompt's roots."""
    (target, draft), setting = bench.models, SETTINGS[name]
    how = (
        setting,
        setting,
        super_tree_layout(1, DEPTHS, 0),
        1,
        16,
        bench.tokens(64),
        EIGHT.index(name),
    )
    for trees in trajectory_trees(target, draft, [prompt.tokens], *how):
        p, q = trees.distributions(target, draft, setting, setting)
        rates = acceptance_by_depth(p, q, 4) | {L1: (p - q).abs().sum(-1).mean(0).tolist()}
        return {"prompt": prompt.id, "setting": name, "roots": len(p), "rates": rates}
    return None


def _file(bench: Bench) -> Path:
    return bench.folder / f"acceptance-{bench.tokens(64)}-{bench.dtype}.jsonl"
