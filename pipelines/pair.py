"""Stage pair: a target and a draft, and the held-out prompts and text that later stages use."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from datasets import Dataset
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nde_talf.data.dialogues.chat_mask import ChatEncoder
from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.data.text.corpus import (
    load_documents,
    load_mixture,
    source_digest,
    split_documents,
)
from nde_talf.data.text.pair import (
    Pair,
    check_prompts,
    check_rows,
    check_tokenizers,
    load_models,
    shipped_prompts,
    shipped_rows,
    spread,
    test_splits,
)
from nde_talf.data.text.prompt_sets import first_of_each, load_sets
from nde_talf.data.text.prompts import Prompt, encode_prompts, prompts_from_documents
from nde_talf.data.text.settings import ANSWERS, STANDARD_LIBRARY
from nde_talf.data.text.shipped import is_shipped
from nde_talf.data.text.templates import ChatTemplate, check_ids, load_tokenizer
from nde_talf.data.text.tokenizer import in_rows, pack, train_tokenizer
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.checksums import check_checksums, write_export
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import track, working
from nde_talf.decoding.device import free_memory
from nde_talf.decoding.loading import read_config
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.decoding.static import MARGIN
from nde_talf.draft_training.recipe import OPENING
from nde_talf.draft_training.train_lm import LanguageModel, build_llama, fit, held_out_report
from nde_talf.pipelines.checks import sources
from nde_talf.pipelines.config import DISTIL, PASSES, Config, ModelConfig
from nde_talf.pipelines.own_data import framed, shortened
from nde_talf.pipelines.stage import Stage, console
from nde_talf.pipelines.tracking import Tracker, tracked

T = TypeVar("T")
HELD_OUT_ROWS = 32  # rows of held-out text that the figures are computed on
ANSWERED, EPOCHS = 256, 16
"""Answers to learn from at least, and times that a draft for a given target sees them all."""
ANSWER, AT_ONCE = 128, 64
"""Tokens of an answer at most, and answers sampled together."""
SPECIAL = 4
"""Tokens that a tokenizer puts around a prompt at most."""


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that the stage's result depends on."""
    model = asdict(config.model)
    for name in (*PASSES, "threads"):
        del model[name]
    for name in ("target_lm", "draft_lm"):
        del model[name]["checkpoint_seconds"]
    files = {
        source: digest
        for key, source, _ in sources(config)
        if source and key != "dialogues" and (digest := source_digest(source))
    }
    return {"model": model, "data": asdict(config.data), "files": files, "seed": config.seed}


def work(config: Config, folders: dict[str, Path]) -> dict[str, Any]:
    """Prepare target, draft, tokenizer and texts; return the figures for the manifest."""
    folder, data, model = folders["pair"], config.data, config.model
    given = [*model.given.values()]
    if model.target:  # wrong input first
        shared_tokenizer(model)
    models = load_models(given, *model.placed) if given else []
    context = shared_context(config, (model.max_context for model in models))
    text = _read(config, folder, models, context)
    if models:
        check_rows(text.train, models[0])
        check_rows(text.held_out, models[0])
    if config.stage == "all" and models:
        room = config.evaluation.new_tokens + MARGIN
        check_prompts(text.prompts, models[0], room, context)
    for kind, example in first_of_each(text.prompts).items():
        framed(f"first prompt: {kind}", Text(shortened(example)))
    with tracked(config, "pair", folder) as tracker:
        if model.trained:
            _train(config, folder, text, models, tracker)
            models.clear()  # the target is not held twice
            free_memory()
            where = [*given, *(str(folder / role) for role in model.trained)]
            models = load_models(where, *model.placed)
        tokens = text.train.numel(), text.held_out.numel()
        console.print("text of {:,} tokens to learn from, {:,} held out".format(*tokens))
        with working("evaluating the models on held-out text"):
            metrics = _figures(models, text)
        target, draft = _places(model)
        Pair(folder).write(
            target, draft, text.prompts, data.test_prompts, text.train, text.held_out
        )
        tracker.log(metrics)
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
    data, tokenizer, (train, domains) = config.data, shared_tokenizer(config.model), shipped_rows()
    prompts = [] if data.sets else shipped_prompts(data.prompt_count)
    return _Text(tokenizer, train, torch.cat([*domains.values()]), domains, train, prompts)


