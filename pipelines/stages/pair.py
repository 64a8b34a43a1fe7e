"""Stage pair: a target and a draft, and the held-out prompts and text that later stages use."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.text import Text
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from nde_talf.data.dialogues.chat_mask import ChatEncoder
from nde_talf.data.dialogues.self_made import first_token, user_turn
from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.data.text.conversation import USER, question_keys
from nde_talf.data.text.corpus import (
    load_documents,
    load_mixture,
    source_digest,
    split_documents,
)
from nde_talf.data.text.pair import (
    Pair,
    assign_splits,
    check_prompts,
    check_rows,
    check_tokenizers,
    load_models,
    shipped_prompts,
    shipped_rows,
    spread,
)
from nde_talf.data.text.prompt_sets import first_of_each, load_sets
from nde_talf.data.text.prompts import (
    Prompt,
    encode_prompts,
    make_prompt,
    prompts_from_documents,
)
from nde_talf.data.text.settings import ANSWERS, SELF, STANDARD_LIBRARY
from nde_talf.data.text.shipped import is_shipped
from nde_talf.data.text.templates import ChatTemplate, check_ids, load_tokenizer
from nde_talf.data.text.tokenizer import in_rows, pack, train_tokenizer
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.checksums import check_checksums, write_export
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console, working
from nde_talf.decoding.device import free_memory
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.loading import read_config
from nde_talf.decoding.models.precision import type_of_draft
from nde_talf.decoding.models.static_shapes import MARGIN
from nde_talf.draft_training.training.lm_training import (
    LanguageModel,
    build_llama,
    fit,
    held_out_report,
)
from nde_talf.pipelines.config.checks import sources
from nde_talf.pipelines.config.own_files import framed, shortened, show
from nde_talf.pipelines.config.schema import DISTIL, PASSES, Config, ModelConfig
from nde_talf.pipelines.runs.tracking import Tracker
from nde_talf.pipelines.stages.answers import OPENING, SelfMade, continued, sampled
from nde_talf.pipelines.stages.stage import Stage

SHOWN = 10
"""Self-made texts that are shown."""
HELD_OUT_ROWS = 32  # rows of held-out text that the figures are computed on
ANSWERED, EPOCHS = 256, 16
"""Answers to learn from at least, and times that a draft for a given target sees them all."""
TURN = 128
"""Tokens of a self-made user's turn, at most."""
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


def work(config: Config, folders: dict[str, Path], tracker: Tracker) -> dict[str, Any]:
    """Prepare target, draft, tokenizer and texts; return the figures for the manifest."""
    folder, data, model = folders["pair"], config.data, config.model
    given = [*model.given.values()]
    if model.target:  # wrong input first
        shared_tokenizer(model)
    models = load_models(given, *model.placed)
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
    if model.trained:
        _train(config, folder, text, models, tracker)
        models.clear()  # the target is not held twice
        free_memory()
        where = [*given, *(str(folder / role) for role in model.trained)]
        models = load_models(where, *model.placed)
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


@dataclass
class _Text:
    """Rows of token ids, and held-out prompts.

    for_draft: rows that a draft trained here learns from.
    """

    tokenizer: PreTrainedTokenizerBase
    train: Tensor
    held_out: Tensor
    for_draft: Tensor
    prompts: list[Prompt] = field(default_factory=list)


def _shipped_text(config: Config) -> _Text:
    """Read the text that ships with the pair, which nothing held out of it was trained on."""
    data, (train, domains) = config.data, shipped_rows()
    prompts = [] if data.sets else shipped_prompts(data.prompt_count)
    held_out = torch.cat([*domains.values()])
    return _Text(shared_tokenizer(config.model), train, held_out, train, prompts)


def _corpus_text(config: Config) -> _Text:
    """Read the corpus; a target that answers own prompts is trained on the standard library."""
    data = config.data
    with working("reading the text"):
        if data.mix:
            documents = load_mixture(data.mix)
        else:
            source = STANDARD_LIBRARY if data.source == ANSWERS else data.source
            documents = load_documents(source, data.column, data.split)
    return _tokenised(config, documents)


