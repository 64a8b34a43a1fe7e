"""A small benchmark of methods of known speed, and a report with every part filled."""

from nde_talf import SamplingSetting
from nde_talf.decoding.step import PHASES
from nde_talf.evaluation.benchmark import Record, read_records, run_benchmark
from nde_talf.evaluation.plan import Role, Titles
from nde_talf.evaluation.protocol import BASELINE, CONTROL, SELECTOR, STATIC_TREE
from nde_talf.evaluation.report_data import ReportData

SETTING = SamplingSetting(0.6)
PROMPTS = [(f"p{i}", "code", [1, 2, i]) for i in range(5)]
NDE, STATIC = "Traversal + selector (NDE)", "Traversal (1, 0, 4)"


def methods(calls=None, fail_at=None, twin=100):
    """Methods of known speed: autoregressive at 100 tokens/s, its control, a static one at 200, a
    learned one at 250.
    """

    def make(name, rate, per_step):
        def generate(task):
            if calls is not None:
                if fail_at is not None and len(calls) == fail_at:
                    raise KeyboardInterrupt
                calls.append((name, tuple(task.tokens), task.seed))
            steps = 20 // per_step
            return Record(
                str(SETTING),
                name,
                task.prompt,
                task.kind,
                tokens=20,
                steps=steps,
                nodes=5 * steps,
                seconds=20 / rate,
                phases=dict.fromkeys(PHASES, 0.25 * 20 / rate),
                actions={"(1, 0, 4)": steps} if name == NDE else {},
                cpu_seconds=20 / rate,
                accepted={str(per_step - 1): steps},
            )

        return generate

    return {
        BASELINE: make(BASELINE, 100, 1),
        CONTROL: make(CONTROL, twin, 1),
        STATIC: make(STATIC, 200, 4),
        NDE: make(NDE, 250, 4),
    }


def records(folder, **options):
    path = folder / "records.jsonl"
    run_benchmark(methods(**options), PROMPTS, SETTING, path, seed=0)
    return list(read_records(path))


def everything(measured):
    """A report with every part filled."""
    setting, export = str(SETTING), "SpecInfer + selector: static (1, 0, 4)"
    roles = {SELECTOR.format("traversal"): NDE, STATIC_TREE.format("traversal"): STATIC}
    titles = Titles(
        same={"BV (1, 0, 4)": STATIC, export: "SpecInfer (1, 0, 4)"},
        learned=[NDE],
        roles={key: Role(title, title, "traversal") for key, title in roles.items()},
        exports={"SpecInfer + selector (NDE)": export},
    )
    parts = {
        "measured": "5 held-out prompts",
        "titles": {setting: titles},
        "curves": {"target": {"loss": [(0, 3.0), (10, 2.0)]}},
        "environment": {"date": "2026-01-01", "command": "python -m pipelines.run run=x"},
    }
    conditions = "batch size 1, float32, a machine"
    return ReportData.of("<run & co>", measured, conditions, **parts)
