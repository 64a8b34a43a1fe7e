"""Dialogues for stage draft: read, masked, split and packed into rows.

Answers are regenerated first if that is asked for.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from datasets import Dataset
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from nde_talf.data.dialogues.chat_mask import ChatEncoder, encode_dialogues
from nde_talf.data.dialogues.read import Dialogue, read_dialogues
from nde_talf.data.dialogues.regenerate import regenerate
from nde_talf.data.dialogues.self_made import user_turn
from nde_talf.data.dialogues.settings import KEY, DialogueConfig
from nde_talf.data.dialogues.token_rows import Document, TokenRows, pack_documents
from nde_talf.data.engines.settings import EngineConfig
from nde_talf.data.engines.transformers import Engine, TransformersEngine
from nde_talf.data.engines.vllm import VLLMEngine
from nde_talf.data.text.conversation import USER, and_skipped, question_keys
from nde_talf.data.text.corpus import split_documents
from nde_talf.data.text.pair import Pair
from nde_talf.data.text.settings import ANSWERS, SELF, SelfMadeConfig
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.checksums import short_hash
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console
from nde_talf.pipelines.config.own_files import framed, shortened, show
from nde_talf.pipelines.config.schema import Config, ModelConfig
from nde_talf.pipelines.stages.answers import Sampling, SelfMade, in_shards
from nde_talf.pipelines.stages.pair_text import SHOWN, TURN, answers_type
from nde_talf.pipelines.stages.traces import chosen_engine

SEED = 7919
"""Added to the run's seed for the questions to learn from: prompts have others."""


def asked_dialogues(
    own: DialogueConfig, source: str, tokenizer: PreTrainedTokenizerBase
) -> DialogueConfig:
    """Return the dialogues to learn from: the target's own where data=self asks for them.

    A target without a chat template makes text and no dialogues.
    """
    chat = own.chat_template or tokenizer.chat_template
    if chat and not own.source and source == SELF:
        return replace(own, source=SELF, regenerate=True)
    return own


def dialogue_rows(
    config: Config,
    own: DialogueConfig,
    folders: dict[str, Path],
    tokenizer: PreTrainedTokenizerBase,
    room: int,
) -> tuple[TokenRows, TokenRows]:
    """(train, held out): the dialogues that `own` names as rows of at most `room` tokens.

    A dialogue with all its turns is on one side.

    With dialogues.regenerate the target's answers go to shards under `folders["draft"]`, and so do
    the questions that it asks itself with dialogues.source=self; an interrupted run resumes from
    them.

    Raises:
        UserError: the dialogues cannot be read, encoded or answered, or a side has none to learn
            from.
    """
    length = min(own.length, room)
    if length < own.length:
        console.print(f"! the target's context holds rows of {room} tokens ({KEY}.length)")
    encoder = ChatEncoder(tokenizer, own.chat_template, own.template_options)
    pair, asked, model = Pair(folders["pair"]), config.engine, config.model
    engine = cache(lambda: _engine(asked, model, own.length, pair))
    how = Sampling(lambda: engine()[0], asked.batch, config.seed)
    dialogues = _questions(own, config.data.self_made, folders["draft"], pair, encoder, how)
    named = Dataset.from_dict({"name": [one.name for one in dialogues]})
    sides = split_documents(named, own.held_out, config.seed)
    if own.regenerate:
        dialogues = _regenerated(own, asked.batch, folders["draft"], encoder, dialogues, engine)
    if own.source == SELF:
        said = ("\n".join(each["content"] for each in one.messages) for one in dialogues[:SHOWN])
        show("dialogues of the target with itself", [*said])
    encoded = {}
    for title, side in zip(("train", "held out"), sides, strict=True):
        names = {*side["name"]}
        documents, skipped = encode_dialogues(encoder, (d for d in dialogues if d.name in names))
        usable = f"{len(documents)} documents{and_skipped(skipped)}"
        if not documents:
            raise UserError(f"{KEY}.source={own.source}: to {title} there are {usable}.")
        console.print(f"{title}: {usable}")
        encoded[title] = documents
    _show_first(encoder, encoded["train"][0])
    ends = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad = next(token for token in ends if token is not None)
    train, held_out = (
        _packed(title, documents, length, pad) for title, documents in encoded.items()
    )
    return train, held_out


