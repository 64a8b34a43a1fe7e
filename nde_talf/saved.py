"""A speculation as a folder: `model.generate(custom_generate="folder", trust_remote_code=True)`.

The folder holds `speculation.json`, the selector with its latency table, the head where there is
one, a card, and `custom_generate/generate.py`, which calls this package. A draft model is named,
not copied. A folder or a repository of a hub may hold it.
"""

from pathlib import Path
from shutil import copytree
from typing import Any

from huggingface_hub import snapshot_download
from transformers import GenerationMixin
from transformers.generation import StoppingCriteriaList, StopStringCriteria
from typing_extensions import TypedDict

from nde_talf import __version__
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import write_atomically, write_sealed
from nde_talf.decoding.common.formats import Format
from nde_talf.in_transformers import NGRAM, Speculation, is_head, speculate
from nde_talf.prepared import of_generate
from nde_talf.selector.network import Selector


class Settings(TypedDict):
    """Content of `speculation.json`; draft is the folder's head, a model's name or "ngram"."""

    draft: str
    selector: str | None
    verifier: str | None
    draft_temperature: Any


FORMAT = Format("speculation", "save it again with speculate(...).save(folder)", kind=Settings)
FILE, HEAD, SELECTOR = "speculation.json", "head", "selector"
GENERATE = '''"""Decode with the draft and the selector of this folder; the text keeps its law."""

try:
    from nde_talf import generate_from
except ImportError as error:
    raise ImportError("This needs nde_talf: see README.md in the folder above.") from error


def generate(model, **arguments):
    return generate_from(model, **arguments)
'''
# transformers checks these; the package itself has no name on an index.
REQUIREMENTS = "transformers>=5.13\ntorch>=2.9\n"
CARD = """---
library_name: transformers
tags: [custom_generate, speculative-decoding]
---
# Speculative decoding with nde-talf {version}

```python
model.generate(**inputs, custom_generate="{folder}", trust_remote_code=True, max_new_tokens=256)
```

Install the package first, from its repository at the tag v{version}.

| | |
|---|---|
| draft | {draft} |
| trees | {trees} |

The text has the law that `generate` samples from without it, and at greedy search the same tokens.
Beam search, contrastive search, assistants, static caches and logits processors that keep a state
are refused.
"""


def save(speculation: Speculation, folder: Path) -> Path:
    """Write `speculation` to `folder`, all or nothing.

    Raises:
        UserError: the folder is there already, or it is not empty; draft or selector are objects of
            this process, which have no folder; or there is no selector in its folder.
    """
    draft, selector = speculation.draft, speculation.selector
    faults = {
        f"{folder} is there already; give a new folder.": (
            folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
        ),
        "the draft is a model of this process. Give speculate() its folder or hub name.": (
            not isinstance(draft, (str, Path))
        ),
        "the selector is a policy of this process. Give speculate() the folder of an exported"
        " selector.": not isinstance(selector, (str, Path, type(None))),
        "stateless names classes of this process, which the folder cannot hold; leave it out.": (
            bool(speculation.stateless)
        ),
    }
    for fault in (fault for fault, is_so in faults.items() if is_so):
        raise UserError(f"save: {fault}")
    head = draft != NGRAM and is_head(Path(draft))
    copied, trees = {HEAD: draft} if head else {}, "static"
    if isinstance(selector, (str, Path)) and selector:
        copied[SELECTOR], trees = (
            selector,
            "static, the best that the selector in `selector/` knows",
        )
        if any(Selector.from_pretrained(selector).schema.learned):
            trees = "chosen step by step by the selector in `selector/`"
    settings = {
        "format": FORMAT.number,
        "draft": HEAD if head else str(Path(draft).resolve() if Path(draft).is_dir() else draft),
        "selector": SELECTOR if selector else None,
        "verifier": speculation.verifier,
        "draft_temperature": speculation.draft_temperature,
    }
    named = "the EAGLE head in `head/`" if head else f"`{draft}`"
    card = CARD.format(version=__version__, folder=folder, draft=named, trees=trees)

    def write(partial: Path) -> None:
        code = partial / "custom_generate"
        code.mkdir(parents=True)
        for name, source in copied.items():
            copytree(source, partial / name)
        write_sealed(partial / FILE, settings)
        (partial / "README.md").write_text(card, encoding="utf-8")
        (code / "generate.py").write_text(GENERATE, encoding="utf-8")
        (code / "requirements.txt").write_text(REQUIREMENTS, encoding="utf-8")

    write_atomically(folder, write)
    return folder


def load(where: str) -> Speculation:
    """Load the speculation in a folder, or in the hub's repository of that name.

    Raises:
        UserError: there is none.
    """
    folder = Path(where)
    if not folder.is_dir():
        folder = Path(snapshot_download(where, allow_patterns=[FILE, f"{HEAD}/*", f"{SELECTOR}/*"]))
    settings = FORMAT.load(folder / FILE)
    return speculate(
        str(folder / HEAD) if settings["draft"] == HEAD else settings["draft"],
        folder / SELECTOR if settings["selector"] else None,
        settings["verifier"],
        settings["draft_temperature"],
    )


_loaded: dict[tuple[str, int], Speculation] = {}
"""Speculations of this process by folder, and when it was written."""


def generate_from(model: Any, **arguments: Any) -> Any:
    """Decode with the speculation of a saved folder, whose `generate.py` calls this.

    transformers copies that file elsewhere before it runs it, so the folder is read off the call of
    `generate`. A model whose own folder holds the file has that as its name.
    """
    where = of_generate("custom_generate")
    where = str(where if isinstance(where, str) else model.name_or_path)
    file = Path(where) / FILE
    key = where, file.stat().st_mtime_ns if file.exists() else 0
    if key not in _loaded:
        _loaded[key] = load(where)
    tokenizer, strings = arguments.pop("tokenizer", None), arguments.pop("stop_strings", None)
    if strings is not None:  # transformers would not hand the tokenizer on to a callable
        if tokenizer is None:
            raise UserError("generate(stop_strings=...): give tokenizer=... too.")
        criteria = arguments.get("stopping_criteria") or ()
        stop = StopStringCriteria(tokenizer, strings)
        arguments["stopping_criteria"] = StoppingCriteriaList([*criteria, stop])
    return GenerationMixin.generate(model, custom_generate=_loaded[key], **arguments)
