"""Stage latency: profiling, which measures what a step costs with this pair on this machine."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nde_talf.data.text.pair import Pair, check_prompts
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.actions import L1_MAX, L2_MAX
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.models.static_shapes import MARGIN
from nde_talf.decoding.threads import threads
from nde_talf.pipelines.config.schema import TABLE, Config
from nde_talf.pipelines.runs.manifest import read_manifest
from nde_talf.pipelines.runs.run_models import load_drafted, needs, timed_on
from nde_talf.pipelines.runs.tracking import Tracker
from nde_talf.pipelines.stages.stage import Stage
from nde_talf.selector.prices import AGREE, LatencyTable
from nde_talf.selector.profiling import measure_latency


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that the stage's result depends on."""
    latency = asdict(config.latency)
    del latency["accept_noise"]  # it decides nothing of what is measured
    traces = config.traces
    return {
        **timed_on(config),
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
    check_prompts(prompts, models[0], room, min(model.max_context for model in models))
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
        overlap = read_manifest(folders["pair"])["metrics"].get("overlap")
        if overlap and config.drafter == "lm":
            metrics |= _best_path(table, overlap["1.0"], traces.verifiers[0])
    console.print(
        f"one token at {table.contexts[0]} tokens of context: target {metrics['target_ms']:.2f} ms,"
        f" draft {metrics['draft_ms']:.2f} ms ({1e3 * table.first[0]:.2f} ms as the first pass of a"
        f" step); {table.nodes[-1]} nodes: target {1e3 * table.target[0][-1]:.2f} ms; repeats"
        f" differ by {table.disagreement:.0%}; {place}"
    )
    if gain := metrics.get("path_speedup"):
        console.print(
            f"At T=1 a path of {metrics['path']} drafted tokens should decode {gain:.2f} times as"
            " fast as plain decoding, by these prices and the overlap on held-out text:"
            f" the draft {'pays' if gain > 1 else 'does not pay'}."
        )
    return metrics


def _best_path(table: LatencyTable, overlap: float, rule: str) -> dict[str, float]:
    """Return the length and speed-up of the fastest path, if `overlap` accepts each token."""
    depths, context = torch.arange(1, L1_MAX + L2_MAX + 1), torch.tensor(table.contexts[:1])
    paths = torch.stack([torch.ones_like(depths), torch.zeros_like(depths), depths], 1)
    tokens = 1 + (overlap**depths).cumsum(0)
    gains = tokens * table.plain(context) / table.steps(context, rule, paths)[0]
    return {"path": int(gains.argmax()) + 1, "path_speedup": gains.max().item()}


STAGE = Stage("latency", "latency", needs, settings, work)
