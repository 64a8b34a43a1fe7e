"""The frozen list of sources, and the split by content."""

import pytest
import torch

from recipes.small import sources
from recipes.small.sources import Document, Package, documents, of_file
from recipes.small.text import LENGTH, prepared


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `mine` of two files, installed in tmp_path."""
    texts = {"mine/a.py": "def f():\n    return 1\n", "mine/b.py": "def g():\n    return 2\n"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    digests = {name: sources.short_digest(text.encode()) for name, text in texts.items()}
    monkeypatch.setattr(Package, "root", lambda p: tmp_path if p.name == "mine" else None)
    monkeypatch.setattr(sources, "MADE", 20)
    return Package("mine", "1.0", "MIT", digests)


def test_a_side_depends_on_the_content_alone(monkeypatch):
    """Another name keeps the side."""
    monkeypatch.setattr(sources, "MADE", 300)
    everything = list(documents([]))
    assert 0 < sum(d.held_out for d in everything) < 0.05 * len(everything)
    digest = "0" * 12
    assert all(d.held_out for name in "ab" for d in of_file(name, "x = 1\n", digest))


def test_text_is_made_once_and_packed_by_side(tmp_path, monkeypatch):
    """Held-out documents are in no training row."""
    monkeypatch.setattr("recipes.small.text.VOCABULARY", 300)
    made = [
        Document(f"{d}-{i}", d, f"{d} {['seen', 'held'][i % 2]} {i}\n" * 60, bool(i % 2))
        for d in sources.DOMAINS
        for i in range(6)
    ]
    text, again = (prepared(tmp_path / "text", texts) for texts in (made, []))
    assert torch.equal(text.train, again.train) and text.train.dtype == torch.int16
    assert set(text.held_out) == set(sources.DOMAINS) and text.train.shape[1] == LENGTH
    assert "held" not in text.tokenizer.decode(text.train.flatten())
    assert "seen" not in text.tokenizer.decode(text.held_out["code"].flatten())
    assert 0 < text.bits_a_byte({"code": 1.0})["code"] < 1 / 0.69
