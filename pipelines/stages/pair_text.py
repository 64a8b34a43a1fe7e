"""The text and the prompts of a pair, by where they come from.

The shipped text, a corpus, the target's answers to prompts, or text that it writes itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle, islice
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nde_talf.data.dialogues.chat_mask import ChatEncoder
from nde_talf.data.dialogues.self_made import first_token, user_turn
from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.data.text.conversation import USER, question_keys
from nde_talf.data.text.corpus import load_documents, load_mixture, split_documents
from nde_talf.data.text.pair import assign_splits, load_models, shipped_prompts, shipped_rows
from nde_talf.data.text.prompt_sets import load_sets
from nde_talf.data.text.prompts import Prompt, encode_prompts, make_prompt, prompts_from_documents
from nde_talf.data.text.settings import ANSWERS, SELF, STANDARD_LIBRARY, DataConfig
from nde_talf.data.text.shipped import is_shipped
from nde_talf.data.text.templates import ChatTemplate
from nde_talf.data.text.tokenizer import in_rows, pack, train_tokenizer
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console, working
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.precision import type_of_draft
from nde_talf.decoding.models.static_shapes import MARGIN
from nde_talf.pipelines.config.own_files import show
from nde_talf.pipelines.config.schema import Config, ModelConfig
from nde_talf.pipelines.stages.answers import Sampling, SelfMade, sampled
from nde_talf.pipelines.stages.shared_tokenizer import shared_tokenizer

SHOWN = 10
"""Self-made texts that are shown."""
ANSWERED = 256
"""Answers to learn from, where no number is given."""
TURN = 128
"""Tokens of a self-made user's turn, at most."""
SPECIAL = 4
"""Tokens that a tokenizer puts around a prompt at most."""


@dataclass
class PairText:
    """Rows of token ids, and held-out prompts.

    for_draft: rows that a draft trained here learns from.
    """

    tokenizer: PreTrainedTokenizerBase
    train: Tensor
    held_out: Tensor
    for_draft: Tensor
    prompts: list[Prompt] = field(default_factory=list)


def _shipped_text(data: DataConfig, model: ModelConfig) -> PairText:
    """Read the text that ships with the pair, which nothing held out of it was trained on."""
    train, domains = shipped_rows()
    prompts = [] if data.sets else shipped_prompts(data.prompt_count)
    held_out = torch.cat([*domains.values()])
    return PairText(shared_tokenizer(model), train, held_out, train, prompts)


def _corpus(data: DataConfig) -> Dataset:
    """Read the corpus; a target that answers own prompts is trained on the standard library."""
    with working("reading the text"):
        if data.mix:
            return load_mixture(data.mix)
        source = STANDARD_LIBRARY if data.source == ANSWERS else data.source
        return load_documents(source, data.column, data.split)


def _tokenised(documents: Dataset, data: DataConfig, model: ModelConfig, seed: int) -> PairText:
    """Hold some of the documents out, and return all as rows; take prompts from those held out."""
    length, given = model.length, model.target
    train, held_out = split_documents(documents, data.held_out, seed)
    with working("tokenising it" if given else "training a tokenizer, and tokenising the text"):
        tokenizer = (
            shared_tokenizer(model) if given else train_tokenizer(train["text"], model.vocab_size)
        )
        rows, held_out_rows = (pack(tokenizer, part["text"], length) for part in (train, held_out))
    text = PairText(tokenizer, rows, held_out_rows, rows)
    if not data.sets:
        limits = (data.prompt_tokens[0], data.prompt_tokens[1])
        text.prompts = prompts_from_documents(held_out, data.prompt_count, seed, tokenizer, limits)
    if data.mix and not given:
        learnt = zip(train["text"], train["for_draft"], strict=True)
        texts = [one for one, for_draft in learnt if for_draft]
        if not texts:
            raise UserError(
                "data.mix leaves the draft nothing to learn from: raise draft_fraction of a corpus."
            )
        text.for_draft = pack(tokenizer, texts, length)
    return text


