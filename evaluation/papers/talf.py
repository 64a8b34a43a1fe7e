"""“SALF & TALF”: Tables 1 to 4, Figures 2a and 2b.

Heads are trained as the paper does for its Llama pairs: an EAGLE head first, and from it one head a
loss for equal steps. All cells are from the loop. `SALF & TALF` is the TALF head (top-4) with SALF
trees at a threshold of 0.6; the other two draft by beam search.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
from torch import Tensor

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.data.text.pair import spread
from nde_talf.data.text.prompts import Prompt
from nde_talf.decoding.common.bootstrap import samples
from nde_talf.decoding.common.files import checksum, read_json
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.salf import Optimal, Salf
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.draft_training.export import load_head, save_head
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.draft_training.settings import EagleLoss, HassLoss, HeadConfig, TalfLoss
from nde_talf.draft_training.train_head import fit_head
from nde_talf.evaluation.benchmark import read_records
from nde_talf.evaluation.papers.bench import Bench, OutOfTime, Work
from nde_talf.evaluation.papers.decoded import Decoded, Loop
from nde_talf.evaluation.papers.frame import Claim, Plot, Row, Table
from nde_talf.evaluation.papers.ranks import after_ranks, calibration_error
from nde_talf.evaluation.papers.resampled import Samples, mean, ratio

WARM, EAGLE, HASS, TALF = "warm", "EAGLE-2", "HASS", "TALF"
LOSSES = {EAGLE: EagleLoss(), HASS: HassLoss(), TALF: TalfLoss(k=4)}
LOSSES |= {f"TALF (top-{k})": TalfLoss(k=k) for k in (1, 2)}
TREES = {"Beam search": Beam, "Optimal tree search": Optimal, "SALF": Salf}
"""Their defaults are the paper's: N = 60, k = B = 10, depth 7, th = 0.6."""
THRESHOLDS = [f"{n / 10:.1f}" for n in range(10)]
TEMPERATURES = {"0": SamplingSetting(0.0), "1": SamplingSetting(1.0)}
"""Of the target.

The drafter's probabilities are not warped (AUTO for picked tokens), as the paper's thresholds are
meant.
"""
ROWS = {
    "EAGLE-2": (EAGLE, "Beam search"),
    "HASS": (HASS, "Beam search"),
    "SALF & TALF": (TALF, "SALF"),
}
HERE, MEAN, RANKS = "here", "Mean", 5
BENCHED = {EAGLE: "eagle", HASS: "hass", TALF: "talfk4"}
"""Folders of `benchmarks.heads`, and below its names of heads and trees."""
BENCHED_METHODS = {EAGLE: "EAGLE", HASS: "HASS", TALF: "TALF, k = 4"}
BENCHED_TREES = {"Beam search": "beam", "Optimal tree search": "optimal", "SALF": "SALF"}


