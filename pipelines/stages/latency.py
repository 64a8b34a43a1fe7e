"""Stage latency: profiling, which measures what a step costs with this pair on this machine."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from nde_talf.data.text.pair import Pair, check_prompts
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.models.static_shapes import MARGIN
from nde_talf.decoding.threads import threads
from nde_talf.pipelines.config.schema import TABLE, Config
from nde_talf.pipelines.runs.run_models import load_drafted, needs, timed_on
from nde_talf.pipelines.runs.tracking import Tracker
from nde_talf.pipelines.stages.stage import Stage
from nde_talf.selector.prices import AGREE
from nde_talf.selector.profiling import measure_latency


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that the stage's result depends on."""
    latency = asdict(config.latency)
    del latency["accept_noise"]  # it decides nothing of what is measured
    traces = config.traces
    return {
        **timed_on(config.model, config.drafter),
        "latency": latency,
        "threads": config.evaluation.threads,
        "verifiers": traces.verifiers,
        "settings": traces.settings,
        "new_tokens": traces.new_tokens,
    }


def work(config: Config, folders: dict[str, Path], tracker: Tracker) -> dict[str, Any]:
    """Measure the latency table of the pair; return the figures for the manifest."""
    pair, traces, place = Pair(folders["pair"]), config.traces, folders["latency"] / TABLE
    models, prompts = load_drafted(config, folders), pair.every_prompt()
    room = max(traces.new_tokens, config.evaluation.new_tokens) + MARGIN
    check_prompts(prompts, room, *models)
    longest = max(len(prompt.tokens) for prompt in prompts) + traces.new_tokens
    contexts = [*config.latency.contexts, longest]
    with threads(config.evaluation.threads):
        text = pair.rows("held_out").flatten()[:longest].tolist()
        where = sorted({*contexts})
        console.print(f"timing steps of the loop at contexts of {where} tokens ...", style="dim")
        settings = [SETTINGS[name] for name in traces.settings]
        repeats, static = config.latency.repeats, config.model.static_shapes
        measured = *models, text, contexts, traces.verifiers
        table = measure_latency(*measured, repeats, settings, static)
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
    console.print(
        f"one token at {table.contexts[0]} tokens of context: target {metrics['target_ms']:.2f} ms,"
        f" draft {metrics['draft_ms']:.2f} ms ({1e3 * table.first[0]:.2f} ms as the first pass of a"
        f" step); {table.nodes[-1]} nodes: target {1e3 * table.target[0][-1]:.2f} ms; repeats"
        f" differ by {table.disagreement:.0%}; {place}"
    )
    return metrics


STAGE = Stage("latency", "latency", needs, settings, work)
