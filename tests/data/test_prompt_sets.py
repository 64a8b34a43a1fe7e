"""Every prompt set of configs/data: composed by Hydra, read by the real loader from a small file in
the set's own schema.
"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from tokenizers.processors import TemplateProcessing

from nde_talf.data.text.pair import test_splits as splits_of
from nde_talf.data.text.prompt_sets import first_of_each, load_sets
from nde_talf.data.text.prompts import encode_prompts
from nde_talf.data.text.settings import PromptPart, PromptSet
from nde_talf.data.text.tokenizer import train_tokenizer
from nde_talf.decoding.common.errors import UserError
from nde_talf.pipelines import cli
from nde_talf.pipelines.config import Config

WORDS = " ".join(f"word{i}" for i in range(900))
# A row of some sets' hub schema, number i: plain, of two columns, turns, long texts.
ROWS = {
    "math500": lambda i: {"problem": f"Find {i}.", "answer": "a"},
    "livecodebench": lambda i: {"question_content": f"Sort {i}.", "starter_code": "class A:"},
    "sharegpt": lambda i: {
        "id": str(i),
        "conversations": [
            {"from": "system", "value": "Be good."},
            {"from": "human", "value": f"Why {i}?"},
            {"from": "gpt", "value": "So."},
        ],
    },
    "wikitext2": lambda i: {"text": f"Article {i} {WORDS}"},
    "mt_bench": lambda i: {"category": "math", "prompt": [f"Question {i}?", "And then?"]},
    "file": lambda i: {"text": f"My prompt {i}"},
}
BOOKS = [
    lambda i, to=to: {"id": str(i), "translation": {"en": f"House {to} {i}", to: f"Casa {to} {i}"}}
    for to in ("fr", "es", "it")
]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    trained = train_tokenizer([WORDS, "Find Prove Story Question"], 400)
    trained.chat_template = TEMPLATE
    return trained


def composed(*overrides: str) -> dict[str, PromptSet]:
    return cli.composed(Config, *overrides).data.sets


def write(folder: Path, name: str, rows: list[dict], suffix: str = "jsonl") -> str:
    path = folder / f"{name}.{suffix}"
    if suffix == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def local(remote: PromptSet, name: str, folder: Path, suffix: str = "jsonl") -> PromptSet:
    """The set with files of 30 rows in place of the hub."""
    if not remote.parts:
        return replace(
            remote, source=write(folder, name, [ROWS[name](i) for i in range(30)], suffix)
        )
    parts = []
    for n, part in enumerate(remote.parts):
        if "opus_books" in part.source:
            book = BOOKS[("fr", "es", "it").index(part.source[-2:])]
            rows = [book(i) for i in range(30)]
        else:
            rows = [
                {"english": f"Hello {n} {i}", "non_english": f"Ciao {n} {i}"} for i in range(30)
            ]
        parts.append(PromptPart(write(folder, f"{name}{n}", rows), part.template))
    return replace(remote, parts=parts)


SETS = {*ROWS, "translation"}


def one_set(name: str) -> PromptSet:
    source = ["data.sets.file.source=x.jsonl"] if name == "file" else []
    (prompt_set,) = composed(f"data={name}", *source).values()
    return prompt_set


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", sorted(SETS))
def test_every_set_renders_its_own_schema(name, suffix, tmp_path, tokenizer):
    prompt_set = one_set(name)
    prompts = load_sets({name: local(prompt_set, name, tmp_path, suffix)}, 16, 0, tokenizer)
    assert len({p.text for p in prompts}) == 16
    for prompt in prompts:
        assert prompt.kind == (prompt_set.kind or name)
        in_turn = prompt.text.startswith("<|user|>"), prompt.text.endswith("<|assistant|>")
        asked = prompt_set.chat is not False  # null: the tokenizer has a template
        assert in_turn == (asked, asked) and prompt.chat == asked
        if prompt_set.cut:
            assert 0.5 * prompt_set.cut < len(tokenizer(prompt.text)["input_ids"]) <= prompt_set.cut


def test_parts_are_equal_and_of_a_dialogue_comes_the_first_question(tmp_path, tokenizer):
    names = ("translation", "sharegpt")
    one, other = (
        load_sets({name: local(one_set(name), name, tmp_path)}, 16, 0, tokenizer) for name in names
    )
    heads = Counter(p.text.removeprefix("<|user|>Translate from ").split(":")[0] for p in one)
    assert len(heads) == 4 and set(heads.values()) == {4}
    assert all("Why" in p.text and "Be good" not in p.text for p in other)


def test_several_sets_come_in_equal_parts_and_in_turn(tmp_path, tokenizer):
    sets = composed("data=[math500,livecodebench,mt_bench]")
    assert list(sets) == ["math500", "livecodebench", "mt_bench"]
    sets = {name: local(prompt_set, name, tmp_path) for name, prompt_set in sets.items()}
    prompts = load_sets(sets, 18, 0, tokenizer)
    assert [p.kind for p in prompts] == ["math500", "livecodebench", "mt_bench"] * 6
    assert prompts == load_sets(sets, 18, 0, tokenizer) != load_sets(sets, 18, 1, tokenizer)
    assert list(first_of_each(prompts)) == list(sets)


def test_every_kind_has_its_share_of_test_prompts():
    kinds = ["a"] * 7 + ["b"] * 2 + ["c"] * 21
    splits = splits_of(kinds, 10)
    assert splits.count("test") == 10
    for kind in set(kinds):
        tests = sum(k == kind and s == "test" for k, s in zip(kinds, splits, strict=True))
        assert abs(tests - kinds.count(kind) / 3) <= 1


def test_what_does_not_fit_is_told(tmp_path, tokenizer):
    rows = [{"question": f"Question {i}", "label": i} for i in range(10)] + [
        {"question": WORDS, "label": 0}
    ]
    prompt_set = PromptSet(
        source=write(tmp_path, "q", rows), template="{question}", chat=True, max_tokens=50
    )
    said = []
    assert len(load_sets({"q": prompt_set}, 10, 0, tokenizer, said.append)) == 10
    for change, count, words in (
        (
            {"template": "{prompt}"},
            5,
            r"data\.sets\.q\.template asks for the column 'prompt'.*question, label",
        ),
        ({"template": "{label[en]}"}, 5, r"data\.sets\.q\.template='{label\[en\]}' does not fit"),
        ({}, 11, r"data\.sets\.q: 11 prompts.*has 10 and 1 longer than data\.sets\.q\.max_tokens"),
        ({"source": str(tmp_path / "none.jsonl")}, 5, "none.jsonl"),
        ({"source": None}, 5, r"data\.sets\.q\.source is not given"),
    ):
        with pytest.raises(UserError, match=words):
            load_sets({"q": replace(prompt_set, **change)}, count, 0, tokenizer, said.append)
    plain = train_tokenizer([WORDS], 300)
    with pytest.raises(UserError, match=r"set data\.sets\.q\.chat=false"):
        load_sets({"q": prompt_set}, 5, 0, plain)


def test_special_tokens_are_there_once_with_and_without_a_chat_template(tmp_path):
    trained = train_tokenizer([WORDS, TEMPLATE], 400)
    trained.add_special_tokens({"bos_token": "<s>"})
    begin = trained.bos_token_id
    trained.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    trained.chat_template = "{{ bos_token }}" + TEMPLATE
    source = write(tmp_path, "q", [{"question": f"Question {i}"} for i in range(4)])
    for chat in (True, False):
        prompts = load_sets(
            {"q": PromptSet(source=source, template="{question}", chat=chat)}, 4, 0, trained
        )
        for special, count in ((True, 1), (False, int(chat))):
            for ids in (
                prompt.tokens for prompt in encode_prompts(prompts, trained, special=special)
            ):
                assert ids.count(begin) == count and (not count or ids[0] == begin)
                assert trained.decode(ids, skip_special_tokens=True).count("Question") == 1
