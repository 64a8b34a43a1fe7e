"""Verification and `warp`: times as ratios to one softmax over the tree's rows.

Every rule is timed twice. "from probabilities": on rows of the target that are warped already,
which is where published ratios start the clock. "from logits": as the decode loop runs it, which
warps the rows that a rule looks at.

Beside our rules, on the same rows and from logits: transformers' `_speculative_sampling`, and
vLLM's rejection sampler where vLLM is installed (run this in `.venv-vllm`).

`warp` is timed on one peaked row, one flat one, and 32 peaked rows of which one is flat.

`python -m benchmarks.verification [--parts rules warp] [--vocabulary 4096 32000]`
"""

import argparse
from collections.abc import Callable
from copy import copy
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import NamedTuple

import torch
from transformers.generation.utils import _speculative_sampling

from benchmarks.timing import interleaved, report
from nde_talf.decoding.actions import Action
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.policies.base import DecodingState
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling.rng import Rng, SamplingSetting, warp
from nde_talf.decoding.sampling.sampling_setting import RAW
from nde_talf.decoding.tree import DraftTree

PATH = Action(1, 0, 8)
TREES = (Action(4, 0, 4), Action(4, 4, 4), PATH)
BRANCHING, ON_PATHS = (
    ("nss", "naivetree", "spectr", "specinfer", "khisti", "traversal", "gbv"),
    ("naive", "bv"),
)
SETTING = SamplingSetting(1.0)
CUTS = (
    SamplingSetting(0.7),
    SamplingSetting(1.0, 0.9),
    SamplingSetting(1.0, top_k=50),
    SamplingSetting(1.0, min_p=0.05),
)
"""Settings that `warp` is timed with."""
WARPED = 32_000, 150_000
PARTS = ("rules", "warp")
LOGITS = ", from logits"