def read_text(
    config: Config, folder: Path, models: Sequence[CausalModel], context: int
) -> PairText:
    """Read text and prompts; a target that is given writes the text that a head learns from."""
    data, model, given = config.data, config.model, config.model.target
    own = given is not None and data.source == ANSWERS
    size = config.engine.batch
    how = Sampling(cache(lambda: answering_engine(model, size, models[0])), size, config.seed)
    if data.source == SELF:
        text = _self_made(data, model, folder, models[0].max_context, how)
        own = bool(text.tokenizer.chat_template)
    elif own:
        text = _empty_text(model)
    elif is_shipped(given):
        text = _shipped_text(data, model)
    else:
        text = _tokenised(_corpus(data), data, model, config.seed)
    if data.sets:
        text.prompts = set_prompts(config, text.tokenizer, context)
    text.prompts = encode_prompts(text.prompts, text.tokenizer, special=bool(given))
    if own:
        answer_prompts(data, folder, text, models[0].max_context, how, not config.chats)
    return text


def _self_made(
    data: DataConfig, model: ModelConfig, folder: Path, context: int, how: Sampling
) -> PairText:
    """Let the target write its prompts, or without a chat template all text, which it continues."""
    tokenizer = shared_tokenizer(model)
    chat = bool(tokenizer.chat_template)
    if chat and data.sets:
        return _empty_text(model)
    opening = user_turn(ChatEncoder(tokenizer)) if chat else first_token(tokenizer)
    kind, most = ("questions", TURN) if chat else ("texts", model.length)
    longest = min(data.self_made.tokens or most, context - len(opening.tokens))
    own = SelfMade(TraceStore(folder / kind, kind), how, tokenizer, opening, longest)
    texts = own.texts(data.prompt_count if chat else data.self_made.count)
    if not chat:
        begun = tokenizer.decode(opening.tokens)
        show(f"no chat template: the target writes text after {begun!r}", texts[:SHOWN])
        names = [f"{at}" for at in range(len(texts))]
        documents = Dataset.from_dict({"name": names, "text": texts})
        return _tokenised(documents, data, model, how.seed)
    show("questions that the target asks itself", texts[:SHOWN])
    text = _empty_text(model)
    chat_template = ChatTemplate(tokenizer, "model.target")
    for question in texts:
        turn = [{"role": USER, "content": question}]
        prompt = chat_template.render(turn, add_generation_prompt=True)
        text.prompts.append(make_prompt(SELF, prompt, True, question_keys(turn)[-1]))
    return text


def answering_engine(model: ModelConfig, batch: int, target: CausalModel) -> TransformersEngine:
    """Return what samples from the target, loaded again where it answers in another type."""
    dtype, where = answers_type(model), target.module.name_or_path
    if where and dtype != model.dtype:
        (target,) = load_models([where], model.device, dtype, *model.placed[2:])
    return TransformersEngine(target, batch)


def answers_type(model: ModelConfig) -> str:
    """Return the type that answers to learn from are sampled in.

    It is model.dtype, but bfloat16 in place of float32 where the machine multiplies it itself.
    """
    return type_of_draft("auto", model.dtype, model.device)


def _empty_text(model: ModelConfig) -> PairText:
    """Return empty rows, which `answer_prompts` fills."""
    none = torch.zeros(0, model.length).long()
    return PairText(shared_tokenizer(model), none, none, none)


def shared_context(model: ModelConfig, given: Iterable[int]) -> int:
    """Return the longest context of all models: the given ones, and those trained here."""
    return min([*given, *(lm.max_length for lm in model.trained.values())])


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


def answer_prompts(
    data: DataConfig,
    folder: Path,
    text: PairText,
    context: int,
    how: Sampling,
    learnt: bool = True,
) -> None:
    """Replace the rows of `text` by what the target writes after its prompts.

    Prompts of the test split are left out, and the last third of the others is held out.

    learnt: write text to learn from too, which a head that learns from dialogues does not need.
    """
    length = text.held_out.shape[1]
    splits = assign_splits(text.prompts, data.test_prompts)
    traced = [p.tokens for p, split in zip(text.prompts, splits, strict=True) if split != "test"]
    first = len(traced) - max(1, len(traced) // 3)
    most = min(data.answer_tokens, context - max(map(len, traced)))

    def rows(side: str, asked: list[list[int]], count: int) -> Tensor:
        store, repeated = TraceStore(folder / "answers" / side, side), islice(cycle(asked), count)
        texts = sampled(store, how, [*repeated], most)
        return in_rows(texts, text.tokenizer.eos_token_id, length)

    if learnt:
        text.train = text.for_draft = rows("train", traced[:first], data.answers or ANSWERED)
    else:
        console.print("the head learns from dialogues: no other text is sampled to learn from")
    text.held_out = rows("held_out", traced[first:], (data.answers or ANSWERED) // 4)
