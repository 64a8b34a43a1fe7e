"""Plant faults in the mathematics, one at a time, and print those that no test notices.

`python -m benchmarks.mutations [--only WORD ...]`: each fault is a substitution of text in a copy of the repository; the tests
that ought to notice it run there until the first fails. Some thirty minutes on two cores, for the night; exit status 1 where
one survives. A fault whose text is no longer there is an error: the list follows the code.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest
import pytorch_lightning  # noqa: F401  (these take seconds, and are the same for every fault)
import scipy.stats  # noqa: F401
import torch
import transformers  # noqa: F401

ROOT = Path(__file__).parents[1]
COPIED = ("benchmarks", "configs", "data", "decoding", "draft_training", "evaluation", "pipelines", "selector", "tests")
OUTPUT = "output.txt"
SECONDS = 600  # after which a fault counts as noticed: it hangs
STATES = {0: "SURVIVED", 1: "noticed", None: "noticed (hangs)"}


class Fault(NamedTuple):
    """In `file`, `old` becomes `new`; `tests` ought to fail: arguments of pytest."""

    name: str
    file: str
    old: str
    new: str
    tests: str


V = "decoding/verification"
T = "tests/decoding"
PEAKED, LOSSLESS, KEPT = f"{T}/test_peaked.py", f"{T}/test_lossless.py", f"{T}/test_acceptance_kept.py"
EXPECTED, ACCEPTANCE, OTHER = f"{T}/test_expected.py", f"{T}/test_acceptance.py", f"{T}/test_other_trees.py"
DEVICE, SOLVERS = f"{T}/test_device_laws.py", f"{T}/test_unread_solvers.py"
SAMPLING, LOOP, LAW = (
    f"{T}/test_sampling.py",
    f"{T}/test_loop.py::test_tree_attention_equals_each_path_alone",
    f"{T}/test_loop_law.py",
)
POLICIES = f"{T}/test_policies.py"

FAULTS = [
    # Rules on the host.
    Fault("residual weight forgets what is left", f"{V}/residual.py", "self.d * q / left", "self.d * q", OTHER),
    Fault("rejection forgets what is left", f"{V}/residual.py", "self.c += self.d / left", "self.c += self.d", PEAKED),
    Fault(
        "a child that could not be drawn counts",
        f"{V}/residual.py",
        "if mass <= 0 or left < LEAST_MASS:",
        "if mass <= 0:",
        PEAKED,
    ),
    Fault("D forgets 1 - w0", f"{V}/residual.py", "self.d = self.z + 1 - self.w0", "self.d = self.z", LOSSLESS),
    Fault(
        "correction from p",
        f"{V}/residual.py",
        "return residual if float(residual",
        "return self.p if float(residual",
        LOSSLESS,
    ),
    Fault(
        "what is left is 1 - q",
        "decoding/policies/dyspec.py",
        "float(self._mass.sum(dtype=torch.float64))",
        "before * (1 - probability)",
        PEAKED,
    ),
    Fault(
        "what is left after the draw is recorded",
        "decoding/policies/dyspec.py",
        "tree.add(node, token, before)",
        "tree.add(node, token, self.total)",
        PEAKED,
    ),
    Fault(
        "what was not recorded is 1 - q",
        "decoding/tree.py",
        "float(rest.sum(dtype=torch.float64)) if mass",
        "1 - float((self.q_at(node) - rest).sum()) if mass",
        PEAKED,
    ),
    Fault("NSS draws from q", f"{V}/nss.py", "return rng.categorical(p)", "return rng.categorical(q)", LOSSLESS),
    Fault("NaiveTree's residual is p", f"{V}/naive.py", "    residual.reject()\n", "", LOSSLESS),
    Fault("SpecTr's rho too small", f"{V}/spectr.py", "if value <= 0:", "if value <= 0.05:", f"{LOSSLESS} {ACCEPTANCE}"),
    Fault(
        "SpecTr's rho is k",
        f"{V}/spectr.py",
        "    tolerance = 1e-13 if",
        "    return k, 1 - float((p - k * q).clamp(min=0).sum())\n    tolerance = 1e-13 if",
        ACCEPTANCE,
    ),
    Fault(
        "a tournament without theta", f"{V}/tournament.py", "return self.theta * win + 1 - self.theta", "return win", ACCEPTANCE
    ),
    Fault(
        "the tournament's law swapped",
        f"{V}/tournament.py",
        "pairs[0] * (pairs[1] + worse[1]) + pairs[1] * worse[0]",
        "pairs[0] * (pairs[1] + worse[0]) + pairs[1] * worse[1]",
        f"{ACCEPTANCE} {LOSSLESS}",
    ),
    Fault("GBV verifies with q", f"{V}/gbv.py", "row = path.q[-1] = TiltedRow(", "row = TiltedRow(", LOSSLESS),
    Fault(
        "GBV forgets the branches behind", f"{V}/gbv.py", "behind = below / upto if upto > 0 else 0.0", "behind = 0.0", LOSSLESS
    ),
    Fault("GBV's power sum", f"{V}/gbv.py", "total = total * f + power", "total = total + power", LOSSLESS),
    Fault(
        "traversal keeps too little",
        f"{V}/traversal.py",
        "residual.z / residual.d / bound",
        "residual.z / residual.d",
        LOSSLESS,
    ),
    Fault("greedy matching above temperature 0", f"{V}/greedy.py", "if float(top) < 1 - 1e-6:", "if float(top) < 0:", OTHER),
    # Rules on the device.
    Fault(
        "device: weight forgets what is left",
        f"{V}/unread/residual.py",
        "qx if masses is None else qx / masses[at, earlier].clamp(min=LEAST_MASS)",
        "qx",
        DEVICE,
    ),
    Fault("device: rejection forgets what is left", f"{V}/unread/residual.py", "d / masses[:, turn], 0.0", "d, 0.0", DEVICE),
    Fault("device: D forgets 1 - w0", f"{V}/unread/residual.py", "d = z + 1 - w0", "d = z", DEVICE),
    Fault(
        "device: correction from p",
        f"{V}/unread/residual.py",
        "residual = (w0 * p - c * q).clamp(min=0)",
        "residual = p",
        DEVICE,
    ),
    Fault(
        "device: kept by the weight alone",
        f"{V}/unread/residual.py",
        "kept = rng.bernoulli(weights.keep)",
        "kept = rng.bernoulli(weights.w0)",
        DEVICE,
    ),
    Fault(
        "device: anybody's child is followed",
        f"{V}/unread/follow.py",
        "hits = hit[level.rows] & (level.above == end)",
        "hits = hit[level.rows]",
        DEVICE,
    ),
    Fault(
        "device: tokens come again",
        "decoding/policies/fixed.py",
        "        rest = rest.scatter(-1, found[-1][:, None], 0.0)\n",
        "",
        DEVICE,
    ),
    Fault("device: GBV's f is g", f"{V}/unread/gbv.py", "f = (g - (1 - behind) * ranked).clamp_(min=0)", "f = g", SOLVERS),
    Fault(
        "device: the better always wins",
        f"{V}/unread/khisti.py",
        "torch.where(better[:, 0], 1.0, 1 - theta)",
        "better[:, 0].double()",
        SOLVERS,
    ),
    Fault("device: SpecTr's rho is k", f"{V}/unread/spectr.py", "if most > 1 else 0", "if most > 9 else 0", SOLVERS),
    # Labels.
    Fault(
        "pooling weights swapped",
        f"{V}/expected.py",
        "layout.k if action.k == 1 and action.l2 else 1",
        "1 if action.k == 1 and action.l2 else layout.k",
        f"{KEPT} {EXPECTED}",
    ),
    Fault(
        "labels: SpecInfer's c",
        f"{V}/specinfer.py",
        "self.c[rows, k - 1] + self.z[rows, k - 1]",
        "self.c[rows, k - 1] + 1",
        EXPECTED,
    ),
    Fault("labels: NSS' misses", f"{V}/nss.py", "miss = 1 - q[row]", "miss = q[row]", f"{ACCEPTANCE} {EXPECTED}"),
    Fault(
        "labels: traversal's D",
        f"{V}/traversal.py",
        "states[:, 1], states[:, 2])[index] + 1 - w0[at]",
        "states[:, 1], states[:, 2])[index]",
        EXPECTED,
    ),
    Fault(
        "labels: GBV with q", f"{V}/gbv.py", "tilted = qx * h(g, f) / h(torch.ones_like(g), behind)", "tilted = qx", EXPECTED
    ),
    Fault(
        "labels: earlier siblings accepted",
        f"{V}/bundles.py",
        "torch.where(siblings, 1 - accept[:, :, None, :], 1.0)",
        "torch.where(siblings, accept[:, :, None, :], 1.0)",
        EXPECTED,
    ),
    Fault(
        "labels: residual hits at every draw",
        f"{V}/naive.py",
        "residual.clamp(max=1) * level.fresh",
        "residual.clamp(max=1)",
        f"{ACCEPTANCE} {EXPECTED}",
    ),
    Fault("optimal acceptance", f"{V}/acceptance.py", "p_head - q_head**k", "p_head - q_head * k", ACCEPTANCE),
    # Sampling.
    Fault(
        "temperature multiplies",
        "decoding/sampling.py",
        "logits = logits / setting.temperature",
        "logits = logits * setting.temperature",
        SAMPLING,
    ),
    Fault(
        "the nucleus goes on at top-p",
        "decoding/sampling.py",
        "dtype=torch.float64) < top_p)",
        "dtype=torch.float64) <= top_p)",
        SAMPLING,
    ),
    Fault(
        "ties of the nucleus in any order",
        "decoding/sampling.py",
        "(kept[..., -1] | tied.any(-1)).any()",
        "kept[..., -1].any()",
        SAMPLING,
    ),
    Fault(
        "the nucleus is not renormalised",
        "decoding/sampling.py",
        "top = top / top.sum(-1, keepdim=True, dtype=torch.float64).to(top.dtype)\n",
        "top = top / 1\n",
        SAMPLING,
    ),
    Fault("inverse cdf by half the total", "decoding/sampling.py", "uniform * cdf[-1]", "uniform * 0.5 * cdf[-1]", SAMPLING),
    # Sessions, drafters and the loop: most of these keep the law and cost acceptance.
    Fault("rows see their siblings", "decoding/masks.py", 'b"\\1" * (row - len(above))', 'b"\\0" * (row - len(above))', LOOP),
    Fault(
        "positions by row",
        "decoding/session.py",
        "[self.length + line.count(0) - 1 for line in lines]",
        "[self.length + first + n for n in range(len(parents))]",
        LOOP,
    ),
    Fault(
        "LM drafter keeps wrong rows",
        "decoding/drafter.py",
        "self.session.commit([self._rows[node] for node in run])",
        "self.session.commit(list(range(len(run))))",
        KEPT,
    ),
    Fault(
        "LM drafter keeps rows of candidates",
        "decoding/drafter.py",
        "self._rows = {i: self._rows[node] for i, node in enumerate(nodes) if node in self._rows}",
        "pass",
        KEPT,
    ),
    Fault(
        "draft without top-p",
        "decoding/drafter.py",
        "warp(self._logits(hidden), self.setting)",
        "warp(self._logits(hidden), SamplingSetting(self.setting.temperature))",
        KEPT,
    ),
    Fault("draft setting ignored", "decoding/loop.py", "self.draft_setting or setting", "setting", KEPT),
    Fault(
        "head feeds back the root's feature",
        "decoding/tree.py",
        "torch.stack([points[self.parents[node]].hidden for node in nodes])",
        "torch.stack([points[0].hidden for node in nodes])",
        KEPT,
    ),
    Fault(
        "head commits with its own feature",
        "draft_training/head_drafter.py",
        "self._go_on(accepted.tokens, accepted.root, self.root, features=self.head.combine(features)[None])",
        "self._go_on(accepted.tokens, accepted.root, self.root, features=self.head.combine(features.roll(1, 0))[None])",
        KEPT,
    ),
    Fault(
        "p of the root for p before it",
        "decoding/loop.py",
        "setting, tree.p[end],",
        "setting, tree.p[0],",
        f"{T}/test_ahead.py",
    ),
    # Trees on the device.
    Fault(
        "device: children hang at the repeated draw",
        "decoding/device_tree.py",
        "parents = self.first.index_select(0, upload(torch.tensor(drawn_at), self.first.device))",
        "parents = upload(torch.tensor(drawn_at), self.first.device)",
        DEVICE,
    ),
    Fault(
        "device: masses of the wrong draws",
        "decoding/device_tree.py",
        "left.flatten().index_select(0, index)",
        "left.flatten()[: len(index)].flip(0)",
        DEVICE,
    ),
    Fault(
        "device: ancestors half way up",
        "decoding/masks.py",
        "depth).bit_length()",
        "depth).bit_length() // 2",
        f"{T}/test_device_tree.py",
    ),
    # Policies.
    Fault(
        "trees grow beyond the context",
        "decoding/policies/delayed.py",
        "l2 = min(action.l2, state.room - l1)",
        "l2 = min(action.l2, state.room)",
        f"{LAW} {T}/test_families.py",
    ),
    Fault(
        "DySpec's value does not fall with siblings",
        "decoding/policies/dyspec.py",
        "(negative * left, (order",
        "(negative, (order",
        KEPT,
    ),
    Fault(
        "DySpec's value does not fall with depth",
        "decoding/policies/dyspec.py",
        "(negative * probability, (order",
        "(negative, (order",
        KEPT,
    ),
    Fault("threshold's value does not fall", "decoding/policies/dyspec.py", "value *= left", "value *= 1", KEPT),
    Fault("the beam takes the first", "decoding/policies/beam.py", "heapq.nlargest(self.k, grown)]", "grown[: self.k]]", KEPT),
    Fault("SALF does not stop", "decoding/policies/salf.py", "gains[-1] < self.threshold", "gains[-1] < 0", KEPT),
    Fault(
        "DynaTree's branches swapped",
        "decoding/policies/dynatree.py",
        "return many if confidence",
        "return some if confidence",
        KEPT,
    ),
    Fault(
        "Sequoia's value",
        "decoding/policies/fixed.py",
        "rates[child] * (1 + inner) + others",
        "rates[child] + inner + others",
        POLICIES,
    ),
    Fault("positional rates", "decoding/policies/fixed.py", "reach = reach * (1 - chance)", "reach = reach * chance", POLICIES),
]


def planted(fault: Fault, folder: Path) -> str:
    """Plant the fault in the copy at `folder`, run its tests, take it out again; what came of it."""
    file = folder / fault.file
    text = file.read_text()
    if text.count(fault.old) != 1:
        return f"ERROR: the text is there {text.count(fault.old)} times"
    file.write_text(text.replace(fault.old, fault.new))
    try:
        return tested(fault.tests.split(), folder)
    finally:
        file.write_text(text)


def tested(files: list[str], folder: Path) -> str:
    """Run the tests in a process forked from this one, which has imported what takes long to import."""
    process = get_context("fork").Process(target=_pytest, args=(files, folder))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        return STATES[None]
    if process.exitcode in STATES:
        return STATES[process.exitcode]
    lines = (folder / OUTPUT).read_text().strip().splitlines()
    return f"ERROR: pytest ended with {process.exitcode}: {lines[-1] if lines else ''}"


def _pytest(files: list[str], folder: Path) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    with (folder / OUTPUT).open("w") as output, redirect_stdout(output), redirect_stderr(output):
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files])
    os._exit(int(code))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unchecked", action="store_true", help="do not look first whether the tests pass without a fault")
    parser.add_argument("--only", nargs="+", default=[], help="faults whose name or file contains one of these words")
    options = parser.parse_args()
    torch.set_num_threads(1)
    asked = [fault for fault in FAULTS if not options.only or any(word in fault.name + fault.file for word in options.only)]
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        shutil.copytree(ROOT / "docs", folder / "docs")
        files = () if options.unchecked else sorted({file for fault in asked for file in fault.tests.split()})
        for file in files:
            if (state := tested([file], folder)) != STATES[0]:
                sys.exit(f"{file}: {state} without any fault; mend that first.")
        for number, fault in enumerate(asked, start=1):
            started = time.perf_counter()
            found[fault.name] = planted(fault, folder)
            print(
                f"{number}/{len(asked)} {fault.name}: {found[fault.name]} ({time.perf_counter() - started:.0f} s)", flush=True
            )
    left = [name for name, state in found.items() if not state.startswith("noticed")]
    print(
        f"\n{len(found) - len(left)} of {len(found)} faults were noticed."
        + "".join(f"\n  {name}: {found[name]}" for name in left)
    )
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
