"""Text that ships with the pair: held-out prompts, held-out rows, and rows to train heads on."""

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from nde_talf.data.text.prompts import Prompt
from nde_talf.data.text.shipped import AGAIN, SHIPPED, shipped
from nde_talf.decoding.common.checksums import check_checksums
from nde_talf.decoding.common.errors import UserError

PROMPTS, ROWS, TRAIN = "prompts.jsonl", "rows.safetensors", "train"


def shipped_prompts(count: int | None = None, folder: Path = SHIPPED) -> list[Prompt]:
    """Read the held-out prompts, without token ids; the domains are in turn.

    Raises:
        UserError: a file was changed or damaged, or there are fewer than `count`.
    """
    check_checksums(folder, again=AGAIN)
    lines = Path(shipped(PROMPTS, folder)).read_text(encoding="utf-8").splitlines()
    if count is not None and count > len(lines):
        raise UserError(f"data.prompt_count={count}: the shipped pair has {len(lines)} prompts.")
    return [Prompt(**json.loads(line)) for line in lines[:count]]


def shipped_rows(folder: Path = SHIPPED) -> dict[str, Tensor]:
    """Read rows of token ids, [rows, length]: "train", and by domain what nothing learned from."""
    check_checksums(folder, again=AGAIN)
    return {name: rows.long() for name, rows in load_file(shipped(ROWS, folder)).items()}
