"""Corpora of several domains as one: shares, templates and what is told of bad ones."""

import json
from pathlib import Path

from nde_talf.data.text.corpus import load_mixture
from nde_talf.data.text.settings import Corpus


def mixture(folder, template="Q: {question} A: {answer}"):
    rows = {
        "mathematics": [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(200)],
        "plain": [{"text": f"text {i}"} for i in range(100)],
    }
    files = {name: str(folder / f"{name}.jsonl") for name in rows}
    for name, file in files.items():
        Path(file).write_text("\n".join(map(json.dumps, rows[name])))
    sums = Corpus(files["mathematics"], template=template, draft_fraction=0.25)
    return {"mathematics": sums, "plain": Corpus(files["plain"])}


def test_documents_know_their_domain_and_whether_the_draft_learns_from_them(tmp_path):
    documents = load_mixture(mixture(tmp_path))
    kinds = documents["kind"]
    assert kinds.count("mathematics") == 200 and kinds.count("plain") == 100
    known = [k for k, learns in zip(kinds, documents["for_draft"], strict=True) if learns]
    assert known.count("plain") == 100 and 25 < known.count("mathematics") < 75
    assert "Q: 7 + 7? A: 14" in documents["text"][:]
