"""Probe a pair on one's own prompts, for `nde recommend model.target=... data=...`."""

import time
from dataclasses import asdict

import torch
from rich.box import SIMPLE
from rich.filesize import decimal
from rich.table import Table

from nde_talf.data.text.pair import load_models
from nde_talf.data.text.prompts import encode_prompts
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.common.bootstrap import times
from nde_talf.decoding.common.progress import console, duration, working
from nde_talf.decoding.drafters.lm import LMDrafter
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.static_shapes import MARGIN, StaticShapes
from nde_talf.decoding.threads import threads
from nde_talf.evaluation.probe import PROMPTS, TEXT, decode, methods
from nde_talf.evaluation.protocol import BASELINE, CONTROL, NOT_TRUSTED, trusted
from nde_talf.evaluation.table import Row, control_of, tabulate
from nde_talf.pipelines.commands.dry_run import most_memory, pair_without_weights, size_of
from nde_talf.pipelines.commands.estimate import measured, minutes, works
from nde_talf.pipelines.commands.hub import reach_hub
from nde_talf.pipelines.commands.recommend import RecommendConfig
from nde_talf.pipelines.config.checks import check_config, names_on_hub
from nde_talf.pipelines.config.command_line import composed
from nde_talf.pipelines.config.own_data import fit, in_full
from nde_talf.pipelines.config.schema import Config
from nde_talf.pipelines.stages.pair_text import set_prompts, shared_context
from nde_talf.pipelines.stages.shared_tokenizer import shared_tokenizer

SECONDS = 300.0
PUBLISHED = {
    "selector": ("1.08 to 1.17× its best static tree", ("latency", "traces", "selector")),
    "head": ("1.50 to 1.64×, one text at a time", ("draft",)),
}
"""Published ranges (benchmarks/results: selector, claims, engines, decode), and the stages of each.
"""


def probe(asked: RecommendConfig) -> None:
    """Decode some prompts, and print what to expect, within five minutes."""
    started = time.monotonic()
    config, faults = fit(_run_of(asked))
    reach_hub(names_on_hub(config))
    check_config(config, faults)
    setting = SETTINGS[asked.setting or "t0.6"]
    with threads(config.evaluation.threads), torch.inference_mode():
        target, *drafts = load_models(config.model.given.values(), *config.model.placed)
        tokenizer = shared_tokenizer(config.model)
        context = shared_context(config.model, (model.max_context for model in (target, *drafts)))
        prompts = set_prompts(config, tokenizer, context)[:PROMPTS]
        texts = [one.tokens for one in encode_prompts(prompts, tokenizer, special=True)]
        shapes = StaticShapes(max(map(len, texts)) + TEXT + MARGIN)
        static = shapes if config.model.static_shapes else None
        drafter = LMDrafter(drafts[0], static) if drafts else None
        decoders = methods(target, drafter, setting, static)
        with working(f"decoding {len(texts)} prompts at {setting}, each in several ways"):
            left = 0.9 * (SECONDS - time.monotonic() + started)
            records = decode(decoders, texts, setting, left)
        (rows,) = tabulate(records).values()
        if (count := len({record.prompt for record in records})) < len(texts):
            console.print(f"! there was time for {count} of {len(texts)} prompts on this machine")
        console.print(_table(config, rows, target))
        if trusted(control := control_of(rows)) is False:
            console.print(f"! {NOT_TRUSTED}: plain decoding over itself reads {times(control)}")
    console.print(
        f"In {duration(time.monotonic() - started)}, at {setting}. Ranges of other pairs are"
        " published runs on small models and CPUs; on an H100 a 98M target lost to plain decoding"
        " with CUDA graphs."
    )


def _run_of(asked: RecommendConfig) -> Config:
    """Compose the run that would train for this pair."""
    model = {key: value for key, value in asdict(asked.model).items() if value is not None}
    given = [f"model.{key}={value}" for key, value in model.items()]
    return composed(Config, *in_full([f"data={asked.prompts}"]), *given)


def _table(config: Config, rows: list[Row], target: CausalModel) -> Table:
    """Tabulate what was decoded, and what would have to be trained."""
    table = Table("", "over plain", "training", "memory", title="what to expect", box=SIMPLE)
    models = pair_without_weights(config.model)
    held = sum(model.num_parameters() * model.dtype.itemsize for model in models.values())
    for row in rows:
        if row.method not in (BASELINE, CONTROL):
            table.add_row(f"{row.method}, decoded here", times(row.speedup), "none", decimal(held))
    prices = measured(target, config.evaluation.threads)
    work, most = works(config, size_of(models)), decimal(most_memory(config, models))
    needs = () if config.model.has_draft else ("draft",)  # then a selector chooses a head's trees
    for name, (gain, stages) in PUBLISHED.items():
        named = {"pair", *stages, *needs}
        spent = duration(60 * sum(minutes(work[stage], prices) for stage in named))
        table.add_row(f"{name} (published, other pairs)", gain, f"about {spent}", most)
    return table