def _text(config: Config) -> _Text:
    """Read the corpus and hold documents out of it."""
    data, length, given = config.data, config.model.length, bool(config.model.target)
    with working("reading the text"):
        if data.mix:
            documents = load_mixture(data.mix)
        else:  # a target that answers own prompts is trained on the standard library
            source = STANDARD_LIBRARY if data.source == ANSWERS else data.source
            documents = load_documents(source, data.column, data.split)
        train, held_out = split_documents(documents, data.held_out, config.seed)
    with working("tokenising it" if given else "training a tokenizer, and tokenising the text"):
        tokenizer = (
            shared_tokenizer(config.model)
            if given
            else train_tokenizer(train["text"], config.model.vocab_size)
        )
        rows, held_out_rows = (pack(tokenizer, part["text"], length) for part in (train, held_out))
    prompts: list[Prompt] = []
    if not data.sets:
        limits = (data.prompt_tokens[0], data.prompt_tokens[1])
        prompts = prompts_from_documents(
            held_out, data.prompt_count, config.seed, tokenizer, limits
        )
    by_domain = {domain: _texts_of(held_out, "kind", domain) for domain in data.mix}
    domains = {name: pack(tokenizer, texts, length) for name, texts in by_domain.items() if texts}
    known = rows
    if data.mix and not given:
        texts = _texts_of(train, "for_draft", True)
        if not texts:
            raise UserError(
                "data.mix leaves the draft nothing to learn from: raise draft_fraction of a corpus."
            )
        known = pack(tokenizer, texts, length)
    return _Text(tokenizer, rows, held_out_rows, domains, known, prompts)


def _texts_of(documents: Dataset, column: str, value: Any) -> list[str]:
    pairs = zip(documents["text"], documents[column], strict=True)
    return [text for text, each in pairs if each == value]


def _read(config: Config, folder: Path, models: Sequence[CausalModel], context: int) -> _Text:
    """Read text and prompts; a target that is given writes the text that a draft learns from."""
    given = config.model.target
    own = given is not None and config.data.source == ANSWERS
    text = (_own_text if own else _shipped_text if is_shipped(given) else _text)(config)
    if config.data.sets:
        text.prompts = set_prompts(config, text.tokenizer, context)
    text.prompts = encode_prompts(text.prompts, text.tokenizer, special=bool(given))
    if own:
        _answer(config, folder, text, models[0])
    elif config.model.draft == DISTIL:
        store, rows = TraceStore(folder / "answers", "train"), spread(text.train, _answers(config))
        own_rows = continued(store, models[0], rows, config.seed, text.tokenizer.eos_token_id)
        text.for_draft = torch.cat([own_rows, spread(text.train, 3 * len(own_rows))])
    return text


def _own_text(config: Config) -> _Text:
    """Return no text yet: it is what the target answers to own prompts."""
    none = torch.zeros(0, config.model.length).long()
    return _Text(shared_tokenizer(config.model), none, none, {}, none, [])


def shared_context(config: Config, given: Iterable[int]) -> int:
    """Return the longest context of all models: the given ones, and those trained here."""
    return min([*given, *(lm.max_length for lm in config.model.trained.values())])


def set_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, context: int) -> list[Prompt]:
    """Draw the prompts of `data.sets`; none is longer than there is room for in the context."""
    new = max(config.traces.new_tokens, config.evaluation.new_tokens) + MARGIN + SPECIAL
    if context <= new:
        raise UserError(
            f"traces.new_tokens={config.traces.new_tokens} and evaluation.new_tokens="
            f"{config.evaluation.new_tokens} leave a prompt no room in a context of {context}"
            " tokens: lower them."
        )
    sets = {
        name: replace(one, max_tokens=min(one.max_tokens, context - new))
        for name, one in config.data.sets.items()
    }
    return load_sets(sets, config.data.prompt_count, config.seed, tokenizer)


