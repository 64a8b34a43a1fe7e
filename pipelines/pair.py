"""Stage pair: a target and a draft, and the held-out prompts and text that later stages use."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.panel import Panel
from rich.text import Text

from data.text.corpus import load_documents, split_documents
from data.text.mixture import load_mixture
from data.text.pair import ROLES, Pair, check_tokenizers, load_models, spread
from data.text.prompt_sets import first_of_each, load_sets
from data.text.prompts import encode_prompts, prompts_from_documents
from data.text.tokenizer import pack, train_tokenizer
from decoding.common.checksums import check_checksums, write_checksums
from decoding.common.errors import UserError
from decoding.common.files import write_atomically
from decoding.common.progress import working
from decoding.model import CausalModel
from draft_training.train_lm import LanguageModel, build_llama, fit, held_out_report
from pipelines.config import Config
from pipelines.machine import threads
from pipelines.stage import Stage, console
from pipelines.tracking import Tracker, tracked
from selector.profile import measure_latency

HELD_OUT_ROWS = 64  # rows of held-out text that the figures are computed on


def settings(config: Config) -> dict[str, Any]:
    model = asdict(config.model)
    for name in ("device", "forward", "static_shapes", "tensor_parallel", "tensor_parallel_draft", "threads", "verify"):
        model.pop(name)
    return {"model": model, "data": asdict(config.data), "seed": config.seed}


def work(config: Config, folders: dict[str, Path]) -> dict[str, Any]:
    folder, data, own = folders["pair"], config.data, bool(config.model.target)
    # Wrong input is refused before anything is trained.
    given = [where for where in (config.model.target, config.model.draft) if where]
    models = load_models(given, config.model.device, config.model.dtype, config.model.forward) if own else []
    with working("reading the text"):
        documents = load_mixture(data.mix) if data.mix else load_documents(data.source, data.column, data.split)
        train, held_out = split_documents(documents, data.held_out, config.seed)
    with working("tokenising it" if own else "training a tokenizer, and tokenising the text"):
        tokenizer = _shared_tokenizer(config) if own else train_tokenizer(train["text"], config.model.vocab_size)
        rows, held_out_rows = (pack(tokenizer, part["text"], config.model.length) for part in (train, held_out))
    if data.sets:
        prompts = load_sets(data.sets, data.prompt_count, config.seed, tokenizer, console.print)
    else:
        shortest, longest = data.prompt_tokens
        prompts = prompts_from_documents(held_out, data.prompt_count, config.seed, tokenizer, (shortest, longest))
    prompts = encode_prompts(prompts, tokenizer, special=own)
    examples = first_of_each(prompts)
    for kind, text in examples.items():
        console.print(Panel(Text(shortened(text)), title=f"first prompt: {kind}", title_align="left"))
    console.print(f"{len(train)} documents, {rows.numel():,} tokens; held out: {held_out_rows.numel():,}")
    with tracked(config, "pair", folder) as tracker:
        if not own:
            known = pack(tokenizer, _known_to_draft(train), config.model.length) if data.mix else rows
            _train_pair(config, folder, tokenizer, rows, known, tracker)
            models = load_models(
                [str(folder / role) for role in ROLES], config.model.device, config.model.dtype, config.model.forward
            )
        target, draft = (*models, None)[:2]
        report = partial(held_out_report, target, draft)
        with working("evaluating the models on held-out text"):
            metrics = report(spread(held_out_rows, HELD_OUT_ROWS))
        for domain in data.mix:
            texts = [text for text, kind in zip(held_out["text"], held_out["kind"], strict=True) if kind == domain]
            if texts:
                here = spread(pack(tokenizer, texts, config.model.length), HELD_OUT_ROWS // 4)
                metrics.setdefault("domains", {})[domain] = report(here)
        if draft:
            console.print("[dim]timing a token of each ...[/]")  # no spinner: it would take time of what is timed
            with threads(config.evaluation.threads):
                metrics |= _cost(target, draft, held_out_rows[0].tolist())
        where = (str(config.model.target), config.model.draft) if own else ROLES
        Pair(folder).write(*where, prompts, data.test_prompts, rows, held_out_rows, config.model.verify)
        tracker.log({**metrics, "first_prompt": examples})
        for role in () if own else ROLES:
            tracker.artifact(f"{config.run}-{role}", "model", folder / role)
    _print(metrics)
    return metrics


def shortened(text: str, max_length: int = 600) -> str:
    """The text; of one with more than `max_length` characters the middle is left out."""
    half = max_length // 2
    return text if len(text) <= max_length else f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def _shared_tokenizer(config: Config):
    """The target's tokenizer, which has to mark the end of a text and to agree with the draft's on every token of both."""
    target = _tokenizer(config.model.target, "target")
    if target.eos_token_id is None:
        raise UserError(f"model.target={config.model.target}: its tokenizer has no end-of-text token (eos_token); set one.")
    if config.model.draft:
        check_tokenizers(target.get_vocab(), _tokenizer(config.model.draft, "draft").get_vocab(), config.model.draft)
    return target


def _tokenizer(where: str, role: str):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise UserError(
            f"model.{role}={where}: no tokenizer could be loaded from there ({type(error).__name__}: {error}). Save the "
            "tokenizer beside the model."
        ) from error


def _known_to_draft(train: Dataset) -> list[str]:
    """The texts of a mixture that the draft learns from. Raises UserError if there are none."""
    texts = [text for text, known in zip(train["text"], train["for_draft"], strict=True) if known]
    if not texts:
        raise UserError("data.mix leaves the draft nothing to learn from: raise draft_fraction of a corpus.")
    return texts


def _train_pair(config: Config, folder: Path, tokenizer, rows: torch.Tensor, known: torch.Tensor, tracker: Tracker) -> None:
    """Train the target on `rows` and distil the draft from it on `known`; a finished one is loaded, an unfinished one
    resumed."""
    from transformers import AutoModelForCausalLM

    def save(path: Path) -> None:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        write_checksums(path)

    teacher = None
    for role, lm, own in (("target", config.model.target_lm, rows), ("draft", config.model.draft_lm, known)):
        out = folder / role
        if out.exists():
            check_checksums(out, again="delete this folder and run stage=pair again")
            teacher = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
            continue
        console.print(f"training the {role}" + (", distilled from the target" if teacher is not None else ""))
        module = LanguageModel(build_llama(lm, len(tokenizer), tokenizer.eos_token_id, like=teacher), lm, teacher)
        model = teacher = fit(module, own, folder / "training" / role, tracker.loggers(role))
        write_atomically(out, save)


def _cost(target: CausalModel, draft: CausalModel, text: list[int]) -> dict[str, Any]:
    """Cost of one token: parameters, and the measured time of a one-token pass at 256 tokens of context."""
    table = measure_latency(target, draft, text, [256], repeats=4, max_batches=2)
    one = {"target": table.target[0][0], "draft": table.draft[0][0]}
    parameters = {m.name.split(".")[-1]: sum(p.numel() for p in m.module.parameters()) for m in (target, draft)}
    return {"seconds_per_token": one, "cost_ratio": one["target"] / one["draft"], "parameters": parameters}


def _print(metrics: dict[str, Any]) -> None:
    for name, own in {"held-out text": metrics, **metrics.get("domains", {})}.items():
        said = f"{name}: loss of the target {own['target_nats']:.3f} nats/token"
        if "overlap" in own:
            overlaps = ", ".join(f"{value:.3f} at T={t:g}" for t, value in own["overlap"].items())
            said += f", of the draft {own['draft_nats']:.3f}; overlap {overlaps}"
        console.print(said)
    if "cost_ratio" in metrics:
        console.print(f"a target token costs {metrics['cost_ratio']:.1f} draft tokens")


STAGE = Stage("pair", "pair", lambda config: (), settings, work)
