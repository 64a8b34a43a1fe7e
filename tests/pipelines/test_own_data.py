"""One's own data by one key, and what a later command takes from the record of a run."""

import ast
import inspect
import json
import json.decoder
import random
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nde_talf.data.dialogues.read import read_dialogues
from nde_talf.data.dialogues.settings import DialogueConfig
from nde_talf.data.text.corpus import load_table
from nde_talf.data.text.tokenizer import train_tokenizer
from nde_talf.pipelines.config.checks import check_config
from nde_talf.pipelines.config.command_line import composed
from nde_talf.pipelines.config.own_data import fit, in_full
from nde_talf.pipelines.config.own_files import question_template
from nde_talf.pipelines.config.schema import Config
from nde_talf.pipelines.run import run
from nde_talf.pipelines.runs.record import completed, merged
from tests.decoding.families import module
from tests.pipelines.launch import finish, said
from tests.refusal import refusal

DOCUMENTED = (node for node in ast.walk(ast.parse(inspect.getsource(random))))
ALL = [
    text
    for node in DOCUMENTED
    if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node))
] + [line for line in inspect.getsource(json.decoder).splitlines() if len(line) > 50]
TEXTS = list(dict.fromkeys(ALL))

TABLES = json.loads(Path(__file__).with_name("own_rows.json").read_text())
"""Rows of files and what is made of them; a table a test."""


