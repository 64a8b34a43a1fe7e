"""Stage latency: profiling, which measures what a step costs with this pair on this machine."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from nde_talf.data.text.pair import Pair
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.sampling import RAW
from nde_talf.decoding.static import StaticShapes
from nde_talf.pipelines.config import TABLE, Config
from nde_talf.pipelines.drafted import load_drafted, needs, timed_on
from nde_talf.pipelines.machine import threads
from nde_talf.pipelines.stage import Stage
from nde_talf.pipelines.tracking import tracked
from nde_talf.selector.latency import AGREE
from nde_talf.selector.measure import ROOM, Conditions, measure_latency


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that the stage's result depends on."""
    latency = asdict(config.latency)
    del latency["accept_noise"]  # it decides nothing of what is measured
    return {
        **timed_on(config),
        "latency": latency,
        "threads": config.evaluation.threads,
        "verifiers": config.traces.verifiers,
    }


def work(config: Config, folders: dict[str, Path]) -> dict[str, Any]:
    """Measure the latency table of the pair; return the figures for the manifest."""
    pair, traces, place = Pair(folders["pair"]), config.traces, folders["latency"] / TABLE
    models = load_drafted(config, folders)
    longest = max(len(prompt.tokens) for prompt in pair.every_prompt()) + traces.new_tokens
    contexts = [*config.latency.contexts, longest]
    count = config.evaluation.threads
    with tracked(config, "latency", folders["latency"]) as tracker, threads(count):
        text = pair.rows("held_out").flatten()[:longest].tolist()
        static = StaticShapes(max(contexts) + ROOM) if config.model.static_shapes else None
        where = ", ".join(map(str, sorted(set(contexts))))
        console.print(f"timing steps of the loop at {where} tokens of context ...", style="dim")
        settings = [SETTINGS[name] for name in traces.settings]
        conditions = Conditions(
            settings, static, RAW if traces.draft_temperature == "raw" else None
        )
        repeats = config.latency.repeats
        table = measure_latency(*models, text, contexts, traces.verifiers, repeats, conditions)
        if not config.latency.accepts_noise(not config.model.target):
            table.check_quiet(place)
        elif table.disagreement > AGREE:
            console.print(
                f"! the machine is under load: repeats disagree by {table.disagreement:.0%}. The"
                " run goes on; its choices of trees may be poor ones. Measure again when nothing"
                " else runs: stage=latency force=true"
            )
        table.save(place)
        metrics = {
            "target_ms": 1e3 * table.target[0][0],
            "draft_ms": 1e3 * table.draft[0][0],
            "disagreement": table.disagreement,
        }
        tracker.log(metrics)
        tracker.artifact(f"{config.run}-latency", "latency-table", place)
    console.print(
        f"one token at {table.contexts[0]} tokens of context: target {metrics['target_ms']:.2f} ms,"
        f" draft {metrics['draft_ms']:.2f} ms ({1e3 * table.first[0]:.2f} ms as the first pass of a"
        f" step); {table.nodes[-1]} nodes: target {1e3 * table.target[0][-1]:.2f} ms; repeats"
        f" differ by {table.disagreement:.0%}; {place}"
    )
    return metrics


STAGE = Stage("latency", "latency", needs, settings, work)
