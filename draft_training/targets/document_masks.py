"""Documents packed into rows: masks, positions, and the roots that count.

Pure functions of `TokenRows`' parts. An entry of the head, (x_{t+1}, h_t), belongs to a document if
both its tokens do. No other entry attends to an entry across two documents.
"""

import torch
from torch import Tensor


def same_document(document: Tensor, dtype: torch.dtype) -> Tensor:
    """Make the additive causal mask [B, 1, n, n] for rows of several documents.

    It is 0 where a token sees another of its own `document` [B, n], else the dtype's minimum.
    """
    n = document.shape[1]
    hidden = unseen(torch.arange(n, device=document.device).expand_as(document), n, document)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


def unseen(at: Tensor, length: int, document: Tensor | None) -> Tensor:
    """Mark the tokens of a row that are hidden from the tokens at the indices `at` [B, R].

    Returns bool [B, R, length]: later tokens and, with several documents [B, length], tokens of
    other documents.
    """
    later = torch.arange(length, device=at.device) > at[..., None]
    if document is None:
        return later
    return later | (document[:, None] != document.gather(1, at)[..., None])


def document_positions(document: Tensor) -> Tensor:
    """Return the index of every token in its own document [B, L], from 0."""
    index = torch.arange(document.shape[1], device=document.device).expand_as(document)
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


def entry_documents(document: Tensor) -> Tensor:
    """Number the document of every entry [B, L-1] of rows `document` [B, L].

    An entry across two documents has a number of its own.
    """
    index = torch.arange(document.shape[1] - 1, device=document.device)
    return torch.where(document[:, 1:] == document[:, :-1], document[:, 1:], -2 - index)


def counted_roots(loss: Tensor, document: Tensor, ahead: int = 0) -> Tensor:
    """Mark the tokens [B, L] that are roots and count.

    A root shares its document with the token before it and the token `ahead` + 1 after it, whose
    prediction counts (`loss` [B, L]).
    """
    counts = torch.zeros_like(loss)
    last = loss.shape[1] - 1 - ahead
    if last > 1:
        here = document[:, 1:last]
        counts[:, 1:last] = loss[:, 2 + ahead :] & (here >= 0) & (here == document[:, : last - 1])
        counts[:, 1:last] &= here == document[:, 2 + ahead :]
    return counts


def choose_roots(
    counts: Tensor, max_roots: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw at most `max_roots` (0: all) of every row's roots that count (`counts` [B, L]).

    Returns roots [B, R] and weights [B, R]: the weighted sum over the chosen roots has the mean
    over all counted roots as its expectation. Rows with fewer roots are filled up with weight 0.
    `generator` is on the CPU.
    """
    device, counts = counts.device, counts.cpu()
    totals = counts.sum(1)
    width = int(totals.max()) if max_roots == 0 else min(max_roots, int(totals.max()))
    keys = torch.rand(counts.shape, generator=generator).masked_fill(~counts, 2.0)
    roots = keys.topk(width, 1, largest=False).indices.sort(1).values
    valid = counts.gather(1, roots)
    fraction = totals.float() / valid.sum(1).clamp(min=1) / totals.sum().clamp(min=1)
    return roots.clamp(min=1).to(device), (valid * fraction[:, None]).to(device)