def write(folder, name, rows):
    """Write rows in the format of the name; the file's path."""
    path = folder / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows))
    elif name.endswith(".txt"):
        path.write_text("\n".join(" ".join(row["prompt"].split()) for row in rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def fitted(*arguments):
    """The configuration of a command line, and what is wrong with its files."""
    return fit(composed(Config, "model=tiny3", *in_full(arguments)))


def test_words_are_written_out_and_presets_win(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert list(in_full(["data=my file.jsonl", "run=x", "dialogues=./chats"])) == [
        "data=file",
        "data.sets.file.source='my file.jsonl'",
        "run=x",
        "dialogues=file",
        "dialogues.source='./chats'",
    ]
    Path("gsm8k").mkdir()
    left = ["data=gsm8k", "data=gsm", "data=[text,gsm8k]", "model=tiny3"]
    assert list(in_full(left)) == left
    assert list(in_full(["data=openai/gsm8k:main"]))[1].endswith("='openai/gsm8k:main'")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.parquet", "p.txt", "folder/p.jsonl"])
def test_counts_and_splits_follow_the_file(name, tmp_path):
    (tmp_path / "folder").mkdir()
    rows = [{"prompt": text, "id": i} for i, text in enumerate(TEXTS[:60])]
    written = write(tmp_path, name, rows)
    source = str(Path(written).parent) if "/" in name else written
    config, faults = fitted(f"data={source}")
    check_config(config, faults)
    assert len(load_table(source)) == 60 and config.data.prompt_count == 60
    if not name.endswith("txt"):
        given, _ = fitted(f"data={source}", "data.sets.file.template='{prompt} {id}'")
        assert given.data == replace(config.data, sets=given.data.sets)
    assert (config.traces.train_prompts, config.traces.validation_prompts) == (27, 13)
    assert config.data.test_prompts == 20 and config.evaluation.prompts == 14


@pytest.mark.parametrize("row,template", TABLES["columns"])
def test_columns_are_known_by_their_names(row, template, tmp_path):
    rows = load_table(write(tmp_path, "p.jsonl", [row]))
    assert question_template(rows.column_names, "file", "key") == template


@pytest.mark.slow
@pytest.mark.parametrize("rows,words", TABLES["refused"])
def test_a_file_that_will_not_do_is_refused_with_all_else(rows, words, tmp_path):
    source = write(tmp_path, "p.jsonl", rows)
    config, faults = fitted(f"data='{source}'", "engine.workers=2", "selector.table=nowhere")
    with refusal() as told:
        check_config(config, faults)
    assert words in str(told.value) and "selector.table" in str(told.value)


@pytest.mark.slow
def test_a_dry_run_reads_the_data_and_answers_for_another_machine(tmp_path, capsys):
    source = write(tmp_path, "p.jsonl", [{"prompt": text} for text in TEXTS[:60]])
    sizes = {"vocab_size": 300, "max_position_embeddings": 256}
    module("qwen3", sizes).config.save_pretrained(tmp_path / "model")
    train_tokenizer(TEXTS, 300).save_pretrained(tmp_path / "model")
    pair = [f"model.{role}={tmp_path}/model" for role in ("target", "draft")] + ["engine.name=vllm"]
    short = ["traces.new_tokens=16", "evaluation.new_tokens=16", f"paths.checkpoints={tmp_path}"]
    asked = [f"data={source}", *pair, *short, "dry_run=true"]
    run(composed(Config, "model=tiny3", *in_full(asked)))
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("prompts: 60, of at most", "for new ones", "vLLM samples", "latency: to do"):
        assert part in printed, printed
    said = [{"role": "assistant", "content": "yes"}]
    rows = [{"messages": [{"role": "user", "content": text}, *said]} for text in TEXTS[:60]]
    chats = write(tmp_path, "c.jsonl", rows)
    faulty = [*asked, "selector.table=nowhere", "traces.settings=[t0.2]", f"dialogues={chats}"]
    with refusal() as told:
        run(composed(Config, "model=tiny3", *in_full(faulty)))
    for part in ("selector.table", "evaluation.settings", "'dialogues=[plain,file]'"):
        assert part in str(told.value)


@pytest.mark.parametrize("row,turns", TABLES["layouts"])
def test_columns_of_turns_are_known_by_their_names(row, turns, tmp_path):
    rows = [json.loads(json.dumps(row).replace("{}", f"question {i}")) for i in range(60)]
    source = write(tmp_path, "c.jsonl", rows)
    if turns == 1:
        with refusal(r"dialogues\.regenerate=true"):
            read_dialogues(DialogueConfig(source=source), 0)
    config = DialogueConfig(source=source, regenerate=turns == 1)
    dialogues, _ = read_dialogues(config, 0)
    assert len(dialogues) == 60 and len(dialogues[0].messages) == turns


def test_dialogues_of_other_columns_are_asked_for(tmp_path):
    rows = [{"question": f"question {i}", "answer": "b"} for i in range(3)]
    config = DialogueConfig(source=write(tmp_path, "c.jsonl", rows))
    with refusal(r"columns are question, answer\. Set dialogues\.column.*dialogues\.user"):
        read_dialogues(config, 0)
    named = replace(config, user="{question}", assistant="{answer}")
    assert len(read_dialogues(named, 0)[0][0].messages) == 2


def test_a_later_command_takes_the_rest_from_the_record(tmp_path):
    run = tmp_path / "x"
    (run / "pair").mkdir(parents=True)
    record = ["model=tiny_ci", "data=file", "data.prompt_count=60", "draft.steps=40"]
    (run / "command.json").write_text(json.dumps({"arguments": record, "base": None}))
    root = f"paths.checkpoints={tmp_path}"
    for more in (["stage=draft"], ["seed=1"]):  # it has made nothing: others may begin anew
        taken = record if "stage=draft" in more else []
        assert completed(["run=x", root, *more]) == [*taken, "run=x", root, *more]
    (run / "pair" / "pair.json").write_text("{}")
    asked = ["run=x", root, "stage=draft", "draft.steps=50"]
    assert completed(asked) == [*record[:3], *asked]
    asked = ["run=y", root, "base=x", "data=gsm8k"]
    assert completed(asked) == ["model=tiny_ci", "draft.steps=40", *asked]
    assert merged(["++a.b=1", "c=2"], ["a.b=3"]) == ["c=2", "a.b=3"]


@pytest.mark.long
def test_a_file_makes_a_pair_and_its_own_text_trains_the_draft(tmp_path):
    def run_with(*given):
        return said(finish("nde_talf.pipelines.run", [*given, *asked]))

    source = write(tmp_path, "p.jsonl", [{"prompt": text} for text in TEXTS[:60]])
    small = (
        "{hidden: 32, layers: 1, heads: 2, intermediate: 64, steps: 20, batch: 4, max_length: 256}"
    )
    asked = ["run=x", f"paths.checkpoints={tmp_path}", "stage=pair", "tracking=disabled"]
    assert "your prompts with the target's answers" in run_with(
        f"data={source}",
        "model=tiny_ci",
        f"model.target_lm={small}",
        f"model.draft_lm={small}",
        "model.length=64",
    )
    prompts = [json.loads(line) for line in (tmp_path / "x/pair/prompts.jsonl").open()]
    assert len(prompts) == 60 and sum(prompt["split"] == "test" for prompt in prompts) == 20
    assert "prompt_count" not in (tmp_path / "x/command.json").read_text()  # it follows the file
    assert "pair: finished" in run_with()
    printed = run_with("model.length=32")
    assert "model.length: 64 recorded, 32 given" in printed and "To keep it" in printed
    assert "model.length=32" not in (tmp_path / "x/command.json").read_text()
