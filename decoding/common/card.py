"""Model card of an exported folder, `README.md`.

It tells what the model is, what it was trained on, its figures, and how to load it. It is
written beside the checksums and is not among them, so that it can be edited. With it the
folder is complete for a hub, and one call publishes it:

    from huggingface_hub import upload_folder
    upload_folder(repo_id="me/my-head", folder_path="checkpoints/mine/draft/export")
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nde_talf.decoding.common.errors import masked

CARD = "README.md"


def write_card(
    folder: Path,
    title: str,
    about: str,
    use: str,
    tags: Sequence[str],
    base: str | None,
    facts: Mapping[str, Any],
    figures: Mapping[str, Any] | None = None,
) -> None:
    """Write the card of `folder`.

    Args:
        folder: where the card is written, as `README.md`.
        title: heading of the card.
        about: a paragraph: what it is.
        use: Markdown: how it is loaded.
        tags: of the hub.
        base: the hub name of the model that it belongs to; None where that is a folder.
        facts: what it was trained on and how, by name.
        figures: what was measured on held-out text, by name.
    """
    head = {"library_name": "nde-talf", "tags": list(tags)} | ({"base_model": base} if base else {})
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in head.items()),
        "---",
        "",
        f"# {title}",
        "",
        about,
        "",
    ]
    for heading, rows in (("Training", facts), ("Figures on held-out text", figures)):
        if rows:
            lines += [f"## {heading}", "", "| | |", "|---|---|"]
            lines += [f"| {name} | {shown(value)} |" for name, value in rows.items()] + [""]
    lines += ["## Use", "", use.strip(), ""]
    (folder / CARD).write_text(masked("\n".join(lines)), encoding="utf-8")


def shown(value: Any) -> str:
    """Format a table cell: numbers with three digits after the point, lists with commas.

    Anything else is JSON without quotes.
    """
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, (list, tuple)):
        return ", ".join(shown(each) for each in value)
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return " ".join(text.split()).replace("|", "\\|")


def hub_name(where: str) -> str | None:
    """Return `where` if it is a name on a hub, and None if it is a folder.

    For example "meta-llama/Llama-3.1-8B-Instruct" is a name on a hub.
    """
    return (
        where
        if where.count("/") == 1
        and not where.startswith((".", "/", "~"))
        and not Path(where).exists()
        else None
    )
