"""Stage pair: a target and a draft, and the held-out prompts and text that later stages use."""

import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.panel import Panel
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nde_talf.data.text.corpus import load_documents, load_mixture, split_documents
from nde_talf.data.text.pair import ROLES, Pair, check_tokenizers, load_draft, load_models, spread
from nde_talf.data.text.prompt_sets import first_of_each, load_sets
from nde_talf.data.text.prompts import Prompt, encode_prompts, prompts_from_documents
from nde_talf.data.text.shipped import is_shipped
from nde_talf.data.text.shipped_text import TRAIN, shipped_prompts, shipped_rows
from nde_talf.data.text.tokenizer import pack, train_tokenizer
from nde_talf.decoding.common.checksums import check_checksums, write_checksums
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import write_atomically
from nde_talf.decoding.common.progress import working
from nde_talf.decoding.device import free_memory
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.session import TreeSession
from nde_talf.draft_training.train_lm import LanguageModel, build_llama, fit, held_out_report
from nde_talf.pipelines.config import Config
from nde_talf.pipelines.machine import threads
from nde_talf.pipelines.stage import Stage, console
from nde_talf.pipelines.tracking import Tracker, tracked

HELD_OUT_ROWS = 64  # rows of held-out text that the figures are computed on
BATCH = 8  # of them at once
PASSES = 30
"""Passes of one token that a model is timed with."""


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that the stage's result depends on."""
    model = asdict(config.model)
    where_and_how = (
        "device",
        "device_map",
        "forward",
        "static_shapes",
    )
    for name in (*where_and_how, "threads"):
        model.pop(name)
    return {"model": model, "data": asdict(config.data), "seed": config.seed}


