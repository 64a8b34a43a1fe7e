"""Dialogues for stage draft: read, answered by the target if asked for, masked, split and packed into rows."""

import json
from collections import Counter
from pathlib import Path

from datasets import Dataset
from rich.panel import Panel
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from data.dialogues.chat_mask import ChatEncoder, encode_dialogues
from data.dialogues.pack import Document, pack_documents, padding_share
from data.dialogues.read import KEY, Dialogue, read_dialogues
from data.dialogues.regenerate import answered
from data.dialogues.token_rows import TokenRows
from data.engines.base import Engine
from data.engines.transformers import TransformersEngine
from data.engines.vllm import VLLMEngine
from data.text.corpus import split_documents
from data.text.pair import Pair
from data.traces.store import TraceStore
from decoding.common.errors import UserError
from decoding.common.progress import track
from decoding.sampling import SamplingSetting
from pipelines.config import Config
from pipelines.pair import shortened
from pipelines.stage import console
from pipelines.traces import chosen_engine


def dialogue_rows(config: Config, folders: dict[str, Path], tokenizer: PreTrainedTokenizerBase) -> tuple[TokenRows, TokenRows]:
    """(train, held out) of `config.dialogues`, rows of its length; a dialogue is on one side with everything it says.

    The target's own answers go to shards under `folders["draft"]`, from which an interrupted run goes on. Raises UserError as
    `read_dialogues`, `ChatEncoder` and the engine do, for a side without dialogues, and where nothing is left to learn from.
    """
    own = config.dialogues
    encoder = ChatEncoder(tokenizer, own.chat_template, own.template_options, KEY)
    dialogues, skipped = read_dialogues(own, config.seed)
    console.print(f"{own.source}: {len(dialogues)} dialogues" + _and_skipped(skipped))
    if own.regenerate:
        dialogues = _answered(config, folders, encoder, dialogues)
    named = Dataset.from_dict({"name": [one.name for one in dialogues], "at": list(range(len(dialogues)))})
    sides = split_documents(named, own.held_out, config.seed)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    packed = []
    for title, side in zip(("train", "held out"), sides, strict=True):
        documents, skipped = encode_dialogues(encoder, (dialogues[at] for at in side["at"]))
        if not documents:
            raise UserError(f"{KEY}.source={own.source}: no dialogue to {title} can be used{_and_skipped(skipped)}.")
        if not packed:
            console.print(Panel(_coloured(encoder, documents[0]), title="first dialogue: what counts", title_align="left"))
        rows = pack_documents(documents, own.length, pad)
        packed.append(rows)
        console.print(
            f"{title}: {len(documents)} documents in {len(rows)} rows of {own.length}, {int(rows.loss.sum()):,} tokens that "
            f"count, {padding_share(rows):.1%} padding, {sum(len(d.tokens) > own.length for d in documents)} cut"
            + _and_skipped(skipped)
        )
    return packed[0], packed[1]


def _answered(config: Config, folders: dict[str, Path], encoder: ChatEncoder, dialogues: list[Dialogue]) -> list[Dialogue]:
    """The dialogues with the target's answers, shard by shard; shards that are there and of these dialogues are kept."""
    own, store = config.dialogues, TraceStore(folders["draft"] / "answers", "answers")
    setting = SamplingSetting(own.temperature, own.top_p)
    shards = [dialogues[at : at + own.shard] for at in range(0, len(dialogues), own.shard)]
    names = [store.name(i, len(shards)) for i in range(len(shards))]

    def kept(i: int) -> bool:
        return store.holds(names[i]) and store.lists(names[i])["asked"] == [one.name for one in shards[i]]

    todo = [i for i in range(len(shards)) if not kept(i)]
    if todo:
        engine, longest = _engine(config, Pair(folders["pair"]))
        for i in track(todo, "answers", len(shards), "shard", len(shards) - len(todo)):
            found = {one.name: one for one in answered(engine, encoder, shards[i], setting, own.new_tokens, longest, i)}
            there = [found.get(one.name) for one in shards[i]]
            messages = [json.dumps(one.messages if one else []) for one in there]
            columns = {
                "asked": [one.name for one in shards[i]],
                "messages": messages,
                "cut": [bool(one and one.cut) for one in there],
            }
            store.write(names[i], columns)
        engine.close()
    rows = [row for name in names for row in zip(*store.lists(name).values(), strict=True)]
    found = [Dialogue(asked, json.loads(messages), cut) for asked, messages, cut in rows if messages != "[]"]
    if not found:
        raise UserError(
            f"{KEY}.regenerate: the target answered none of {len(rows)} dialogues. Are the questions longer than {KEY}.length "
            f"less {KEY}.new_tokens, or is this the chat template of another model?"
        )
    console.print(
        f"the target answered {len(found)} of {len(rows)} dialogues; {sum(one.cut for one in found)} end with an answer cut at "
        f"{own.new_tokens} tokens"
    )
    return found


def _engine(config: Config, pair: Pair) -> tuple[Engine, int]:
    """What samples from the target, and the longest sequence it is asked for."""
    length = config.dialogues.length
    engine = chosen_engine(config, min(length, config.engine.max_length or length))
    if engine.name == "vllm":
        return VLLMEngine(pair.where("target"), config.model.dtype, engine), engine.max_length or length
    target = pair.target(config.model.device, config.model.dtype)
    return TransformersEngine(target), min(length, target.max_context)


def _coloured(encoder: ChatEncoder, document: Document) -> Text:
    """A document's text; what counts is green, the rest dim."""
    text, start = Text(), 0
    for end in range(1, len(document.tokens) + 1):
        if end == len(document.tokens) or document.loss[end] != document.loss[start]:
            style = "bold green" if document.loss[start] else "dim"
            text.append(shortened(encoder.decode(document.tokens[start:end])), style)
            start = end
    return text


def _and_skipped(skipped: Counter[str]) -> str:
    return "".join(f"; skipped {count} {reason}" for reason, count in skipped.most_common())
