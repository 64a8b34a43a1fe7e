"""Text that the shipped pair learns: tokenizer and packed rows, made once from the frozen list."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nde_talf.data.text.corpus import by_hash
from nde_talf.data.text.pair import spread
from nde_talf.data.text.tokenizer import pack, train_tokenizer
from nde_talf.decoding.common.files import write_atomically
from recipes.small.sources import DOMAINS, Document

VOCABULARY = 4096
LENGTH = 512
"""Tokens of a row."""
TOKENIZER_FRACTION = 0.25
"""Fraction of the training documents that the tokenizer is trained on."""
HELD_OUT_ROWS = 96
"""Rows of each domain that the held-out loss is computed on, at most."""
TOKENIZER, ROWS = "tokenizer", "rows.safetensors"


@dataclass(frozen=True)
class Text:
    """Text that a model of the recipe is trained and judged on.

    Attributes:
        train: rows of token ids, [rows, LENGTH], int16.
        held_out: the same by domain.
        bytes_a_token: by domain, of the held-out rows.
    """

    tokenizer: PreTrainedTokenizerBase
    train: Tensor
    held_out: dict[str, Tensor]
    bytes_a_token: dict[str, float]

    def bits_a_byte(self, nats: dict[str, float]) -> dict[str, float]:
        """Convert losses by domain from nats a token."""
        return {d: each / self.bytes_a_token[d] / math.log(2) for d, each in nats.items()}


def prepared(folder: Path, texts: Iterable[Document]) -> Text:
    """Read the text in `folder`, which is made of the documents if it isn't there."""
    if not folder.exists():
        everything = sorted(texts, key=lambda document: by_hash(f"order/{document.name}"))
        write_atomically(folder, lambda temporary: _prepare(temporary, everything))
    tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER, trust_remote_code=False)
    rows = load_file(folder / ROWS)
    train = rows.pop("train")
    return Text(tokenizer, train, rows, {d: bytes_a_token(tokenizer, x) for d, x in rows.items()})


def bytes_a_token(tokenizer: PreTrainedTokenizerBase, rows: Tensor) -> float:
    """Return the mean number of bytes of a token of these rows."""
    texts = tokenizer.batch_decode(rows.tolist(), skip_special_tokens=True)
    return sum(len(text.encode()) for text in texts) / rows.numel()


def _prepare(folder: Path, documents: list[Document]) -> None:
    train = [document for document in documents if not document.held_out]
    chosen = [d.text for d in train if by_hash(f"tokenizer/{d.name}") < TOKENIZER_FRACTION]
    tokenizer = train_tokenizer(chosen, VOCABULARY)
    tokenizer.save_pretrained(folder / TOKENIZER)
    rows = {"train": pack(tokenizer, [document.text for document in train], LENGTH).to(torch.int16)}
    for domain in DOMAINS:
        texts = [d.text for d in documents if d.held_out and d.domain == domain]
        packed = pack(tokenizer, texts, LENGTH).to(torch.int16)
        rows[domain] = spread(packed, HELD_OUT_ROWS).contiguous()
    save_file(rows, folder / ROWS)
