"""Khisti's tournaments against each other and the best rate possible, on a real pair.

`python -m benchmarks.acceptance [--run checkpoints/default]`, after `python -m pipelines.run`.
Acceptance rates of all solvers by depth (Figure 1 of the NDE paper) are `python -m
evaluation.papers nde --figure 1`.
"""

import argparse
import time
from pathlib import Path

import torch

from benchmarks.timing import report
from nde_talf.data.text.pair import Pair
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.rules.acceptance import optimal_acceptance
from nde_talf.decoding.rules.tournament import PAPER, Tournament, play
from nde_talf.evaluation.solver_acceptance import draft_paths

DEPTHS, K = 8, 4
TOURNAMENTS = {
    "ratio rule (p / q)": Tournament(0, "ratio", False),
    "score rule (p - a q)": Tournament(0, "score", False),
    "score rule, program over 5 (khisti_lp)": PAPER,
    **{f"score rule, program over {s}": Tournament(s, "score", False) for s in (10, 15)},
    **{f"score rule, program over {s}, guarded": Tournament(s, "score", True) for s in (5, 15)},
    "ratio rule, program over 5, guarded": Tournament(5, "ratio", True),
    "ratio rule, guarded (the default)": Tournament(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--settings", nargs="+", default=["t0.6", "t1.0"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    pair = Pair(options.run / "pair")
    target, draft = pair.models("cpu", "float32")
    prompts = [prompt.tokens for prompt in pair.prompts("test", options.prompts, "--prompts")]
    tournaments = []
    for name in options.settings:
        setting = SETTINGS[name]
        p, q = draft_paths(target, draft, prompts, setting, setting, DEPTHS)
        some = torch.arange(0, p.shape[0] * p.shape[1], 5)
        flat_p, flat_q = p.flatten(0, 1)[some], q.flatten(0, 1)[some]
        best = float(optimal_acceptance(flat_p, flat_q, K).mean())
        for title, how in TOURNAMENTS.items():
            started = time.perf_counter()
            covered = [
                float(torch.minimum(x, play(x, y, K, how)[1][-1]).sum())
                for x, y in zip(flat_p, flat_q, strict=True)
            ]
            seconds = (time.perf_counter() - started) / len(some)
            tournaments.append(
                [str(setting), title, sum(covered) / len(covered), best, 1e3 * seconds]
            )
    command = "python -m benchmarks.acceptance"
    report(
        "khisti",
        command,
        ["setting", "tournament", f"acceptance, k = {K}", "optimal", "ms a node"],
        tournaments,
    )


if __name__ == "__main__":
    main()
