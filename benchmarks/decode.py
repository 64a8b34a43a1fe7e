"""The loop against its limit: what is spent outside the models, and tokens/s over autoregressive decoding and over
transformers' assisted generation with its own dynamic schedule. All methods interleaved prompt by prompt, on a run's pair.

`python -m benchmarks.decode [--run checkpoints/default] [--static]`, after `python -m pipelines.run`. With the run's head,
where there is one, beside the LM draft. --static runs our methods twice, as they are and with static shapes (on CUDA: graphs).
"""

import argparse
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from pipelines.quiet import quiet  # isort: skip (before torch)

import torch

from benchmarks.forwards import ForwardClock, watched
from benchmarks.policies import TUNED
from benchmarks.rows import doubts, rate
from benchmarks.timing import report
from data.text.pair import Pair
from decoding.actions import Action
from decoding.common.bootstrap import shown
from decoding.drafter import LMDrafter
from decoding.loop import SpeculativeDecoder
from decoding.model import CausalModel
from decoding.policies.delayed import Autoregressive, Delayed
from decoding.policies.dynatree import DynaTree, DynaTreeConfig
from decoding.sampling import SamplingSetting
from decoding.static import MARGIN, StaticShapes
from decoding.verification import VERIFIERS
from draft_training.export import load_head
from draft_training.head_drafter import EagleDrafter
from evaluation.assisted import ASSISTED, transformers_assisted
from evaluation.benchmark import Generate, Record, read_records, run_benchmark
from evaluation.methods import Speculative
from evaluation.protocol import BASELINE, CONTROL
from evaluation.speed import CPU, speed_ratio

COLUMNS = [
    "setting",
    "method",
    "tokens a pass",
    "nodes",
    "tokens/s",
    "over autoregressive",
    "in CPU time",
    "over assisted",
    "ms a step",
    "ms outside the models",
    "fraction outside",
]


def methods(
    run: Path,
    target: CausalModel,
    draft: CausalModel,
    setting: SamplingSetting,
    trees: list[Action],
    new_tokens: int,
    fixed: StaticShapes | None,
) -> dict[str, Generate]:
    """Autoregressive, every tree with the LM draft and with the head under SpecInfer, and transformers' own. Greedy decoding,
    where all i.i.d. branches are one, has a small DynaTree besides. fixed: for all of ours but DynaTree once more."""
    clock = ForwardClock()
    made = {ASSISTED: transformers_assisted(ASSISTED, target, draft, setting, new_tokens)}
    head = load_head(run / "draft" / "export", target) if (run / "draft" / "export").is_dir() else None
    if fixed:  # before the clock, which no graph can hold, is around the models
        drafters = {"LM": LMDrafter(draft, fixed)} | ({"head": EagleDrafter(head, fixed)} if head else {})
        policies = {f"{name} {tuple(tree)}": (own, Delayed(tree)) for name, own in drafters.items() for tree in trees}
        for name, (drafter, policy) in {BASELINE: (None, Autoregressive()), **policies}.items():
            decoder = SpeculativeDecoder(target, drafter, policy, VERIFIERS["specinfer"], static=fixed)
            made[f"{name}, static"] = Speculative(f"{name}, static", decoder, setting, new_tokens)
    for model, is_draft in ((target, False), (draft, True)):
        clock.watch(model, is_draft)

    def add(name: str, drafter, policy, rule=VERIFIERS["specinfer"], drawn=None) -> None:
        made[name] = watched(name, SpeculativeDecoder(target, drafter, policy, rule, drawn), setting, new_tokens, clock)

    def add_all(name: str, drafter) -> None:
        for tree in trees:
            add(f"{name} {tuple(tree)}", drafter, Delayed(tree))
        if not setting.temperature:
            policy = DynaTree(DynaTreeConfig(nodes=12, **TUNED))
            add(f"{name} DynaTree, 12 nodes", drafter, policy, VERIFIERS["greedy"], SamplingSetting(0.5))

    for name in (BASELINE, CONTROL):
        add(name, None, Autoregressive())
    add_all("LM", LMDrafter(draft))
    if head:
        clock.watch(head, draft=True)
        add_all("head", EagleDrafter(head))
    return made


def rows(records: list[Record]) -> list[list]:
    """One row a setting and method. Ratios: of total tokens/s, paired by prompt; what is outside the models: medians over
    prompts."""
    table = []
    for setting in dict.fromkeys(record.setting for record in records):
        by_method: dict[str, list[Record]] = {}
        for record in records:
            if record.setting == setting:
                by_method.setdefault(record.method, []).append(record)
        for method, own in sorted(
            by_method.items(), key=lambda item: (item[0] != BASELINE, item[0] != CONTROL, item[0] == ASSISTED)
        ):
            steps, seconds = sum(r.steps for r in own), sum(r.seconds for r in own)
            known = any(r.forward_seconds for r in own)  # not of transformers' own, nor inside a graph
            outside = [(r.seconds - r.forward_seconds) / r.seconds for r in own]
            each = [(r.seconds - r.forward_seconds) / r.steps for r in own]
            table.append(
                [
                    setting,
                    method,
                    shown(rate(own, "tokens", "steps")),
                    f"{sum(r.nodes for r in own) / steps:.1f}" if method != ASSISTED else "–",
                    f"{sum(r.tokens for r in own) / seconds:.0f}",
                    shown(speed_ratio(own, by_method[BASELINE])),
                    shown(speed_ratio(own, by_method[BASELINE], CPU)),
                    shown(speed_ratio(own, by_method[ASSISTED])),
                    f"{1e3 * seconds / steps:.1f}",
                    f"{1e3 * median(each):.2f}" if known else "–",
                    f"{100 * median(outside):.1f} %" if known else "–",
                ]
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.0])
    parser.add_argument("--trees", nargs="+", default=["1,0,4", "2,0,3", "2,2,3"], help="K,L1,L2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--name", default="decode", help="of the files in benchmarks/results")
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    trees = [Action(*map(int, tree.split(","))) for tree in options.trees]
    pair = Pair(options.run / "pair")
    prompts = [(p.id, p.kind, p.tokens) for p in pair.prompts("test", options.prompts, "--prompts")]
    with TemporaryDirectory() as folder:
        records = Path(folder) / "records.jsonl"
        for temperature in options.temperatures:
            target, draft = pair.models(options.device, options.dtype)  # afresh: the clock wraps them
            setting = SamplingSetting(temperature)
            longest = max(len(tokens) for _, _, tokens in prompts)
            fixed = StaticShapes(longest + options.new_tokens + MARGIN) if options.static else None
            made = methods(options.run, target, draft, setting, trees, options.new_tokens, fixed)
            run_benchmark(made, prompts, setting, records, seed=0)
        read = list(read_records(records))
        found = rows(read)
    command = f"python -m benchmarks.decode --run checkpoints/{options.run.name}"
    given = {"prompts": 12, "new_tokens": 64}
    for name, default in given.items():
        if getattr(options, name) != default:
            command += f" --{name.replace('_', '-')} {getattr(options, name)}"
    if options.static:
        command += " --static"
    report(options.name, command, COLUMNS, found, doubts(read))


if __name__ == "__main__":
    main()
