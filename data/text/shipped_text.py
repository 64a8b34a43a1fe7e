"""Text that ships with the pair: held-out prompts, held-out rows, and rows to train heads on."""

from pathlib import Path

from torch import Tensor

from nde_talf.data.text.pair import Pair
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.text.shipped import AGAIN, SHIPPED, shipped
from nde_talf.decoding.common.checksums import check_checksums
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json

DOMAINS = "domains.json"
"""The file with the number of held-out rows by domain, in the order of the rows."""


def shipped_pair(folder: Path = SHIPPED) -> Pair:
    """Open the shipped pair. Raises UserError if a file is missing, or not as it was shipped."""
    shipped("pair.json", folder)
    check_checksums(folder, again=AGAIN)
    return Pair(folder / "pair")


def shipped_prompts(count: int | None = None, folder: Path = SHIPPED) -> list[Prompt]:
    """Read the held-out prompts; the domains are in turn.

    Raises:
        UserError: a file was changed or damaged, or there are fewer than `count`.
    """
    prompts = shipped_pair(folder).every_prompt()
    if count is not None and count > len(prompts):
        raise UserError(f"data.prompt_count={count}: the shipped pair has {len(prompts)} prompts.")
    return prompts[:count]


def shipped_rows(folder: Path = SHIPPED) -> tuple[Tensor, dict[str, Tensor]]:
    """Read rows of token ids, [rows, length]: of the training text, and held-out ones by domain."""
    pair = shipped_pair(folder)
    counts = read_json(folder / DOMAINS, dict[str, int], AGAIN)
    parts = pair.rows("held_out").split([*counts.values()])
    return pair.rows("train"), dict(zip(counts, parts, strict=True))
