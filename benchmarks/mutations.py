"""Plant faults in the mathematics, one at a time, and print those that no test notices.

`python -m benchmarks.mutations [--only WORD ...]`: each fault is a substitution of text in a copy
of the repository; the tests that ought to notice it run there until the first fails. Some thirty
minutes on two cores, for the night; exit status 1 where one survives. A fault whose text is no
longer there is an error: the list follows the code.
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
COPIED = (
    "benchmarks",
    "configs",
    "data",
    "decoding",
    "draft_training",
    "evaluation",
    "nde_talf",
    "pipelines",
    "selector",
    "tests",
)
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


V = "decoding/rules"
T = "tests/decoding"
PEAKED, LOSSLESS, KEPT = (
    f"{T}/test_peaked.py",
    f"{T}/test_lossless.py",
    f"{T}/test_acceptance_kept.py",
)
EXPECTED, ACCEPTANCE, OTHER = (
    f"{T}/test_expected.py",
    f"{T}/test_acceptance.py",
    f"{T}/test_other_trees.py",
)
DEVICE, SOLVERS = f"{T}/test_device_laws.py", f"{T}/test_device_solvers.py"
SAMPLING, LOOP, LAW = (
    f"{T}/test_sampling.py",
    f"{T}/test_loop.py::test_tree_attention_equals_each_path_alone",
    f"{T}/test_loop_law.py",
)
POLICIES, PRINTED = f"{T}/test_policies.py", f"{T}/test_printed_rules.py"
NGRAM = f"{T}/test_ngram.py"

FAULTS = [
    # Rules, on the host and on the device: each formula is written once.
    Fault(
        "weight forgets what is left",
        f"{V}/rules.py",
        "return where(left >= LEAST_MASS, ratio(mass, scale), 0.0)",
        "return ratio(mass, state.d * qx)",
        OTHER,
    ),
    Fault(
        "rejection forgets what is left", f"{V}/rules.py", "step / left, 0.0)", "step, 0.0)", PEAKED
    ),
    Fault(
        "a child that could not be drawn counts",
        f"{V}/rules.py",
        "if isinstance(left, float) and left < LEAST_MASS:",
        "if False:",
        PEAKED,
    ),
    Fault(
        "D forgets 1 - w0",
        f"{V}/rules.py",
        "return Residual(c, z, z + 1 - w0)",
        "return Residual(c, z, z)",
        LOSSLESS,
    ),
    Fault(
        "correction from p",
        f"{V}/rules.py",
        "return node.rest(state.c) if",
        "return node.p if",
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
    Fault(
        "NSS draws from q",
        f"{V}/rules.py",
        "return self.target(node.p)",
        "return self.target(node.q)",
        LOSSLESS,
    ),
    Fault(
        "NaiveTree's residual is p",
        f"{V}/walk.py",
        "state = rule.reject(node, state, left, draw + 1 == len(offered))",
        "pass",
        LOSSLESS,
    ),
    Fault(
        "SpecTr's rho too small",
        f"{V}/spectr.py",
        "valid = value <= 0",
        "valid = value <= 0.05",
        f"{LOSSLESS} {ACCEPTANCE}",
    ),
    Fault(
        "SpecTr's rho is k",
        f"{V}/spectr.py",
        "    best = covered(one) if",
        "    if not many:\n        return k, covered(k)\n    best = covered(one) if",
        ACCEPTANCE,
    ),
    Fault(
        "a tournament without theta",
        f"{V}/tournament.py",
        "return self.theta * win + 1 - self.theta",
        "return win",
        ACCEPTANCE,
    ),
    Fault(
        "the tournament's law swapped",
        f"{V}/tournament.py",
        "a * (b + worse[1]) + b * worse[0]",
        "a * (b + worse[0]) + b * worse[1]",
        f"{ACCEPTANCE} {LOSSLESS}",
    ),
    Fault(
        "GBV verifies with q",
        f"{V}/gbv.py",
        "rows.append(row)\n        nodes.append(chosen)",
        "rows.append(q)\n        nodes.append(chosen)",
        LOSSLESS,
    ),
    Fault(
        "GBV forgets the branches below",
        f"{V}/gbv.py",
        "lower = below / upto if upto > 0 else 0.0",
        "lower = 0.0",
        LOSSLESS,
    ),
    Fault("GBV's power sum", f"{V}/gbv.py", "total * f if j > 1", "total if j > 1", LOSSLESS),
    Fault(
        "traversal keeps too little",
        f"{V}/traversal.py",
        "keep = state.z / state.d / bound",
        "keep = state.z / state.d",
        LOSSLESS,
    ),
    Fault(
        "block: kept too little",
        f"{V}/traversal.py",
        "z / (z + 1 - w0) / w0 if",
        "z / (z + 1 - w0) if",
        LOSSLESS,
    ),
    Fault(
        "block: correction from p",
        f"{V}/traversal.py",
        "left if mass > EMPTY else row",
        "row",
        LOSSLESS,
    ),
    Fault(
        "block: rows not divided",
        f"{V}/traversal.py",
        "float(row[token]) / divisor",
        "float(row[token]) / 1.01",
        LOSSLESS,
    ),
    Fault(
        "greedy matching above temperature 0",
        f"{V}/rules.py",
        "if top < 1 - 1e-6:",
        "if top < 0:",
        OTHER,
    ),
    # Drivers on the device.
    Fault(
        "device: kept by the weight alone",
        f"{V}/traversal.py",
        "torch.where(w0 < 1, z / d, w0))",
        "w0)",
        DEVICE,
    ),
    Fault(
        "device: the parent before its children",
        f"{V}/trees.py",
        "apart | (below &",
        "apart | (sees.bool() &",
        DEVICE,
    ),
    Fault(
        "device: siblings in any order",
        f"{V}/trees.py",
        "(number[:, None] > number)",
        "(number[:, None] < number)",
        DEVICE,
    ),
    Fault(
        "device: anybody's child is followed",
        f"{V}/walk.py",
        "match = (trees.parents == end[:, None]) & (",
        "match = (",
        DEVICE,
    ),
    Fault(
        "device: first acceptances do not exclude each other",
        f"{V}/walk.py",
        "accept * missed[:, :-1]",
        "accept",
        SOLVERS,
    ),
    Fault(
        "device: the residual of too few rejections",
        f"{V}/walk.py",
        "field.gather(-1, count[:, None])",
        "field.gather(-1, 0 * count[:, None])",
        SOLVERS,
    ),
    Fault("device: others' draws count", f"{V}/walk.py", " * (draw < count))", ")", SOLVERS),
    Fault(
        "device: tokens come again",
        "decoding/policies/fixed.py",
        "        rest = rest.scatter(-1, found[-1][:, None], 0.0)\n",
        "",
        DEVICE,
    ),
    Fault(
        "device: GBV's f is g",
        f"{V}/gbv.py",
        "f = (g - (1 - lower) * ranked).clamp_(min=0)",
        "f = g",
        SOLVERS,
    ),
    Fault(
        "device: the better always wins",
        f"{V}/tournament.py",
        "torch.where(better[:, 0], 1.0, 1 - theta)",
        "better[:, 0].double()",
        SOLVERS,
    ),
    Fault(
        "device: SpecTr's rho is the last one tried",
        f"{V}/spectr.py",
        "where(valid, x, where(x < high, high, k))",
        "x",
        SOLVERS,
    ),
    # Labels.
    Fault(
        "pooling weights swapped",
        f"{V}/gains.py",
        "layout.k if action.k == 1 and action.l2 else 1",
        "1 if action.k == 1 and action.l2 else layout.k",
        f"{KEPT} {EXPECTED}",
    ),
    Fault(
        "labels: states of one turn too few",
        f"{V}/rules.py",
        "(field[rows, turn - 1] for field",
        "(field[rows, 0] for field",
        EXPECTED,
    ),
    Fault(
        "labels: NSS' misses",
        f"{V}/reduce.py",
        "miss = 1 - q[row]",
        "miss = q[row]",
        f"{ACCEPTANCE} {EXPECTED}",
    ),
    Fault(
        "labels: traversal's D",
        f"{V}/traversal.py",
        "states[:, 1], states[:, 2])[index] + 1 - w0[at]",
        "states[:, 1], states[:, 2])[index]",
        EXPECTED,
    ),
    Fault(
        "labels: GBV with q",
        f"{V}/gbv.py",
        "tilt(qx, g, f, lower, draws, member.shape[1])",
        "qx",
        EXPECTED,
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
        f"{V}/branching.py",
        "landing(level.px, level.qx, state) * level.fresh",
        "landing(level.px, level.qx, state) * level.member",
        f"{ACCEPTANCE} {EXPECTED}",
    ),
    Fault(
        "optimal acceptance",
        f"{V}/acceptance.py",
        "p_head - q_head**k",
        "p_head - q_head * k",
        ACCEPTANCE,
    ),
    # Sampling.
    Fault(
        "temperature multiplies",
        "decoding/sampling.py",
        "torch.div(logits, setting.temperature, out=out)",
        "torch.mul(logits, setting.temperature, out=out)",
        SAMPLING,
    ),
    Fault(
        "the nucleus goes on at top-p",
        "decoding/sampling.py",
        "int(masses.searchsorted(limit)) + 1",
        'int(masses.searchsorted(limit, "right")) + 1',
        SAMPLING,
    ),
    Fault(
        "the nucleus goes on at top-p, on a device",
        "decoding/sampling.py",
        "masses[..., :-1] < limit",
        "masses[..., :-1] <= limit",
        SAMPLING,
    ),
    Fault(
        "ties of the nucleus in any order",
        "decoding/sampling.py",
        "into[np.flatnonzero(row == lowest)[-surplus:]] = 0",
        "into[np.flatnonzero(row == lowest)[:surplus]] = 0",
        SAMPLING,
    ),
    Fault(
        "top-p of the full row after top-k",
        "decoding/sampling.py",
        "top_p * total if top_k",
        "top_p if top_k",
        SAMPLING,
    ),
    Fault(
        "the nucleus is not renormalised",
        "decoding/sampling.py",
        "into /= row.dtype.type(mass)",
        "into /= 1",
        SAMPLING,
    ),
    Fault(
        "a block searched from the start",
        "decoding/sampling.py",
        "self._sums[found - 1] if found else 0.0",
        "0.0",
        SAMPLING,
    ),
    Fault(
        "inverse cdf by half the total",
        "decoding/sampling.py",
        "uniform * totals[row]",
        "uniform * 0.5 * totals[row]",
        SAMPLING,
    ),
    # Sessions, drafters and the loop: most of these keep the law and cost acceptance.
    Fault(
        "rows see their siblings",
        "decoding/masks.py",
        "bits[row, :row] = self._blocked",
        "bits[row, :row] = 0",
        LOOP,
    ),
    Fault(
        "positions by row",
        "decoding/session.py",
        "[length + depth for depth in tree.depths[first:]]",
        "[length + first + n for n in range(count)]",
        LOOP,
    ),
    Fault(
        "LM drafter keeps wrong rows",
        "decoding/drafter.py",
        "self.session.commit(rows)",
        "self.session.commit(list(range(len(rows))))",
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
        "self.processed(texts, logits), self.setting)",
        "self.processed(texts, logits), SamplingSetting(self.setting.temperature))",
        KEPT,
    ),
    *(
        Fault(f"drafts for an engine: {name}", file, old, new, "tests/nde_talf/test_proposals.py")
        for name, file, old, new in (
            (
                "a cache of another text",
                "nde_talf/proposals.py",
                "np.array_equal(self.text, text[:read])",
                "True",
            ),
            (
                "one cache for two rows",
                "nde_talf/proposals.py",
                "                free[at] = None\n",
                "",
            ),
            (
                "the target's own token counts as accepted",
                "nde_talf/proposals.py",
                "in tokens[:-1]:",
                "in tokens:",
            ),
            ("features of the target", "selector/network.py", "self.scale[OF_TARGET] = 0", "pass"),
            (
                "drafts of a batch cost one",
                "selector/chains.py",
                "[drafts * one for one in",
                "[one for one in",
            ),
        )
    ),
    *(
        Fault(f"processed logits: {name}", file, old, new, "tests/nde_talf/test_in_transformers.py")
        for name, file, old, new in (
            (
                "of every node after the root's text",
                "decoding/processing.py",
                "for each in tree.path(node))]",
                "for each in [])]",
            ),
            (
                "after forbidden tokens",
                "decoding/processing.py",
                "row is not None and float(row[text[-1]]) > -torch.inf",
                "True",
            ),
            (
                "beyond the end of the text",
                "nde_talf/prepared.py",
                "self.ends.isdisjoint(text[self.start :])",
                "True",
            ),
        )
    ),
    Fault(
        "draft setting ignored",
        "decoding/loop.py",
        "drafted_under(self.draft_setting, setting, self.kind)",
        "setting",
        KEPT,
    ),
    Fault(
        "head feeds back the root's feature",
        "decoding/tree.py",
        "[1 + known.get(self.parents[node], -1) for node in nodes]",
        "[0 for _ in nodes]",
        KEPT,
    ),
    Fault(
        "head commits with its own feature",
        "draft_training/head_drafter.py",
        "self._go_on(accepted.tokens, accepted.root, self.root,"
        " features=self.head.combine(features)[None])",
        "self._go_on(accepted.tokens, accepted.root, self.root,"
        " features=self.head.combine(features.roll(1, 0))[None])",
        KEPT,
    ),
    *(
        Fault(f"draft at temperature 0: {name}", file, old, new, f"{T}/test_draft_temperature.py")
        for name, file, old, new in (
            (
                "picked trees see a point",
                "decoding/setting.py",
                'if wanted == AUTO and trees == "top_k":',
                "if False:",
            ),
            (
                "drawn trees see a point",
                "decoding/setting.py",
                "return DRAWN if wanted == AUTO",
                "return DRAWN if False",
            ),
            (
                "features see a point",
                "decoding/setting.py",
                "return RAW if setting.temperature == 0 else",
                "return",
            ),
            (
                "features of the root for the token before it",
                "decoding/drafter.py",
                "return rows[0], rows[1]",
                "return rows[1], rows[1]",
            ),
            (
                "p of the root on the device",
                "decoding/device_tree.py",
                "self.logits.index_select(0, end)",
                "self.logits[:1]",
            ),
        )
    ),
    Fault(
        "p of the root for p before it",
        "decoding/tree.py",
        "end, p = self.path[-1] if self.path else 0, self.tree.p",
        "end, p = 0, self.tree.p",
        f"{T}/test_draft_temperature.py",
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
    # Windows, read-outs, padded rows.
    *(
        Fault(name, file, old, new, f"{T}/test_families.py {T}/test_padded_rows.py")
        for name, file, old, new in (
            (
                "windows one token too wide",
                "decoding/windows.py",
                "rows - columns >= self.size",
                "rows - columns > self.size",
            ),
            (
                "chunks that slide",
                "decoding/windows.py",
                "rows // self.size != columns // self.size",
                "rows - columns >= self.size",
            ),
            (
                "windows count slots",
                "decoding/cache.py",
                "self.positions[:, moved]]",
                "self.positions[:, length + inside :]]",
            ),
            (
                "static: positions stay",
                "decoding/cache.py",
                "self.positions.index_copy_(1, to, ",
                "(to, ",
            ),
            ("soft cap left out", "decoding/readout.py", "if self.cap is None:", "if True:"),
            (
                "missing rows are drafted",
                "decoding/model.py",
                "logits[:, self._rows :] = -torch.inf",
                "logits[:, self._rows :] = 0",
            ),
        )
    ),
    # Native forward passes.
    *(
        Fault(name, f"decoding/forward/{file}", old, new, f"{T}/test_forward.py")
        for name, file, old, new in (
            (
                "the edge of a window is open",
                "attention.py",
                "tree + width - window.size)",
                "tree + 1 - window.size)",
            ),
            (
                "merged by the other weight",
                "attention.py",
                "torch.sigmoid(of_text - of_tree)",
                "torch.sigmoid(of_tree - of_text)",
            ),
            (
                "turned the other way",
                "rotary.py",
                "-sin[..., :half], sin[..., half:]",
                "sin[..., :half], -sin[..., half:]",
            ),
            (
                "queries share the wrong keys",
                "attention.py",
                "mask.repeat(1, 1, groups, 1)",
                "mask.repeat_interleave(groups, 2)",
            ),
            (
                "copied weights stay old",
                "fused.py",
                "torch._foreach_copy_(self._copies, fresh)",
                "pass",
            ),
            ("replaced weights stay old", "fused.py", "self._addresses() != self._where", "False"),
            (
                "soft cap of scores left out",
                "attention.py",
                ".mul_(scale / cap).tanh_().mul_(cap)",
                ".mul_(scale)",
            ),
            ("features are overwritten", "layer.py", "states = states + (", "states += ("),
        )
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
    # Drafting from the text.
    Fault(
        "n-gram goes on after the text", "decoding/ngram.py", " and at + 1 < len(text)]", "]", NGRAM
    ),
    Fault(
        "n-gram goes on after another token",
        "decoding/ngram.py",
        "if text[at] == token and",
        "if",
        NGRAM,
    ),
    Fault(
        "n-gram tree above its budget",
        "decoding/policies/ngram.py",
        "while heap and len(tree) <= config.nodes",
        "while heap",
        NGRAM,
    ),
    Fault(
        "n-gram trees by the draft's rule",
        "decoding/mixed.py",
        'VERIFIERS["nss"].rule, frozenset',
        "rule.rule, frozenset",
        NGRAM,
    ),
    Fault(
        "draft beside n-grams reads a part twice",
        "decoding/mixed.py",
        "tokens[len(path) : -1]",
        "tokens[:-1]",
        NGRAM,
    ),
    Fault(
        "n-grams draft at any rate",
        "decoding/mixed.py",
        "ngram.rate(ngram.size) >= ngram.config.min_rate",
        "True",
        NGRAM,
    ),
    Fault(
        "threshold's value does not fall",
        "decoding/policies/dyspec.py",
        "value *= left",
        "value *= 1",
        KEPT,
    ),
    Fault(
        "the beam takes the first",
        "decoding/policies/beam.py",
        "heapq.nlargest(self.k, grown)]",
        "grown[: self.k]]",
        KEPT,
    ),
    Fault(
        "SALF does not stop",
        "decoding/policies/salf.py",
        "gains[-1] < self.threshold",
        "gains[-1] < 0",
        KEPT,
    ),
    Fault(
        "DynaTree's branches swapped",
        "decoding/policies/dynatree.py",
        "return many if confidence",
        "return some if confidence",
        KEPT,
    ),
    Fault(
        "SALF fills its tree",
        "decoding/policies/salf.py",
        "if self.fill else found",
        "if True else found",
        KEPT,
    ),
    Fault(
        "DynaTree branches at the root",
        "decoding/policies/dynatree.py",
        "if node or config.branch_at_root else 1",
        "if True else 1",
        KEPT,
    ),
    Fault(
        "DynaTree's depth from the root",
        "decoding/policies/dynatree.py",
        "depth <= history.depth or",
        "depth < history.depth or",
        KEPT,
    ),
    Fault(
        "DynaTree learns from the depth",
        "decoding/policies/dynatree.py",
        '== "tokens" else',
        '== "depth" else',
        POLICIES,
    ),
    Fault(
        "DynaTree's tau_l stands still",
        "decoding/policies/dynatree.py",
        "= self.confident_low + shift, self",
        "= self.confident_low, self",
        POLICIES,
    ),
    Fault(
        "exact ranks are coarse",
        f"{V}/ranking.py",
        "(bits, 1) if exact else",
        "(bits, 1) if not exact else",
        PRINTED,
    ),
    Fault(
        "the programme of khisti_lp",
        f"{V}/tournament.py",
        "demands = [max(target - own, 0.0)",
        "demands = [max(own, 0.0)",
        PRINTED,
    ),
    Fault(
        "Sequoia's value",
        "decoding/policies/fixed.py",
        "np.add(rate * (1 + below[:-1])",
        "np.add(rate + below[:-1]",
        POLICIES,
    ),
    Fault(
        "positional rates",
        "decoding/policies/fixed.py",
        "reach = reach * (1 - chance)",
        "reach = reach * chance",
        POLICIES,
    ),
    Fault(
        "a draft's logits stay on its device",
        "decoding/remote.py",
        "super().logits(hidden.to(self._own)).to(self.device)",
        "super().logits(hidden.to(self._own))",
        f"{T}/test_second_device.py",
    ),
    # Other processes follow the passes of a sharded model.
    *(
        Fault(f"parts: {name}", file, old, new, f"{T}/test_tensor_parallel.py")
        for name, file, old, new in (
            (
                "followers commit no rows",
                "decoding/follower.py",
                ".commit(length, slots)",
                ".commit(length)",
            ),
            (
                "followers never go back",
                "decoding/follower.py",
                "cache.crop(value.length - cache.get_seq_length())",
                "pass",
            ),
            (
                "copies are not sent",
                "decoding/cache.py",
                'self.moved("copies", copied, count, length)',
                "pass",
            ),
            (
                "windows are not sent",
                "decoding/follower.py",
                "setattr(body.config, key, size)",
                "pass",
            ),
        )
    ),
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
    """Run the tests in a process forked from this one, which has imported what takes long to
    import.
    """
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
    parser.add_argument(
        "--unchecked",
        action="store_true",
        help="do not look first whether the tests pass without a fault",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="faults whose name or file contains one of these words",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    asked = [
        fault
        for fault in FAULTS
        if not options.only or any(word in fault.name + fault.file for word in options.only)
    ]
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            shutil.copytree(
                ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "pyproject.toml", folder)
        shutil.copytree(ROOT / "docs", folder / "docs")
        files = (
            ()
            if options.unchecked
            else sorted({file for fault in asked for file in fault.tests.split()})
        )
        for file in files:
            if (state := tested([file], folder)) != STATES[0]:
                sys.exit(f"{file}: {state} without any fault; mend that first.")
        for number, fault in enumerate(asked, start=1):
            started = time.perf_counter()
            found[fault.name] = planted(fault, folder)
            print(
                f"{number}/{len(asked)} {fault.name}: {found[fault.name]}"
                f" ({time.perf_counter() - started:.0f} s)",
                flush=True,
            )
    left = [name for name, state in found.items() if not state.startswith("noticed")]
    print(
        f"\n{len(found) - len(left)} of {len(found)} faults were noticed."
        + "".join(f"\n  {name}: {found[name]}" for name in left)
    )
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