def _tokenised(config: Config, documents: Dataset) -> _Text:
    """Hold some of the documents out, and return all as rows; take prompts from those held out."""
    data, length, given = config.data, config.model.length, bool(config.model.target)
    train, held_out = split_documents(documents, data.held_out, config.seed)
    with working("tokenising it" if given else "training a tokenizer, and tokenising the text"):
        tokenizer = (
            shared_tokenizer(config.model)
            if given
            else train_tokenizer(train["text"], config.model.vocab_size)
        )
        rows, held_out_rows = (pack(tokenizer, part["text"], length) for part in (train, held_out))
    text = _Text(tokenizer, rows, held_out_rows, rows)
    if not data.sets:
        limits = (data.prompt_tokens[0], data.prompt_tokens[1])
        text.prompts = prompts_from_documents(
            held_out, data.prompt_count, config.seed, tokenizer, limits
        )
    if data.mix and not given:
        learnt = zip(train["text"], train["for_draft"], strict=True)
        texts = [one for one, for_draft in learnt if for_draft]
        if not texts:
            raise UserError(
                "data.mix leaves the draft nothing to learn from: raise draft_fraction of a corpus."
            )
        text.for_draft = pack(tokenizer, texts, length)
    return text


def _read(config: Config, folder: Path, models: Sequence[CausalModel], context: int) -> _Text:
    """Read text and prompts; a target that is given writes the text that a draft learns from."""
    given, source = config.model.target, config.data.source
    own = given is not None and source == ANSWERS
    engine = cache(lambda: _engine(config, models[0]))
    if source == SELF:
        text = _self_made(config, folder, models[0].max_context, engine)
        own = bool(text.tokenizer.chat_template)
    else:
        read = _own_text if own else _shipped_text if is_shipped(given) else _corpus_text
        text = read(config)
    if config.data.sets:
        text.prompts = set_prompts(config, text.tokenizer, context)
    text.prompts = encode_prompts(text.prompts, text.tokenizer, special=bool(given))
    if own:
        _answer(config, folder, text, models[0].max_context, engine)
    elif config.model.draft == DISTIL and source != SELF:
        store, rows = (
            TraceStore(folder / "answers/train", "train"),
            spread(text.train, answers_to_learn(config)),
        )
        most = min(config.data.answer_tokens, models[0].max_context - OPENING)
        end, size = text.tokenizer.eos_token_id, config.engine.batch
        own_rows = continued(store, engine, rows, config.seed, end, most, size)
        text.for_draft = torch.cat([own_rows, spread(text.train, 3 * len(own_rows))])
    return text


def _self_made(
    config: Config, folder: Path, context: int, engine: Callable[[], TransformersEngine]
) -> _Text:
    """Let the target write its prompts, or without a chat template all text, which it continues."""
    data, tokenizer = config.data, shared_tokenizer(config.model)
    made, size = data.self_made, config.engine.batch
    chat = bool(tokenizer.chat_template)
    if chat and data.sets:
        return _own_text(config)
    opening = user_turn(ChatEncoder(tokenizer)) if chat else first_token(tokenizer)
    kind, most = ("questions", TURN) if chat else ("texts", config.model.length)
    longest = min(made.tokens or most, context - len(opening.tokens))
    texts = SelfMade(
        TraceStore(folder / kind, kind),
        engine,
        tokenizer,
        opening,
        made.setting,
        longest,
        size,
        config.seed,
    ).texts(data.prompt_count if chat else made.count)
    if not chat:
        begun = tokenizer.decode(opening.tokens)
        show(f"no chat template: the target writes text after {begun!r}", texts[:SHOWN])
        names = [f"{at}" for at in range(len(texts))]
        return _tokenised(config, Dataset.from_dict({"name": names, "text": texts}))
    show("questions that the target asks itself", texts[:SHOWN])
    text = _own_text(config)
    chat_template = ChatTemplate(tokenizer, "model.target")
    for question in texts:
        turn = [{"role": USER, "content": question}]
        prompt = chat_template.render(turn, add_generation_prompt=True)
        text.prompts.append(make_prompt(SELF, prompt, True, question_keys(turn)[-1]))
    return text