def _answer(config: Config, folder: Path, text: _Text, target: CausalModel) -> None:
    """Replace the rows of `text` by what the target writes after its prompts.

    Prompts of the test split are left out, and the last third of the others is held out.
    """
    splits = test_splits(text.prompts, config.data.test_prompts)
    traced = [p.tokens for p, split in zip(text.prompts, splits, strict=True) if split != "test"]
    first = len(traced) - max(1, len(traced) // 3)
    sides = {"train": traced[:first], "held_out": traced[first:]}
    end, length = text.tokenizer.eos_token_id, config.model.length
    rows, counts = {}, {"train": _answers(config), "held_out": ANSWERED // 4}
    for side, asked in sides.items():
        repeated = asked * -(-counts[side] // len(asked))
        store = TraceStore(folder / "answers", side)
        rows[side] = in_rows(_sampled(store, target, repeated, config.seed), end, length)
    text.train, text.held_out, text.for_draft = rows["train"], rows["held_out"], rows["train"]
    text.domains = {}


def _answers(config: Config) -> int:
    """Count the answers to learn from; a draft for a given target sees them `EPOCHS` times."""
    model, tokens = config.model, config.model.draft_lm.batch * config.model.length
    rows = model.draft_lm.steps * tokens if model.draft == DISTIL else 0
    return max(ANSWERED, rows // (EPOCHS * ANSWER))


def continued(
    store: TraceStore, target: CausalModel, rows: Tensor, seed: int, end: int, most: int = ANSWER
) -> Tensor:
    """Return rows, as long as `rows`, of texts that the target writes after their first tokens.

    Half of them are sampled at temperature 1 and half at 0.6. end: the token between two texts;
    most: tokens of a text that are sampled.
    """
    texts = _sampled(store, target, rows[:, :OPENING].tolist(), seed, (1.0, 0.6), most)
    return in_rows(texts, end, rows.shape[1]).to(rows.dtype)


def _sampled(
    store: TraceStore,
    target: CausalModel,
    prompts: list[list[int]],
    seed: int,
    temperatures: Sequence[float] = (1.0,),
    most: int = ANSWER,
) -> list[list[int]]:
    """Sample a text of at most so many tokens after each prompt.

    Texts are written in shards, which take the temperatures in turn; a killed run goes on.
    """
    engine, shards = TransformersEngine(target), shards_of(store, prompts, AT_ONCE)
    for i, name in track(enumerate(shards), f"answers, {store.kind}", len(shards), "shard"):
        if not store.holds(name):
            new = min(most, target.max_context - max(map(len, shards[name])))
            setting = SamplingSetting(temperatures[i % len(temperatures)])
            tokens = engine.sample(shards[name], setting, new, seed * 1_009 + i)
            store.write(name, {"tokens": tokens})
    return [tokens for name in shards for tokens in store.lists(name)["tokens"]]


def shards_of(store: TraceStore, asked: list[T], size: int) -> dict[str, list[T]]:
    """Return what is asked in each shard of answers, by its name in the store."""
    parts = [asked[start : start + size] for start in range(0, len(asked), size)]
    return {store.name(i, len(parts)): part for i, part in enumerate(parts)}


def shared_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer.

    It has to mark the end of a text, and to agree with the draft's on every token of both.
    """
    target = load_tokenizer(model.target, "model.target")
    if target.eos_token_id is None:
        raise UserError(
            f"model.target={model.target}: its tokenizer has no end-of-text token"
            " (eos_token); set one."
        )
    where = f"model.target={model.target}"
    rows = read_config(str(model.target), "model.target").get_text_config().vocab_size
    check_ids(target, rows, where)
    if draft := model.given.get("draft"):
        vocabulary = load_tokenizer(draft, "model.draft").get_vocab()
        check_tokenizers(target.get_vocab(), vocabulary, f"model.draft={draft}")
    return target


def check_template(config: Config) -> None:
    """Raise UserError before any work for a chat template that is missing or does not work."""
    own, sets = config.dialogues, config.data.sets.items()
    chats = [f"data.sets.{name}.chat" for name, one in sets if one.chat is not False]
    own_text = own.source and config.stage in ("all", "draft")
    if config.model.target and (own_text or chats):
        tokenizer = shared_tokenizer(config.model)
        for key in chats if tokenizer.chat_template else ():
            ChatTemplate(tokenizer, key)
        if own_text:
            ChatEncoder(tokenizer, own.chat_template, own.template_options)


def _train(
    config: Config,
    folder: Path,
    text: _Text,
    models: Sequence[CausalModel],
    tracker: Tracker,
) -> None:
    """Train the target unless it is one of `models`, and distil the draft from it.

    A finished model is loaded, an unfinished training resumed.
    """
    from transformers import AutoModelForCausalLM

    def save(path: Path) -> None:
        model.save_pretrained(path)
        text.tokenizer.save_pretrained(path)

    tokenizer, trained = text.tokenizer, config.model.trained
    teacher: Any = models[0].module if models else None
    vocabulary = models[0].vocab_size if models else len(tokenizer)
    for role, lm in trained.items():
        out = folder / role
        if role == "draft" and "target" in trained and config.data.source == ANSWERS:
            (target,) = load_models([str(folder / "target")], *config.model.placed)
            _answer(config, folder, text, target)
        rows = text.train if role == "target" else text.for_draft
        if out.exists():
            check_checksums(out, again="delete this folder and run stage=pair again")
            teacher = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        else:
            distilled = "" if teacher is None else ", distilled from the target"
            console.print(f"training the {role}{distilled}")
            built = build_llama(lm, vocabulary, tokenizer.eos_token_id, like=teacher)
            module = LanguageModel(built, lm, teacher)
            module.place = torch.device(config.model.device)
            model = teacher = fit(module, rows, folder / "training" / role, tracker.loggers(role))
            write_export(out, save)
        tracker.artifact(f"{config.run}-{role}", "model", out)


def _figures(models: list[CausalModel], text: _Text) -> dict[str, Any]:
    """Measure the models on held-out rows, all of them and by domain."""
    draft = models[1] if len(models) > 1 else None
    metrics = held_out_report(models[0], draft, spread(text.held_out, HELD_OUT_ROWS))
    if text.domains:
        metrics["domains"] = {
            name: held_out_report(models[0], draft, spread(rows, HELD_OUT_ROWS // 4))
            for name, rows in text.domains.items()
        }
    return metrics


def _print(metrics: dict[str, Any]) -> None:
    for name, own in {"held-out text": metrics, **metrics.get("domains", {})}.items():
        summary = f"{name}: loss of the target {own['target_nats']:.3f} nats/token"
        if "overlap" in own:
            overlaps = ", ".join(f"{value:.3f} at T={t:g}" for t, value in own["overlap"].items())
            summary += f", of the draft {own['draft_nats']:.3f}; overlap {overlaps}"
        console.print(summary)


STAGE = Stage("pair", "pair", lambda config: (), settings, work)
