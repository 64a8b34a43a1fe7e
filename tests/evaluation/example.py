"""A small benchmark of methods of known speed, and a report with every part filled."""

from pathlib import Path

from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.decoding.stats import PHASES
from nde_talf.evaluation.benchmark import Record, read_records, run_benchmark
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.report import ReportData
from nde_talf.evaluation.table import by_setting, histogram, latencies, tabulate, vllm_counters
from nde_talf.evaluation.verdict import verdicts

SETTING = SamplingSetting(0.6)
PROMPTS = [(f"p{i}", "code", [1, 2, i]) for i in range(5)]
NDE, STATIC = "Traversal + selector (NDE)", "Traversal (1, 0, 4)"


def methods(calls: list | None = None, fail_at: int | None = None, twin: float = 100) -> dict:
    """Methods of known speed: autoregressive at 100 tokens/s, its control, a static one at 200, a
    learned one at 250.
    """

    def make(name: str, rate: float, per_step: int):
        def generate(prompt: list[int], seed: int, kind: str) -> Record:
            if calls is not None:
                if fail_at is not None and len(calls) == fail_at:
                    raise KeyboardInterrupt
                calls.append((name, tuple(prompt), seed))
            phases, steps = dict.fromkeys(PHASES, 0.25 * 20 / rate), 20 // per_step
            return Record(
                str(SETTING),
                name,
                "",
                "",
                20,
                steps,
                5 * steps,
                20 / rate,
                phases,
                {"(1, 0, 4)": steps} if name == NDE else {},
                cpu_seconds=20 / rate,
                first_seconds=0.01,
                accepted={str(per_step - 1): steps},
            )

        return generate

    return {
        BASELINE: make(BASELINE, 100, 1),
        CONTROL: make(CONTROL, twin, 1),
        STATIC: make(STATIC, 200, 4),
        NDE: make(NDE, 250, 4),
    }


def records(folder: Path, **options) -> list[Record]:
    path = folder / "records.jsonl"
    run_benchmark(methods(**options), PROMPTS, SETTING, path, seed=0)
    return list(read_records(path))


def everything(found: list[Record], **more) -> ReportData:
    """A report with every part filled."""
    tables, by_method = tabulate(found), by_setting(found)
    entropy = [{"entropy": 0.1 * i, "depth": 4.0, "trunk": 1.0, "nodes": 5.0} for i in range(4)]
    judged = {
        "learned": True,
        "by_entropy": entropy,
        "selector": [1.02, 1.0, 1.04],
        "split_half": [0.9, 0, 0],
    }
    judged |= {"same_half": [1.2, 0, 0], "static": [1, 0, 5]}
    kinds = {"code": ([2, 0, 4], 3.25, 1.07, 1.03), "tables": (None, 7.5, 1.0, 1.21)}
    judged["by_domain"] = {
        kind: {"roots": 40, "tree": tree, "tokens": tokens, "own_tree": own, "selector": chosen}
        for kind, (tree, tokens, own, chosen) in kinds.items()
    }
    setting = str(SETTING)
    parts = {
        "verdicts": verdicts(tables, "batch size 1, float32, a machine", found),
        "measured": "5 held-out prompts",
        "learned": {setting: [NDE]},
        "same": {
            setting: {
                "BV (1, 0, 4)": STATIC,
                "SpecInfer + selector: static (1, 0, 4)": "SpecInfer (1, 0, 4)",
            }
        },
        "exports": {
            setting: {"SpecInfer + selector (NDE)": "SpecInfer + selector: static (1, 0, 4)"}
        },
        "versus": {NDE: {"static": {"T=1": [1.051, 1.01, 1.09]}}},
        "histograms": {
            s: {m: histogram(own) for m, own in ms.items()} for s, ms in by_method.items()
        },
        "spec_decode": {
            s: {m: vllm_counters(own) for m, own in ms.items()} for s, ms in by_method.items()
        },
        "latencies": {
            s: {m: latencies(own) for m, own in ms.items()} for s, ms in by_method.items()
        },
        "chosen": {setting: {NDE: {"(1, 0, 4)": 9, "(4, 0, 2)": 3}}},
        "static": {setting: {NDE: "(1, 0, 4)"}},
        "sample": {
            "method": NDE,
            "setting": setting,
            "prompt": "p0",
            "kind": "code",
            "tokens": 3,
            "accepted": 2,
            "pieces": [["def <b>", "prompt"], ["main():", "drafted"], ["\n", "corrected"]],
        },
        "pair": {"overlap": {"1.0": 0.81}},
        "offline": {
            "traversal": {
                "measured": {"settings": {"temperature 0.6, top-p 1": judged}, "all": judged}
            }
        },
        "head": {"agreement": [0.5, 0.4], "agreement_by_rank": [[0.1, 0.2]]},
        "curves": {"target": {"loss": [(0, 3.0), (10, 2.0)]}},
        "acceptance": {setting: {"nss": [0.5, 0.4], "optimal (α*)": [0.8, 0.7]}},
        "stages": {"pair": 12.0},
        "environment": {"date": "2026-01-01", "command": "python -m pipelines.run run=x"},
    }
    return ReportData(run="<run & co>", tables=tables, **(parts | more))
