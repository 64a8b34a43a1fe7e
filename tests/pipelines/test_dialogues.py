"""Dialogues of a file as rows to train on: from the set's answers, from the target's own, and again
after an interruption.
"""

import json

import pytest
import torch

from nde_talf.data.dialogues.chat_mask import ChatEncoder
from nde_talf.data.dialogues.read import Dialogue, in_order
from nde_talf.data.dialogues.settings import DialogueConfig
from nde_talf.data.dialogues.token_rows import PADDING, TokenRows
from nde_talf.data.engines.settings import EngineConfig
from nde_talf.data.text.conversation import question_keys
from nde_talf.data.text.pair import Pair
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.text.tokenizer import END_OF_TEXT, train_tokenizer
from nde_talf.data.traces.store import TraceStore
from nde_talf.pipelines.config.command_line import composed
from nde_talf.pipelines.config.schema import Config
from nde_talf.pipelines.stages.dialogues import dialogue_rows
from tests.data.chat_templates import family_tokenizer
from tests.draft_training.heads import tiny_target

COUNT, LENGTH, NEW_TOKENS = 30, 96, 12
QUESTIONS = [f"What is {i} plus {i}?" for i in range(COUNT)]
ANSWERS = [f"It is {2 * i}." for i in range(COUNT)]


@pytest.fixture(scope="module")
def tokenizer():
    return family_tokenizer("llama3", QUESTIONS + ANSWERS)


@pytest.fixture
def folders(tmp_path, tokenizer):
    target = tiny_target(vocabulary=len(tokenizer))
    target.module.generation_config.eos_token_id = tokenizer.eos_token_id
    target.module.save_pretrained(tmp_path / "pair/target")
    rows = torch.zeros(2, 8, dtype=torch.long)
    (key,) = question_keys(in_order(["Tested?"]))
    text = f"Q: Tes [...] {QUESTIONS[0]} A:"  # shortened, and it holds another's question
    prompts = [Prompt(str(i), "text", text, [i], question=key) for i in range(4)]
    Pair(tmp_path / "pair").write("target", None, prompts, 2, rows, rows)
    return {"pair": tmp_path / "pair", "draft": tmp_path / "draft"}


def config(folders, **options) -> Config:
    source = folders["pair"] / "chats.jsonl"
    turns = [
        [{"from": "human", "value": q}, {"from": "gpt", "value": a}]
        for q, a in zip([*QUESTIONS, "Tested?"], [*ANSWERS, "Yes."], strict=True)
    ]
    rows = [{"conversations": each} for each in (*turns, turns[0][1:])]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"length": LENGTH, "held_out": 0.3, "new_tokens": NEW_TOKENS}
    dialogues = DialogueConfig(**{"source": str(source), **sizes, **options})
    return Config(dialogues=dialogues, engine=EngineConfig(batch=8))


def rows_of(config, folders, tokenizer):
    return dialogue_rows(config, config.dialogues, folders, tokenizer, 512)


def said(rows: TokenRows, tokenizer) -> list[str]:
    """What counts in every document, sorted."""
    counted = []
    for tokens, loss, document in zip(rows.tokens, rows.loss, rows.document, strict=True):
        for number in range(int(document.max()) + 1):
            counted.append(tokenizer.decode(tokens[loss & (document == number)]))
    return sorted(counted)


def test_rows_hold_every_dialogue_once_on_one_side(folders, tokenizer, capsys):
    train, held_out = rows_of(config(folders), folders, tokenizer)
    both = said(train, tokenizer) + said(held_out, tokenizer)
    assert sorted(both) == sorted(answer + "<|eot_id|>" for answer in ANSWERS)
    assert len(held_out) and len(said(train, tokenizer)) > len(said(held_out, tokenizer))
    assert train.packed and not train.loss[train.document == PADDING].any()
    again, _ = rows_of(config(folders), folders, tokenizer)
    assert (train.tokens == again.tokens).all() and (train.loss == again.loss).all()
    printed = " ".join(capsys.readouterr().out.split())
    skipped = "skipped 1 without a user's turn; skipped 1 that a test prompt asks"
    assert f"{COUNT} dialogues; {skipped}" in printed
    assert "% padding" in printed and "first dialogue: what counts" in printed


@pytest.mark.slow
def test_the_target_answers_itself_and_goes_on_where_it_was_stopped(folders, tokenizer, capsys):
    configured = config(folders, regenerate=True)
    rows = rows_of(configured, folders, tokenizer)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"the target answered {COUNT} of {COUNT} dialogues" in printed
    assert "none of the first 8 answers ended within" in printed
    assert not set(said(rows[0], tokenizer)) & {answer + "<|eot_id|>" for answer in ANSWERS}
    store = TraceStore(folders["draft"] / "answers", "answers")
    name = sorted(store.shards)[1]
    (store.folder / name).unlink()
    times = {path.name: path.stat().st_mtime_ns for path in store.folder.glob("*.parquet")}
    again = rows_of(configured, folders, tokenizer)
    for before, after in zip(rows, again, strict=True):
        assert (before.tokens == after.tokens).all() and (before.loss == after.loss).all()
    assert all((store.folder / kept).stat().st_mtime_ns == time for kept, time in times.items())
    assert (store.folder / name).exists()


def test_the_plain_template_masks_exactly():
    preset = composed(Config, "dialogues=[plain,sharegpt]").dialogues
    assert preset.column == "conversations" and preset.chat_template
    tokenizer = train_tokenizer(QUESTIONS + ANSWERS, 300)
    said = zip(("human", "gpt") * 2, ("Hi?", "Hello.", QUESTIONS[0], ANSWERS[0]), strict=True)
    turns = [{"from": who, "value": text} for who, text in said]
    (document,) = ChatEncoder(tokenizer, preset.chat_template).documents(
        Dialogue("one", in_order(turns))
    )
    counted = [
        token for token, counts in zip(document.tokens, document.loss, strict=True) if counts
    ]
    assert tokenizer.decode(counted) == f"Hello.{END_OF_TEXT}{ANSWERS[0]}{END_OF_TEXT}"
