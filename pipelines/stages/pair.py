"""Stage pair: a target and a draft, and the held-out prompts and text that later stages use."""

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from transformers import AutoModelForCausalLM

from nde_talf.data.text.corpus import source_digest
from nde_talf.data.text.pair import Pair, check_prompts, check_rows, load_models, spread
from nde_talf.data.text.settings import ANSWERS
from nde_talf.decoding.common.checksums import check_checksums, write_export
from nde_talf.decoding.common.progress import console, working
from nde_talf.decoding.device import free_memory
from nde_talf.decoding.models.static_shapes import MARGIN
from nde_talf.draft_training.training.lm_training import (
    LanguageModel,
    build_llama,
    fit,
    held_out_report,
)
from nde_talf.pipelines.config.checks import sources
from nde_talf.pipelines.config.own_files import framed, shortened
from nde_talf.pipelines.config.schema import PASSES, Config, ModelConfig
from nde_talf.pipelines.runs.tracking import Tracker
from nde_talf.pipelines.stages.answers import Sampling
from nde_talf.pipelines.stages.pair_text import (
    PairText,
    answer_prompts,
    answering_engine,
    read_text,
    shared_context,
)
from nde_talf.pipelines.stages.shared_tokenizer import shared_tokenizer
from nde_talf.pipelines.stages.stage import Stage

HELD_OUT_ROWS = 32  # rows of held-out text that the figures are computed on


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that the stage's result depends on."""
    model = asdict(config.model)
    for name in (*PASSES, "threads"):
        del model[name]
    for name in ("target_lm", "draft_lm"):
        del model[name]["checkpoint_seconds"]
    files = {
        source: digest
        for _, source, _ in sources(config.data)
        if source and (digest := source_digest(source))
    }
    return {"model": model, "data": asdict(config.data), "files": files, "seed": config.seed}


def work(config: Config, folders: dict[str, Path], tracker: Tracker) -> dict[str, Any]:
    """Prepare target, draft, tokenizer and texts; return the figures for the manifest."""
    folder, data, model = folders["pair"], config.data, config.model
    if model.target:  # wrong input first
        shared_tokenizer(model)
    models = load_models(model.given.values(), *model.placed)
    context = shared_context(model, (model.max_context for model in models))
    text = read_text(config, folder, models, context)
    if models:
        check_rows(text.train, models[0])
        check_rows(text.held_out, models[0])
    if config.stage == "all" and models:
        room = config.evaluation.new_tokens + MARGIN
        check_prompts(text.prompts, room, *models)
    for kind, example in {p.kind: p.text for p in reversed(text.prompts)}.items():
        framed(f"first prompt: {kind}", Text(shortened(example)))
    if model.trained:
        _train(config, folder, text, tracker)
        free_memory()
        models = load_models([str(folder / role) for role in model.trained], *model.placed)
    tokens = text.train.numel(), text.held_out.numel()
    console.print("text of {:,} tokens to learn from, {:,} held out".format(*tokens))
    with working("evaluating the models on held-out text"):
        rows = spread(text.held_out, HELD_OUT_ROWS)
        metrics = held_out_report(models[0], models[1] if models[1:] else None, rows)
    target, draft = _places(model)
    Pair(folder).write(target, draft, text.prompts, data.test_prompts, text.train, text.held_out)
    _print(metrics)
    return metrics


def _places(model: ModelConfig) -> tuple[str, str | None]:
    """Return the places of target and draft; the pair's own are named by their roles.

    A folder is never taken for a hub name, nor for the pair's own, and is found from another
    working folder: it begins with a slash.
    """
    places = {role: role for role in model.trained}
    for role, place in model.given.items():
        places[role] = os.path.abspath(place) if os.path.isdir(place) else place
    return places["target"], places.get("draft")


def _train(config: Config, folder: Path, text: PairText, tracker: Tracker) -> None:
    """Train the target, and distil the draft from it.

    A finished model is loaded, an unfinished training resumed.
    """

    def save(path: Path) -> None:
        model.save_pretrained(path)
        text.tokenizer.save_pretrained(path)

    tokenizer = text.tokenizer
    teacher: Any = None
    for role, lm in config.model.trained.items():
        out = folder / role
        if role == "draft" and config.data.source == ANSWERS:
            (target,) = load_models([str(folder / "target")], *config.model.placed)
            size = config.engine.batch
            engine = partial(answering_engine, config.model, size, target)
            how = Sampling(engine, size, config.seed)
            answer_prompts(config.data, folder, text, target.max_context, how)
        rows = text.train if role == "target" else text.for_draft
        if out.exists():
            check_checksums(out, again="delete this folder and run stage=pair again")
            teacher = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        else:
            distilled = "" if teacher is None else ", distilled from the target"
            console.print(f"training the {role}{distilled}")
            built = build_llama(lm, len(tokenizer), tokenizer.eos_token_id, like=teacher)
            module = LanguageModel(built, lm, teacher)
            module.place = torch.device(config.model.device)
            model = teacher = fit(module, rows, folder / "training" / role, tracker.loggers(role))
            write_export(out, save)


def _print(metrics: dict[str, Any]) -> None:
    summary = f"held-out text: loss of the target {metrics['target_nats']:.3f} nats/token"
    if "overlap" in metrics:
        overlaps = ", ".join(f"{value:.3f} at T={t:g}" for t, value in metrics["overlap"].items())
        summary += f", of the draft {metrics['draft_nats']:.3f}; overlap {overlaps}"
    console.print(summary)


STAGE = Stage("pair", "pair", lambda config: (), settings, work)
