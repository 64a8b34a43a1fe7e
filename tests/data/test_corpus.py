"""Documents from every kind of source, their split, the tokenizer, and rows packed of them."""

import pytest
from tokenizers.processors import TemplateProcessing

from nde_talf.data.text.corpus import (
    load_documents,
    load_mixture,
    load_table,
    source_digest,
    split_documents,
)
from nde_talf.data.text.settings import Corpus
from nde_talf.data.text.tokenizer import pack, train_tokenizer
from nde_talf.decoding.common.errors import UserError


@pytest.fixture(scope="module")
def standard_library():
    return load_documents("stdlib")


@pytest.mark.slow
def test_the_split_parts_the_documents_in_the_asked_proportion(standard_library):
    held_out = split_documents(standard_library, 0.1, seed=0)[1]
    assert 0.05 < len(held_out) / len(standard_library) < 0.16
    assert set(split_documents(standard_library, 0.1, seed=1)[1]["name"]) != set(held_out["name"])
    with pytest.raises(UserError, match="held out"):
        split_documents(standard_library.select(range(2)), 1e-9, seed=0)


def test_a_digest_of_a_folder_is_that_of_the_files_that_are_read(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("one")
    seen = [source_digest(str(tmp_path)), source_digest(str(tmp_path / "in/a.txt"))]
    (tmp_path / "notes").write_text("not read")
    assert source_digest(str(tmp_path)) == seen[0]
    (tmp_path / "b.md").write_text("two")
    seen.append(source_digest(str(tmp_path)))
    (tmp_path / "b.md").rename(tmp_path / "c.md")
    assert len({*seen, source_digest(str(tmp_path))}) == 4
    assert [source_digest(name) for name in ("", "stdlib", "org/name")] == [None] * 3


def test_texts_of_a_column_become_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"story": "{x}"}}\n' for x in ("one", "two", "")))
    assert load_documents(str(tmp_path / "a.jsonl"), "story")["text"][:] == ["one", "two"]


AS_WRITTEN = '"2024-01-01" 1.10 12345678901234567890 null "日" "\\ud83d\\ude00\u2028" NaN 1e3'
LINES = "".join(
    f'{{"{i}": 0, "text": {each}}}\r\n\r\n' for i, each in enumerate(AS_WRITTEN.split(" "))
)


@pytest.mark.parametrize(
    "name,content,shown",
    [
        (
            "a.jsonl",
            "\ufeff" + LINES,
            "2024-01-01 1.1 12345678901234567890 None 日 😀\u2028 None 1000.0",
        ),
        ("a.jsonl", '[{"text": "x"},\n{"text": 1.50, "n": 1}]', "x 1.5"),
        ("a.json", '[\n{"text": "x"}, "y"\n]\n', "x y"),
        ("a.json", '{"text": "x"}\n{"text": "y"}', "x y"),
        ("a.json", '{\n"text": "x"\n}', "x"),
        ("a.csv", "id;text\n007;NA\n8;2024-01-01\n9;1.10\n", "NA 2024-01-01 1.10"),
    ],
)
def test_a_text_arrives_as_it_is_written(name, content, shown, tmp_path):
    (tmp_path / name).write_bytes(content.encode())
    table = load_table(str(tmp_path / name))
    assert " ".join("{text}".format(**row) for row in table) == shown


BROKEN = [b'{"text": ', b"[1]", b"\xff", b'"\\ud800"', b'{"a": ' + b"[" * 9999]


@pytest.mark.parametrize(
    "broken,fault",
    [*zip(BROKEN, ["line 2, column 9", "it is no object", "'utf-8'", "", ""], strict=True)],
)
def test_a_line_that_cannot_be_read_is_refused_with_its_number(broken, fault, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'"x"\n' + broken + b"\n")
    with pytest.raises(UserError, match=r"a\.jsonl: it cannot be read.*line 2") as refused:
        load_table(str(tmp_path / "a.jsonl"))
    assert fault in str(refused.value)
    for whole in (broken, b"\n \n", b'[{"text": "x"}, {"te'):
        (tmp_path / "a.json").write_bytes(whole)
        with pytest.raises(UserError, match=r"a\.json: it cannot be read"):
            load_table(str(tmp_path / "a.json"))


@pytest.mark.parametrize("source", ["org/nowhere", "org/nowhere:main"])
def test_a_dataset_on_a_hub_out_of_reach_is_told(source):
    with pytest.raises(UserError, match=f"{source}: the hub cannot be reached"):
        load_table(source)


def test_tables_of_a_folder_are_one_and_what_describes_them_is_no_text(tmp_path):
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "b.txt").write_text("two\nthree")
    assert [*load_table(str(tmp_path))] == [{"text": "two\nthree"}]
    (tmp_path / "c.jsonl").write_text('{"text": 4, "n": 1}')
    (tmp_path / "d.jsonl").write_text('{"text": "one"}')
    table = load_table(str(tmp_path))
    assert table.column_names == ["text", "n"]
    assert [*table] == [{"text": 4, "n": 1}, {"text": "one", "n": None}]


def test_rows_are_told_apart_by_their_texts_and_equal_texts_stay_together(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"name": "set", "text": "{text}"}}\n' for text in "aab"))
    for template in ("{text}", "Q: {text}"):
        names = load_mixture({"set": Corpus(str(path), template)})["name"]
        assert len(names) == 3 and len({*names}) == 2


def test_a_long_plain_text_becomes_several_documents_that_lose_no_paragraph(tmp_path):
    paragraphs = [f"paragraph {i} " + "word " * 200 for i in range(100)]
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(paragraphs))
    documents = load_documents(str(path))
    assert len(documents) > 3
    assert "\n\n".join(documents["text"]).split("\n\n") == paragraphs


def test_packed_rows_hold_the_documents_end_to_end(standard_library):
    texts = standard_library["text"][:5]
    tokenizer = train_tokenizer(texts, 300)
    rows = pack(tokenizer, texts, 64)
    stream = [id for text in texts for id in [0, *tokenizer(text)["input_ids"]]]
    assert rows.shape == (len(stream) // 64, 64)
    assert rows.flatten().tolist() == stream[: rows.numel()]
    with pytest.raises(UserError, match="less than one row"):
        pack(tokenizer, ["x"], 64)
    begin = tokenizer.convert_tokens_to_ids("!")  # of a tokenizer that begins texts with a token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("! $A", None, [("!", begin)])
    assert pack(tokenizer, ["a", "b"], 2)[:, 0].tolist() == [
        0,
        tokenizer("a")["input_ids"][1],
        begin,
    ]