class Rows:
    """Logits of a made-up pair, peaked as a language model's: the draft's are noisy."""

    def __init__(self, vocabulary: int, seed: int):
        self.vocabulary, self.generator = vocabulary, torch.Generator().manual_seed(seed)

    def __call__(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = 2.2 * torch.randn(count, self.vocabulary, generator=self.generator)
        top = torch.randint(self.vocabulary, (count, 12), generator=self.generator)
        logits.scatter_(-1, top, 14 - 3 * torch.rand(count, 12, generator=self.generator))
        noise = torch.randn(count, self.vocabulary, generator=self.generator)
        return logits, logits + 0.6 * noise


class RowDrafter(Drafter):
    """Gives every node the next rows."""

    def __init__(self, rows: Rows):
        self.rows, self.logits = rows, []
        self.root = type("Point", (), {"q": self.next()})

    def next(self) -> torch.Tensor:
        p, q = self.rows(1)
        self.logits.append(p)
        return warp(q[0], SETTING)

    def expand(self, tree: DraftTree, nodes: list[int]) -> None:
        for node in nodes:
            tree.q[node] = self.next()


class Case(NamedTuple):
    """A drawn tree, the target's logits [N, V], the draft's rows at inner nodes [n, V]."""

    tree: DraftTree
    logits: torch.Tensor
    q: torch.Tensor
    q_logits: torch.Tensor


def drawn(rows: Rows, action: Action, rng: Rng) -> Case:
    """A delayed tree of `action`."""
    drafter = RowDrafter(rows)
    tree = Delayed(action).draft(DecodingState(0, 1, 1 << 20, RAW, None, None), drafter, rng)
    while len(drafter.logits) < len(tree):
        drafter.next()
    logits = torch.cat(drafter.logits[: len(tree)])
    tree.p = [warp(row, SETTING) for row in logits]
    q = torch.stack([tree.q_at(node) for node, children in enumerate(tree.children) if children])
    return Case(tree, logits, q, q.log())


def verification_ratios(
    vocabulary: int, action: Action, repeats: int
) -> tuple[dict[str, list[float]], str]:
    """Divide times on 24 trees by the softmax of their rows, by both clocks; add the control."""
    # The number of accepted tokens varies from call to call, as in decoding.
    rows, rng = Rows(vocabulary, 0), Rng.seeded(100)
    made = [drawn(rows, action, Rng.seeded(seed)) for seed in range(24)]
    scored = [case._replace(tree=copy(case.tree)) for case in made]

    def softmax(case: Case) -> None:
        torch.softmax(case.logits, -1, out=out[id(case)])

    def verify(name: str, case: Case) -> None:
        VERIFIERS[name](case.tree, rng)

    def verify_logits(name: str, case: Case) -> None:
        case.tree.score(case.logits, SETTING)
        VERIFIERS[name](case.tree, rng)

    def on_all(rule: Callable[[Case], object], cases: list[Case] = made) -> Callable[[], None]:
        def task() -> None:
            for case in cases:
                rule(case)

        return task

    out = {id(case): torch.empty_like(case.logits) for case in made}
    names = ON_PATHS if action == PATH else BRANCHING
    tasks = {"softmax": on_all(softmax)}
    tasks |= {name: on_all(partial(verify, name)) for name in names}
    tasks |= {name + LOGITS: on_all(partial(verify_logits, name), scored) for name in names}
    tasks |= {name + LOGITS: on_all(rule) for name, rule in peers(action).items()}
    times = interleaved(tasks, repeats)
    clocks = times.seconds, times.cpu
    ratios = {name: [own[name] / own["softmax"] for own in clocks] for name in tasks}
    return ratios, times.note(f" (V = {vocabulary:,}, {tuple(action)})")


def peers(action: Action) -> dict[str, Callable[[Case], object]]:
    """Others' verification of one tree with the target's logits [N, V], by name.

    Paths for transformers and vLLM.
    """
    found: dict[str, Callable[[Case], object]] = {}
    if action == PATH:
        found["transformers"] = _transformers
        if find_spec("vllm"):
            found["vLLM"] = _vllm()
    return found


def _transformers(case: Case) -> object:
    """It takes logits of the draft too, and makes their softmax."""
    tokens = torch.tensor([case.tree.tokens])
    return _speculative_sampling(tokens, case.q_logits[None], len(case.q), case.logits[None])


def _vllm() -> Callable[[Case], object]:
    """Make vLLM's `rejection_sample`, which does not draw the token after the last drafted one."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if current_platform.is_cpu():  # its C++ in place of Triton, as a worker has it
        current_platform.register_triton_kernel_overrides()
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import rejection_sample

    none, bonus = torch.empty(0), torch.zeros(1, 1, dtype=torch.int32)
    sampled = (torch.ones(1), False, True, None, None, {}, None, True, None)
    how = (*sampled, none, none, none, [[]], None, {}, LogitsProcessors())

    def verify(case: Case) -> object:
        count, tokens = len(case.q), torch.tensor(case.tree.tokens[1:], dtype=torch.int32)
        ends = torch.tensor([count], dtype=torch.int32)
        return rejection_sample(
            tokens, [count], count, ends, case.q, case.logits[:count], bonus, SamplingMetadata(*how)
        )

    return verify


def warp_ratios(vocabulary: int, repeats: int) -> tuple[list[list], str]:
    """Divide times of `warp` by a softmax's; add the control's line.

    A flat row is one of equally large logits with some noise.
    """
    logits = Rows(vocabulary, 2)(32)[0]
    flat = 0.1 * torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(3))
    cases = {
        "1 row, peaked": logits[:1],
        "1 row, flat": flat,
        "32 rows, 1 of them flat": torch.cat([logits[1:], flat]),
    }
    tasks = {case: partial(torch.softmax, own, -1) for case, own in cases.items()}
    tasks |= {
        f"{case}, {cut}": partial(warp, own, cut) for case, own in cases.items() for cut in CUTS
    }
    times = interleaved(tasks, repeats)
    rows = []
    for case, cut in product(cases, CUTS):
        ratios = (own[f"{case}, {cut}"] / own[case] for own in (times.seconds, times.cpu))
        rows.append([f"{vocabulary:,}", case, str(cut), *ratios])
    return rows, times.note(f" (V = {vocabulary:,})")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[4096, 32_000])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "rules" in options.parts:
        rules(options)
    if "warp" in options.parts:
        tables, notes = zip(*(warp_ratios(size, options.repeats) for size in WARPED), strict=True)
        columns = ["V", "logits", "setting", "softmaxes of them", "by CPU time"]
        report("warp", columns, [row for table in tables for row in table], notes)


def rules(options: argparse.Namespace) -> None:
    """The table of verification."""
    columns = ["tree", "method"]
    for size, after in product(options.vocabulary, (", from probabilities", LOGITS)):
        columns += [f"V = {size:,}{after}", f"V = {size:,}{after}, CPU"]
    table, notes = [], []
    for action in TREES:
        ratios: dict[int, dict[str, list[float]]] = {}
        for size in options.vocabulary:
            ratios[size], note = verification_ratios(size, action, options.repeats)
            notes.append(note)
        for name in dict.fromkeys(name.removesuffix(LOGITS) for name in ratios[size]):
            cells = [
                cell
                for size, after in product(ratios, ("", LOGITS))
                for cell in ratios[size].get(name + after, ("–", "–"))
            ]
            if name != "softmax":
                table.append([str(tuple(action)), name, *cells])
    if not find_spec("vllm"):
        notes.append("vLLM is not installed here.")
    report("verification", columns, table, notes)


if __name__ == "__main__":
    main()