def _packed(title: str, documents: list[Document], length: int, pad: int) -> TokenRows:
    rows = pack_documents(documents, length, pad)
    console.print(
        f"{title}: {len(rows)} rows of {length}, {int(rows.loss.sum()):,} tokens that count,"
        f" {rows.padding:.1%} padding,"
        f" {sum(len(document.tokens) > length for document in documents)} documents cut"
    )
    return rows


def _questions(
    own: DialogueConfig,
    made: SelfMadeConfig,
    folder: Path,
    pair: Pair,
    encoder: ChatEncoder,
    how: Sampling,
) -> list[Dialogue]:
    """Read the dialogues, or let the target ask `made.count` of them.

    None asks what a test prompt asks, and none that it asks is much like one that is traced or
    decoded.
    """
    skipped = Counter[str]()
    if own.source == SELF:
        before, after = encoder.around_user()
        held_out = (
            prompt.text.removeprefix(before).removesuffix(after) for prompt in pair.every_prompt()
        )
        store, other = (
            TraceStore(folder / "questions", "questions"),
            how._replace(seed=how.seed + SEED),
        )
        longest = made.tokens or TURN
        turns = SelfMade(store, other, encoder.tokenizer, user_turn(encoder), longest)
        texts = turns.texts(made.count, held_out)
        dialogues = [
            Dialogue(short_hash(text), [{"role": USER, "content": text}]) for text in texts
        ]
    else:
        dialogues, skipped = read_dialogues(own, how.seed)
    tests = {prompt.question for prompt in pair.of_split("test")}
    kept = [one for one in dialogues if tests.isdisjoint(question_keys(one.messages))]
    skipped["that a test prompt asks"] = len(dialogues) - len(kept)
    console.print(f"{own.source}: {len(kept)} dialogues{and_skipped(+skipped)}")
    return kept


def _regenerated(
    own: DialogueConfig,
    size: int,
    folder: Path,
    encoder: ChatEncoder,
    dialogues: list[Dialogue],
    opened: Callable[[], tuple[Engine, int]],
) -> list[Dialogue]:
    """Return the dialogues that the target answered, with its answers, in shards of `size`.

    Shards that are there already are used. Raises UserError if there are no answers.
    """

    def answer(shard: int, asked: list[Dialogue]) -> list[str]:
        engine, longest = opened()
        used[:] = [engine]
        made = regenerate(engine, encoder, asked, own.setting, own.new_tokens, longest, shard)
        if shard == 0:
            _check_ends(made, own.new_tokens)
        return [json.dumps(asdict(one)) for one in made]

    used = list[Engine]()
    store = TraceStore(folder / ANSWERS, ANSWERS)
    rows = in_shards(store, ANSWERS, dialogues, size, answer)
    for engine in used:
        engine.close()
    given = [Dialogue(**json.loads(row)) for row in rows]
    if not given:
        raise UserError(
            f"{KEY}.regenerate: the target answered none of {len(dialogues)} dialogues. Are the"
            f" questions longer than {KEY}.length less {KEY}.new_tokens, or is this the chat"
            " template of another model?"
        )
    console.print(
        f"the target answered {len(given)} of {len(dialogues)} dialogues;"
        f" {sum(one.cut for one in given)} end with an answer cut at"
        f" {own.new_tokens} tokens"
    )
    return given


def _check_ends(made: list[Dialogue], most: int) -> None:
    """Say so where none of the first answers ended."""
    if made and all(one.cut for one in made):
        console.print(
            f"! none of the first {len(made)} answers ended within {most} tokens: is this the"
            f" model's chat template, and {KEY}.new_tokens enough?"
        )


def _engine(asked: EngineConfig, model: ModelConfig, length: int, pair: Pair) -> tuple[Engine, int]:
    """Return the engine that samples from the target, and the longest sequence it is asked for."""
    engine, dtype = chosen_engine(asked, model), answers_type(model)
    if engine.name == "vllm":
        return VLLMEngine(pair.where("target"), dtype, engine, length), length
    target = pair.target(model.device, dtype, *model.placed[2:])
    return TransformersEngine(target, engine.batch), min(length, target.max_context)


def _show_first(encoder: ChatEncoder, document: Document) -> None:
    """Print a document; what counts is green and in brackets, and the rest dim."""
    text = Text()
    for counts, run in groupby(zip(document.tokens, document.loss, strict=True), key=itemgetter(1)):
        part = shortened(encoder.decode([token for token, _ in run]))
        marked, style = (f"⟦{part}⟧", "bold green") if counts else (part, "dim")
        text.append(marked, style)
    framed("first dialogue: what counts stands in ⟦ ⟧", text)