def _engine(config: Config, target: CausalModel) -> TransformersEngine:
    """Return what samples from the target, loaded again where it answers in another type."""
    model, dtype, where = config.model, answers_type(config), target.module.name_or_path
    if where and dtype != model.dtype:
        (target,) = load_models([where], model.device, dtype, *model.placed[2:])
    return TransformersEngine(target, config.engine.batch)


def answers_type(config: Config) -> str:
    """Return the type that answers to learn from are sampled in."""
    return type_of_draft(config.engine.dtype, config.model.dtype, config.model.device)


def _own_text(config: Config) -> _Text:
    """Return no text yet: it is what the target answers to own prompts."""
    none = torch.zeros(0, config.model.length).long()
    return _Text(shared_tokenizer(config.model), none, none, none)


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


def _answer(
    config: Config,
    folder: Path,
    text: _Text,
    context: int,
    engine: Callable[[], TransformersEngine],
) -> None:
    """Replace the rows of `text` by what the target writes after its prompts.

    Prompts of the test split are left out, and the last third of the others is held out. Where a
    head learns from dialogues, and no draft is distilled, no text to learn from is written.
    """
    data, end, size = config.data, text.tokenizer.eos_token_id, config.engine.batch
    splits = assign_splits(text.prompts, data.test_prompts)
    traced = [p.tokens for p, split in zip(text.prompts, splits, strict=True) if split != "test"]
    first = len(traced) - max(1, len(traced) // 3)
    most = min(data.answer_tokens, context - max(map(len, traced)))

    def rows(side: str, asked: list[list[int]], count: int) -> Tensor:
        store, repeated = (
            TraceStore(folder / "answers" / side, side),
            [*islice(cycle(asked), count)],
        )
        texts = sampled(store, engine, repeated, config.seed, most, size)
        return in_rows(texts, end, config.model.length)

    if (config.dialogues.source or data.source == SELF) and not config.model.trained:
        console.print("the head learns from dialogues: no other text is sampled to learn from")
    else:
        text.train = text.for_draft = rows("train", traced[:first], answers_to_learn(config))
    text.held_out = rows("held_out", traced[first:], (data.answers or ANSWERED) // 4)


def answers_to_learn(config: Config) -> int:
    """Count the answers to learn from; a draft for a given target sees them `EPOCHS` times."""
    model, tokens = config.model, config.model.draft_lm.batch * config.model.length
    rows = model.draft_lm.steps * tokens if model.draft == DISTIL else 0
    return config.data.answers or max(ANSWERED, rows // (EPOCHS * config.data.answer_tokens))


def shared_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer.

    It has to mark the end of a text, and to agree with the draft's on every token of both.
    """
    target, where = load_tokenizer(model.target, "model.target"), f"model.target={model.target}"
    if target.eos_token_id is None:
        raise UserError(f"{where}: its tokenizer has no end-of-text token (eos_token); set one.")
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
        if chats and tokenizer.chat_template:
            ChatTemplate(tokenizer, chats[0])
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
            engine = partial(_engine, config, target)
            _answer(config, folder, text, target.max_context, engine)
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


def _print(metrics: dict[str, Any]) -> None:
    summary = f"held-out text: loss of the target {metrics['target_nats']:.3f} nats/token"
    if "overlap" in metrics:
        overlaps = ", ".join(f"{value:.3f} at T={t:g}" for t, value in metrics["overlap"].items())
        summary += f", of the draft {metrics['draft_nats']:.3f}; overlap {overlaps}"
    console.print(summary)


STAGE = Stage("pair", "pair", lambda config: (), settings, work)
