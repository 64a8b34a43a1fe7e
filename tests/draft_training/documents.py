"""Three documents: packed into one row, and each in a row of its own."""

import torch

from nde_talf.data.dialogues.token_rows import TokenRows

LENGTHS = (6, 4, 7)


def documents(vocabulary: int = 29) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(vocabulary, (n,), generator=generator) for n in LENGTHS]
    loss = [torch.rand(n, generator=generator) < 0.7 for n in LENGTHS]
    return tokens, loss


def packed() -> TokenRows:
    """One row of the three documents and three tokens of padding."""
    tokens, loss = documents()
    number = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)])
    pad = torch.zeros(3).long()
    return TokenRows(
        torch.cat([*tokens, pad])[None],
        torch.cat([*loss, pad.bool()])[None],
        torch.cat([number, pad - 1])[None],
    )


def apart() -> TokenRows:
    """A row for each document, padded to the longest."""
    tokens, loss = documents()
    longest = max(LENGTHS)

    def fill(parts, value):
        return torch.stack(
            [torch.cat([part, part.new_full((longest - len(part),), value)]) for part in parts]
        )

    return TokenRows(
        fill(tokens, 0), fill(loss, False), fill([torch.zeros_like(part) for part in tokens], -1)
    )
