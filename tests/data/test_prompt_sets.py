"""Prompt sets of configs/data: composed by Hydra, read by the real loader from a small file in the
set's own schema.
"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer

from nde_talf.data.text.pair import assign_splits
from nde_talf.data.text.prompt_sets import load_sets
from nde_talf.data.text.prompts import Prompt, encode_prompts, one_id_a_group
from nde_talf.data.text.settings import PromptPart, PromptSet
from nde_talf.data.text.tokenizer import train_tokenizer
from nde_talf.pipelines.config import command_line as cli
from nde_talf.pipelines.config.schema import Config
from tests.refusal import refusal

WORDS = " ".join(f"word{i}" for i in range(900))
ROWS = json.loads(Path(__file__).with_name("prompt_rows.json").read_text())
"""A row of some sets' hub schema, with its number for {} and a long text for WORDS."""
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    trained = train_tokenizer([WORDS, "Find Prove Story Question"], 400)
    trained.chat_template = TEMPLATE
    return trained


def written(folder, name, rows):
    """A file of 30 rows."""
    path = folder / f"{name}.jsonl"
    lines = [
        json.dumps(rows).replace("{}", f"{name} {i}").replace("WORDS", WORDS) for i in range(30)
    ]
    path.write_text("\n".join(lines))
    return str(path)


def local(folder, *names):
    """The sets by name, with files in place of the hub."""
    source = ["data.sets.file.source=x.jsonl"] if "file" in names else []
    sets = cli.composed(Config, f"data=[{','.join(names)}]", *source).data.sets
    for name, remote in sets.items():
        if not remote.parts:
            source = written(folder, name, ROWS[name])
            sets[name] = replace(remote, source=source)
            continue
        parts = []
        for n, part in enumerate(remote.parts):
            (rows,) = (row for known, row in ROWS.items() if known in part.source)
            parts.append(PromptPart(written(folder, f"{name}{n}", rows), part.template))
        sets[name] = replace(remote, parts=parts)
    return sets


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*ROWS, "translation"} - {"opus_books", "opensubtitles"}))
def test_every_set_renders_its_own_schema(name, tmp_path, tokenizer):
    sets = local(tmp_path, name)
    prompts, prompt_set = load_sets(sets, 16, 0, tokenizer), sets[name]
    assert len({p.text for p in prompts}) == 16
    for prompt in prompts:
        assert prompt.kind == (prompt_set.kind or name)
        in_turn = prompt.text.startswith("<|user|>"), prompt.text.endswith("<|assistant|>")
        asked = prompt_set.chat is not False  # null: the tokenizer has a template
        assert in_turn == (asked, asked) and prompt.chat == asked
        if prompt_set.cut:
            assert 0.5 * prompt_set.cut < len(tokenizer(prompt.text)["input_ids"]) <= prompt_set.cut
        assert name != "sharegpt" or ("Why" in prompt.text and "Be good" not in prompt.text)
    heads = Counter(p.text.removeprefix("<|user|>Translate from ").split(":")[0] for p in prompts)
    assert name != "translation" or (len(heads), {*heads.values()}) == (4, {4})


def test_several_sets_come_in_equal_parts_and_in_turn(tmp_path, tokenizer):
    names = ["math500", "livecodebench", "mt_bench"]
    sets = local(tmp_path, *names)
    prompts = load_sets(sets, 18, 0, tokenizer)
    assert [p.kind for p in prompts] == names * 6
    assert prompts == load_sets(sets, 18, 0, tokenizer) != load_sets(sets, 18, 1, tokenizer)


def test_windows_of_one_document_are_on_one_side():
    texts = [
        range(100 * at + 7 * part, 100 * at + 7 * part + 40)
        for at in range(8)
        for part in (0, 1, 2)
    ]
    template = [5] * 30  # of all of them
    prompts = [Prompt(str(at), "a", tokens=[*template, *text]) for at, text in enumerate(texts)]
    splits = assign_splits(prompts, 9)
    assert splits.count("test") == 9
    assert all(len({*splits[at : at + 3]}) == 1 for at in range(0, 24, 3))
    assert [prompt.id for prompt in one_id_a_group(prompts)[:6]] == ["0"] * 3 + ["3"] * 3
    assert one_id_a_group(prompts[:9]) == prompts[:9]  # a third is too much for a fold


def test_what_does_not_fit_is_told(tmp_path, tokenizer):
    source = written(tmp_path, "q", {"question": "Question {}", "label": 1})
    prompt_set = PromptSet(source=source, template="{question}", chat=True, max_tokens=50)
    with refusal(r"has 0; skipped 30 longer than data\.sets\.q\.max_tokens=2"):
        load_sets({"q": replace(prompt_set, max_tokens=2)}, 1, 0, tokenizer)
    with refusal(r"set data\.sets\.q\.chat=false"):
        load_sets({"q": prompt_set}, 5, 0, train_tokenizer([WORDS], 300))
    # Not in Rust, it tells no token's place in the text.
    (cut,) = load_sets({"q": replace(prompt_set, chat=False, cut=9)}, 1, 0, ByT5Tokenizer())
    assert cut.text == "Question"
    # The second set has no share of one prompt.
    load_sets({"q": prompt_set, "r": replace(prompt_set, streaming=True)}, 1, 0, tokenizer)


@pytest.mark.parametrize("chat", [True, False])
def test_special_tokens_are_there_once_with_and_without_a_chat_template(tmp_path, chat):
    trained = train_tokenizer([WORDS, TEMPLATE], 400)
    trained.add_special_tokens({"bos_token": "<s>"})
    begin = trained.bos_token_id
    trained.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    trained.chat_template = "{{ bos_token }}" + TEMPLATE
    source = written(tmp_path, "q", {"question": "Question {}"})
    asked = PromptSet(source=source, template="{question}", chat=chat)
    prompts = load_sets({"q": asked}, 4, 0, trained)
    for special, count in ((True, 1), (False, int(chat))):
        for prompt in encode_prompts(prompts, trained, special=special):
            assert prompt.tokens.count(begin) == count == prompt.tokens[:1].count(begin)
            assert trained.decode(prompt.tokens).count("Question") == 1


def test_a_conversation_is_a_prompt_and_a_long_one_loses_its_first_turns(tmp_path, tokenizer):
    turns = [
        ("system", "Be good."),
        ("user", "First {}?"),
        ("assistant", "So."),
        ("user", "Then {}?"),
    ]
    messages = [{"role": role, "content": text} for role, text in turns]
    source = written(tmp_path, "c", {"chat": messages, "tools": ["x"]})
    prompt_set = PromptSet(source=source, template="{chat}", chat=None, shorten=True)
    (whole,) = load_sets({"c": prompt_set}, 1, 0, tokenizer)
    number = whole.text.partition("First c ")[2].partition("?")[0]
    shown = "".join(f"<|{role}|>{text.replace('{}', f'c {number}')}<|end|>" for role, text in turns)
    assert whole.text == shown + "<|assistant|>"
    text = whole.text
    for kept in (f"Then c {number}?<", "Then c<"):  # one token less than what was there before
        most = len(tokenizer(text)["input_ids"]) - 1
        (cut,) = load_sets({"c": replace(prompt_set, max_tokens=most)}, 1, 0, tokenizer)
        text = cut.text
        assert "First" not in text and f"<|user|>{kept}" in text
        assert text.startswith("<|system|>Be good.") and cut.question == whole.question
    base = replace(prompt_set, chat=False)
    (plain,) = load_sets({"c": base}, 1, 0, tokenizer)
    assert plain.text == f"First c {number}?"