class Talf:
    """Measurements, tables and claims on a run."""

    name, title = "talf", "SALF & TALF"

    def __init__(self, bench: Bench):
        self.bench = bench
        self.warm, self.steps = bench.head_steps
        heads = (
            checksum(bench.heads / "steps" / BENCHED[TALF] / "export")[:8]
            if bench.heads
            else self.steps
        )
        self.loops = {
            name: Loop(f"talf-raw-t{name}-{heads}", setting, self._crossed)
            for name, setting in TEMPERATURES.items()
        }
        self.loops["threshold"] = Loop(
            f"talf-raw-threshold-{heads}", TEMPERATURES["0"], self._thresholds
        )
        self.loops["top-k"] = Loop(f"talf-raw-topk-{heads}", TEMPERATURES["0"], self._top_k)

    @cached_property
    def decoded(self) -> dict[str, Decoded]:
        return {name: Decoded.of(self.bench, loop) for name, loop in self.loops.items()}

    @cached_property
    def elsewhere(self) -> Decoded | None:
        """What `benchmarks.heads` decoded with its heads at temperature 0, where these are taken."""
        file = self.bench.heads / "records.jsonl" if self.bench.heads else None
        if file is None or not file.exists():
            return None
        found = [
            record for record in read_records(file) if record.setting == str(TEMPERATURES["0"])
        ]
        return Decoded(found, [Prompt(own.prompt, own.kind, "") for own in found], self.bench.clock)

    def folder(self, name: str) -> Path:
        """Of a head."""
        if self.bench.heads:
            return self.bench.heads / "steps" / BENCHED.get(name, "none")
        plain = "".join(c for c in name.lower() if c.isalnum())
        return self.bench.folder / f"heads-{self.warm}-{self.steps}" / plain

    def works(self) -> list[Work]:
        heads = Work("heads", self._head_seconds, self._train)
        counts = {"0": 9, "1": 9, "threshold": 10} | ({} if self.bench.heads else {"top-k": 4})
        return [
            heads,
            *(self.loops[name].work(self.bench, count) for name, count in counts.items()),
        ]

    def _head_seconds(self) -> float:
        """A step runs target and head over 4 rows of 256 tokens: about the price of 200 passes over
        a small tree.
        """
        todo = [
            name
            for name in (WARM, *LOSSES)
            if not (self.bench.heads or (self.folder(name) / "export").exists())
        ]
        steps = sum(self.warm if name == WARM else self.steps for name in todo)
        return steps * 200 * self.bench.table.target[0][0]

    def _train(self, deadline: float) -> None:
        target = self.bench.models[0]
        rows = TokenRows.plain(self.bench.pair.rows("train"))
        base = HeadConfig(chain_fraction=0.0, roots=32)
        configs = {WARM: replace(base, loss=EagleLoss(), steps=self.warm)}
        start = str(self.folder(WARM) / "export")
        own = replace(base, steps=self.steps, warm_start=start, seed=1)
        configs |= {name: replace(own, loss=loss) for name, loss in LOSSES.items()}
        for name, config in configs.items():
            folder = self.folder(name)
            if not (folder / "export").exists():
                console.print(f"training the head {folder.name}: {config.steps} steps")
                save_head(
                    fit_head(
                        target, rows, config, folder / "training", callbacks=[_Until(deadline)]
                    ),
                    folder / "export",
                )

    def _drafter(self, name: str) -> EagleDrafter:
        return EagleDrafter(load_head(self.folder(name) / "export", self.bench.models[0]))

    def _crossed(self) -> dict[str, tuple]:
        drafters = {name: self._drafter(name) for name in (EAGLE, HASS, TALF)}
        return {
            f"{name} / {tree}": (make(), "nss", drafters[name])
            for name in drafters
            for tree, make in TREES.items()
        }

    def _thresholds(self) -> dict[str, tuple]:
        drafter = self._drafter(TALF)
        return {
            th: (Salf(threshold=float(th)) if float(th) else Optimal(), "nss", drafter)
            for th in THRESHOLDS
        }

    def _top_k(self) -> dict[str, tuple]:
        names = {
            "HASS (top-1)": HASS,
            "TALF (top-1)": "TALF (top-1)",
            "TALF (top-2)": "TALF (top-2)",
            "TALF (top-4)": TALF,
        }
        return {title: (Optimal(), "nss", self._drafter(name)) for title, name in names.items()}

    def figure(self, loop: str, method: str, of: str, column: str) -> Samples | None:
        """Speed-up or mean generation length on a set, or the mean over the sets."""
        own = self.decoded[loop]
        call = own.speedup if of == "speedup" else own.length
        return (
            mean([call(method, kind) for kind in self.bench.sets])
            if column == MEAN
            else call(method, column)
        )

    @property
    def _made(self) -> str:
        """How the heads were trained."""
        if not self.bench.heads:
            return f"heads of {self.warm} + {self.steps} steps"
        return (
            f"heads of `benchmarks.heads`, {read_json(self.folder(TALF) / 'config.json')['steps']}"
            " steps from random weights"
        )

    def tables(self) -> list[Table]:
        sets = [*self.bench.sets, MEAN]
        both = [f"{column}, {of}" for column in sets for of in ("speedup", "τ")]

        def doubts(*names: str) -> list[str]:
            return [line for name in names for line in self.decoded[name].doubts()]

        def works(*names: str) -> list[str]:
            return ["heads", *(self.loops[name].name for name in names)]

        def first(row: Row, column: str) -> Samples | None:
            return self.figure(row[0], " / ".join(ROWS[row[2]]), "speedup", column)

        def second(row: Row, column: str) -> Samples | None:
            return self.figure(
                "0", f"{row[1]} / {row[0]}", column.rsplit(", ", 1)[1], column.rsplit(", ", 1)[0]
            )

        def fourth(row: Row, column: str) -> Samples | None:
            return self.figure(
                "threshold", row[0], column.rsplit(", ", 1)[1], column.rsplit(", ", 1)[0]
            )

        heads = self._made
        ranks = [str(n) for n in range(1, RANKS + 1)]
        losses = [(name,) for name in (EAGLE, HASS, TALF)]
        return [
            Table("Table 1", f"Speed-up over plain decoding; {heads}", ("Temperature", "Pair", "Method"),
                  [(t, HERE, name) for t in TEMPERATURES for name in ROWS], sets, first, notes=doubts("0", "1"),
                  works=works("0", "1")),
            Table("Table 2", f"Speed-up and mean generation length τ by tree and loss, temperature 0; {heads}",
                  ("Tree", "Loss"),
                  [(tree, name) for tree in TREES for name in (EAGLE, HASS, TALF)], both, second, notes=doubts("0"),
                  works=works("0")),
            Table("Table 3", "τ by the top-k of TALF's training trees; optimal tree search, temperature 0", ("Loss",),
                  [("HASS (top-1)",), ("TALF (top-1)",), ("TALF (top-2)",), ("TALF (top-4)",)], sets,
                  lambda row, column: self.figure("top-k", row[0], "τ", column), works=works("top-k")),
            Table("Table 4", "SALF thresholds, TALF head, temperature 0", ("Threshold",), [(th,) for th in THRESHOLDS], both,
                  fourth, notes=doubts("threshold"), works=works("threshold")),
            Table("Figure 2a", "Tokens of the draft tree by rank in the distribution that they were drawn from, %; TALF head, "
                  "optimal tree search", ("Rank",), [(rank,) for rank in (*ranks[:-1], "5 or lower")], ["Tokens, %"],
                  self._rank, 1, Plot("bars", "", "% of the tree's tokens"), works=["heads"]),
            Table("Figure 2b left", "Top-1 accuracy after the head's own n-th token", ("Loss",), losses, ranks,
                  partial(self._after, 0), 3, Plot("lines", "rank conditioned on", "top-1 accuracy"), works=["heads"]),
            Table("Figure 2b right", "Expected calibration error after the head's own n-th token", ("Loss",), losses, ranks,
                  partial(self._after, 1), 3, Plot("lines", "rank conditioned on", "expected calibration error"),
                  works=["heads"]),
        ]  # fmt: skip

    def _rank(self, row: Row, column: str) -> Samples | None:
        counts = self._ranked
        if counts is None:
            return None
        index = RANKS - 1 if row[0].startswith(str(RANKS)) else int(row[0]) - 1
        drawn = counts[samples(len(counts))].sum(1)
        found = np.vstack([counts.sum(0), drawn])
        return 100 * found[:, index] / found.sum(1)

    @cached_property
    def _ranked(self) -> np.ndarray | None:
        """[prompts, RANKS]: drafted tokens by rank, of a few steps after each prompt."""
        if not (self.folder(TALF) / "export").exists():
            return None
        policy = _Ranked(Optimal())
        decoder = SpeculativeDecoder(
            self.bench.models[0], self._drafter(TALF), policy, VERIFIERS["nss"]
        )
        found = []
        for prompt in self.bench.prompts.every:
            policy.counts = np.zeros(RANKS)
            for _ in islice(decoder.stream(prompt.tokens, TEMPERATURES["0"], Rng.seeded(0)), 4):
                pass
            found.append(policy.counts)
        return np.array(found)

    def _after(self, which: int, row: Row, column: str) -> Samples | None:
        found = self._by_rank.get(row[0])
        return None if found is None else found[which][int(column) - 1]

    @cached_property
    def _by_rank(self) -> dict[str, tuple[list[Samples], list[Samples]]]:
        """By loss, accuracy and calibration error by rank; positions are resampled."""
        rows, found = TokenRows.plain(spread(self.bench.pair.rows("held_out"), 16)), {}
        for name in (EAGLE, HASS, TALF):
            if (self.folder(name) / "export").exists():
                head = load_head(self.folder(name) / "export", self.bench.models[0])
                after = after_ranks(
                    head, self.bench.models[0], rows, of_label=True
                )  # as in the paper's Appendix A
                confidence, right = (part.cpu().numpy() for part in after[1:])
                drawn = samples(confidence.shape[1])[:200]
                accuracy = [np.append(own.mean(), own[drawn].mean(1)) for own in right]
                errors = [
                    np.array(
                        [calibration_error(c, r), *(calibration_error(c[d], r[d]) for d in drawn)]
                    )
                    for c, r in zip(confidence, right, strict=True)
                ]
                found[name] = accuracy, errors
        return found

    def claims(self) -> list[Claim]:
        def length(name: str, tree: str) -> Samples | None:
            """τ by what `benchmarks.heads` decoded, all its prompts together, or else by this
            command's own loop.
            """
            method = f"{BENCHED_METHODS[name]} / {BENCHED_TREES.get(tree)}"
            if self.elsewhere and method in self.elsewhere.by_method:
                return self.elsewhere.length(method)
            return self.figure("0", f"{name} / {tree}", "τ", MEAN)

        def losses(one: str, other: str) -> dict:
            return {
                f"{one} over {other}, {tree}": ratio(length(one, tree), length(other, tree))
                for tree in TREES
            }

        def curve() -> dict:
            found = {th: self.figure("threshold", th, "speedup", MEAN) for th in THRESHOLDS}
            inner = [own for own in [*found.values()][1:-1] if own is not None]
            best = max(inner, key=lambda own: own[0], default=None)
            return {
                f"best inner threshold over {th}": ratio(best, found[th])
                for th in (THRESHOLDS[0], THRESHOLDS[-1])
            }

        short = f"{self._made.capitalize()}; the paper trains for a day."
        if self.elsewhere:
            short += (
                " Beam search and SALF: as `benchmarks.heads` decoded, on"
                f" {self.elsewhere.prompts}; else"
            )
        short += f" {'on' if self.elsewhere else 'On'} {self.decoded['0'].prompts}."
        return [
            Claim("TALF beats HASS, for every tree", "τ 3.98 against 3.70 (optimal trees)", partial(losses, TALF, HASS), short),
            Claim("HASS beats EAGLE, for every tree", "τ 3.70 against 3.56 (optimal trees)", partial(losses, HASS, EAGLE),
                  short),
            Claim("SALF's threshold has a U-curve: both ends are slower than the best between", "2.62× at 0.5; 2.32× at 0, "
                  "2.37× at 0.9", curve,
                  f"The best threshold is chosen on the same {self.decoded['threshold'].prompts}. {self._made.capitalize()}.",
                  self.decoded["threshold"].doubts()),
        ]  # fmt: skip


class _Until(pl.Callback):
    """Ends a training at a deadline; its last checkpoint is where it goes on."""

    def __init__(self, deadline: float):
        self.deadline = deadline

    def on_train_batch_end(self, *_) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime


class _Ranked(TreePolicy):
    """A policy whose drafted tokens are counted by rank."""

    def __init__(self, policy: Salf):
        self.policy, self.trees, self.counts = policy, policy.trees, np.zeros(RANKS)

    def draft(self, state, drafter, rng):
        tree = self.policy.draft(state, drafter, rng)
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            q: Tensor = tree.q_at(parent)
            self.counts[min(int((q > q[token]).sum()), RANKS - 1)] += 1
        return tree
