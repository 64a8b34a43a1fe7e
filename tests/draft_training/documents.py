"""Three documents: packed into one row, and each in a row of its own."""

import torch

from nde_talf.data.dialogues.token_rows import Document, TokenRows, pack_documents

LENGTHS = (7, 6, 4)


def documents():
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(29, (n,), generator=generator) for n in LENGTHS]
    loss = [torch.rand(n, generator=generator) < 0.7 for n in LENGTHS]
    return [
        Document(ids.tolist(), counts.tolist()) for ids, counts in zip(tokens, loss, strict=True)
    ]


def packed():
    """One row of the three documents and three tokens of padding."""
    return pack_documents(documents(), sum(LENGTHS) + 3)


def apart():
    """A row for each document, padded to the longest."""
    rows = [pack_documents([document], max(LENGTHS)) for document in documents()]
    parts = ((row.tokens, row.loss, row.document) for row in rows)
    return TokenRows(*(torch.cat(part) for part in zip(*parts, strict=True)))