def work(config: Config, folders: dict[str, Path]) -> dict[str, Any]:
    """Prepare target, draft, tokenizer and texts; return the figures for the manifest."""
    folder, data, given = folders["pair"], config.data, bool(config.model.target)
    device, dtype, forward = config.model.device, config.model.dtype, config.model.forward
    target = None
    if given:  # wrong input is refused first
        if config.model.draft:
            try:
                CausalModel.load(config.model.draft, device, dtype, "model.draft", forward)
            except UserError:
                CausalModel.load(
                    str(config.model.target), device, dtype, "model.target", forward
                )  # is reported first
                raise
            free_memory()
        (target,) = load_models([str(config.model.target)], device, dtype, forward=forward)
    text = _shipped_text(config) if is_shipped(config.model.target) else _text(config, given)
    tokenizer, rows, held_out_rows = text.tokenizer, text.train, text.held_out
    prompts = encode_prompts(text.prompts, tokenizer, special=given)
    examples = first_of_each(prompts)
    for kind, example in examples.items():
        console.print(
            Panel(Text(shortened(example)), title=Text(f"first prompt: {kind}"), title_align="left")
        )
    console.print(f"{rows.numel():,} tokens; held out: {held_out_rows.numel():,}")
    with tracked(config, "pair", folder) as tracker:
        if not given:
            _train_pair(config, folder, tokenizer, rows, text.for_draft, tracker)
            (target,) = load_models([str(folder / "target")], device, dtype, forward=forward)
        domains = {name: spread(x, HELD_OUT_ROWS // 4) for name, x in text.domains.items()}
        texts = {"": spread(held_out_rows, HELD_OUT_ROWS), **domains}
        draft, costs, first = None, [], held_out_rows[0].tolist()
        if config.model.has_draft:
            console.print("the target's states and time, then the draft's ...", style="dim")
            costs = [_cost(target, first, config.evaluation.threads)]
            recorded = Recorded(target, texts.values())
            del target
            free_memory()
            where = config.model.draft if given else str(folder / "draft")
            draft, target = load_draft(where, device, dtype, recorded, forward), recorded
            costs.append(_cost(draft, first, config.evaluation.threads))
        with working("evaluating the models on held-out text"):
            metrics, *others = (held_out_report(target, draft, rows) for rows in texts.values())
        if others:
            metrics["domains"] = dict(zip([*texts][1:], others, strict=True))
        if draft:
            seconds, parameters = (
                dict(zip(ROLES, each, strict=True)) for each in zip(*costs, strict=True)
            )
            ratio = seconds["target"] / seconds["draft"]
            metrics |= {"seconds_per_token": seconds, "cost_ratio": ratio, "parameters": parameters}
        where = (str(config.model.target), config.model.draft) if given else ROLES
        Pair(folder).write(*where, prompts, data.test_prompts, rows, held_out_rows)
        tracker.log(metrics)
        tracker.sample("first_prompt", examples)
        for role in () if given else ROLES:
            tracker.artifact(f"{config.run}-{role}", "model", folder / role)
    _print(metrics)
    return metrics


@dataclass
class _Text:
    """Rows of token ids, and held-out prompts.

    Attributes:
        domains: held-out rows by domain.
        for_draft: rows that a draft trained here learns from.
    """

    tokenizer: PreTrainedTokenizerBase
    train: Tensor
    held_out: Tensor
    domains: dict[str, Tensor]
    for_draft: Tensor
    prompts: list[Prompt]


def _shipped_text(config: Config) -> _Text:
    """Read the text that ships with the pair, which nothing held out of it was trained on."""
    data, domains, tokenizer = config.data, shipped_rows(), _shared_tokenizer(config)
    train = domains.pop(TRAIN)
    prompts = (
        load_sets(data.sets, data.prompt_count, config.seed, tokenizer, console.print)
        if data.sets
        else shipped_prompts(data.prompt_count)
    )
    return _Text(tokenizer, train, torch.cat([*domains.values()]), domains, train, prompts)


def _text(config: Config, own: bool) -> _Text:
    """Read the corpus and hold documents out of it. own: with the target's tokenizer."""
    data, length = config.data, config.model.length
    with working("reading the text"):
        documents = (
            load_mixture(data.mix)
            if data.mix
            else load_documents(data.source, data.column, data.split)
        )
        train, held_out = split_documents(documents, data.held_out, config.seed)
    with working("tokenising it" if own else "training a tokenizer, and tokenising the text"):
        tokenizer = (
            _shared_tokenizer(config)
            if own
            else train_tokenizer(train["text"], config.model.vocab_size)
        )
        rows, held_out_rows = (pack(tokenizer, part["text"], length) for part in (train, held_out))
    if data.sets:
        prompts = load_sets(data.sets, data.prompt_count, config.seed, tokenizer, console.print)
    else:
        limits = (data.prompt_tokens[0], data.prompt_tokens[1])
        prompts = prompts_from_documents(
            held_out, data.prompt_count, config.seed, tokenizer, limits
        )
    texts = {
        domain: [x for x, k in zip(held_out["text"], held_out["kind"], strict=True) if k == domain]
        for domain in data.mix
    }
    domains = {domain: pack(tokenizer, own, length) for domain, own in texts.items() if own}
    mixed = data.mix and not own
    known = pack(tokenizer, _known_to_draft(train), length) if mixed else rows
    return _Text(tokenizer, rows, held_out_rows, domains, known, prompts)


def shortened(text: str, max_length: int = 600) -> str:
    """The text; of one with more than `max_length` characters the middle is left out."""
    half = max_length // 2
    return (
        text
        if len(text) <= max_length
        else f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    )


def _shared_tokenizer(config: Config):
    """Load the target's tokenizer.

    It has to mark the end of a text, and to agree with the draft's on every token of both.
    """
    target = _tokenizer(config.model.target, "target")
    if target.eos_token_id is None:
        raise UserError(
            f"model.target={config.model.target}: its tokenizer has no end-of-text token"
            " (eos_token); set one."
        )
    if config.model.draft:
        check_tokenizers(
            target.get_vocab(),
            _tokenizer(config.model.draft, "draft").get_vocab(),
            config.model.draft,
        )
    return target


def _tokenizer(where: str, role: str):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise UserError(
            f"model.{role}={where}: no tokenizer could be loaded from there"
            f" ({type(error).__name__}: {error}). Save the tokenizer beside the model."
        ) from error


def _known_to_draft(train: Dataset) -> list[str]:
    """The texts of a mixture that the draft learns from. Raises UserError if there are none."""
    texts = [text for text, known in zip(train["text"], train["for_draft"], strict=True) if known]
    if not texts:
        raise UserError(
            "data.mix leaves the draft nothing to learn from: raise draft_fraction of a corpus."
        )
    return texts


def _train_pair(
    config: Config,
    folder: Path,
    tokenizer,
    rows: torch.Tensor,
    known: torch.Tensor,
    tracker: Tracker,
) -> None:
    """Train the target on `rows` and distil the draft from it on `known`.

    A finished model is loaded, an unfinished training resumed.
    """
    from transformers import AutoModelForCausalLM

    def save(path: Path) -> None:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        write_checksums(path)

    teacher = None
    for role, lm, own in (
        ("target", config.model.target_lm, rows),
        ("draft", config.model.draft_lm, known),
    ):
        out = folder / role
        if out.exists():
            check_checksums(out, again="delete this folder and run stage=pair again")
            teacher = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
            continue
        console.print(
            f"training the {role}" + (", distilled from the target" if teacher is not None else "")
        )
        module = LanguageModel(
            build_llama(lm, len(tokenizer), tokenizer.eos_token_id, like=teacher), lm, teacher
        )
        module.gpu = torch.device(config.model.device).index
        model = teacher = fit(module, own, folder / "training" / role, tracker.loggers(role))
        write_atomically(out, save)


class Recorded:
    """Hidden states and readout of a model whose weights have been freed, for the figures.

    Args:
        model: runs the rows now.
        texts: rows of tokens [n, length] each, as `held_out_report` will be given them.
    """

    @torch.inference_mode()
    def __init__(self, model: CausalModel, texts: Iterable[Tensor]):
        self.device, self.config, self.vocab_size, self.logits = (
            model.device,
            model.config,
            model.vocab_size,
            model.readout,
        )
        self._states: dict[tuple[int, ...], Tensor] = {}
        for rows in texts:
            for batch in rows.to(model.device)[:, :-1].split(BATCH):
                positions = torch.arange(batch.shape[1], device=model.device).expand_as(batch)
                states = model.hidden(batch, positions, None, None)
                self._states |= zip(map(tuple, batch.tolist()), states, strict=True)

    def hidden(self, tokens: Tensor, *_: Any) -> Tensor:
        """[B, n, H]: the states of `tokens` [B, n]."""
        return torch.stack([self._states[tuple(row)] for row in tokens.tolist()])


@torch.inference_mode()
def _cost(model: CausalModel, text: list[int], count: int) -> tuple[float, int]:
    """Measure a model alone.

    Returns:
        The median seconds of a one-token pass at 256 tokens of context, by `count` threads, and its
        number of parameters.
    """
    session, seconds = TreeSession(model.hidden, model.device, model.dtype, model.layers), []
    session.append([text[i % len(text)] for i in range(min(256, model.max_context - 1))])
    with threads(count):
        for _ in range(PASSES):
            started = time.perf_counter()
            model.logits(session.grow(text[:1], [-1])).argmax().item()
            seconds.append(time.perf_counter() - started)
            session.rollback()
    return statistics.median(seconds), sum(weight.numel() for weight in model.module.parameters())


def _print(metrics: dict[str, Any]) -> None:
    for name, own in {"held-out text": metrics, **metrics.get("domains", {})}.items():
        summary = f"{name}: loss of the target {own['target_nats']:.3f} nats/token"
        if "overlap" in own:
            overlaps = ", ".join(f"{value:.3f} at T={t:g}" for t, value in own["overlap"].items())
            summary += f", of the draft {own['draft_nats']:.3f}; overlap {overlaps}"
        console.print(summary)
    if "cost_ratio" in metrics:
        console.print(f"a target token costs {metrics['cost_ratio']:.1f} draft tokens")


STAGE = Stage("pair", "pair", lambda config: (), settings, work)
