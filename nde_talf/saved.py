"""A speculation as a folder: `model.generate(custom_generate="folder", trust_remote_code=True)`
decodes with it.

The folder holds `speculation.json`, the selector with its latency table, the head where there is
one, a card, and `custom_generate/generate.py`, which calls this package. A draft model is named,
not copied.
"""

from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

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
    """What `speculation.json` holds; draft is the folder's head, a model's name or "ngram"."""

    draft: str
    selector: str | None
    verifier: str | None
    draft_temperature: Any
    forward: str


FORMAT = Format("speculation", "save it again with speculate(...).save(folder)", Settings)
FILE, HEAD, SELECTOR = "speculation.json", "head", "selector"
GENERATE = '''"""Decode speculatively with the draft and the selector of this folder; the law of the text stays the same."""

try:
    from nde_talf import generate_from
except ImportError as error:
    raise ImportError("This needs the package nde_talf: see requirements.txt beside this file.") from error


def generate(model, **arguments):
    return generate_from(model, **arguments)
'''
REQUIREMENTS = """# transformers cannot check a requirement with an address, so this line is a comment:
# {install}
transformers>=5.13
torch>=2.9
"""
CARD = """---
library_name: transformers
tags: [custom_generate, speculative-decoding]
---
# Speculative decoding with nde-talf {version}

```python
model.generate(**inputs, custom_generate="{name}", trust_remote_code=True, max_new_tokens=256)
```

Install the package first: `{install}`

| | |
|---|---|
| draft | {draft} |
| trees | {trees} |
| verifier | {verifier} |

The text has the law that `generate` samples from without it, and at greedy search the same tokens. Beam search, contrastive
search, assistants, static caches and logits processors that keep a state are refused.
"""


def save(
    own: Speculation, folder: Path, repository: str | None = None, name: str | None = None
) -> Path:
    """Write `own` to `folder`, all or nothing.

    Args:
        repository: where pip finds this project, as git+URL@tag.
        name: by which the card calls it; None: the folder's.

    Raises:
        UserError: the folder is there already, the repository has no tag, or draft or selector are
            objects of this process, which have no folder.
    """
    if repository is not None and not (
        repository.startswith("git+") and "@" in repository.rpartition("/")[2]
    ):
        raise UserError(
            f"save(repository={repository!r}): give the project's repository at a tag, as"
            " git+https://host/owner/name@v1.0."
        )
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"save: {folder} is there already; give a new folder.")
    if not isinstance(own.draft, (str, Path)):
        raise UserError(
            "save: the draft is a model of this process. Give speculate() its folder or hub name."
        )
    if own.selector is not None and not isinstance(own.selector, (str, Path)):
        raise UserError(
            "save: the selector is a policy of this process. Give speculate() the folder of an"
            " exported selector."
        )
    if own.stateless:
        raise UserError(
            "save: stateless names classes of this process, which the folder cannot hold; leave it"
            " out."
        )
    head = own.draft != NGRAM and is_head(Path(own.draft))
    copied = ({HEAD: own.draft} if head else {}) | (
        {SELECTOR: own.selector} if own.selector else {}
    )
    rules = () if own.selector is None else Selector.from_pretrained(own.selector).schema.verifiers
    install = (
        f'pip install "nde-talf @ {repository}"'
        if repository
        else f"the project's repository at its tag v{__version__}"
    )
    settings = {
        "format": FORMAT.number,
        "draft": HEAD if head else str(own.draft),
        "selector": SELECTOR if own.selector else None,
        "verifier": own.verifier,
        "draft_temperature": own.draft_temperature,
        "forward": own.forward,
    }
    card = {
        "version": __version__,
        "name": name or str(folder),
        "install": install,
        "draft": "an EAGLE head, in `head/`" if head else f"`{own.draft}`",
        "trees": "chosen step by step by the selector in `selector/`" if rules else "a static tree",
        "verifier": own.verifier or ", ".join(rules) or "that of the trees",
    }

    def write(partial: Path) -> None:
        (partial / "custom_generate").mkdir(parents=True)
        for name, source in copied.items():
            copytree(source, partial / name)
        write_sealed(partial / FILE, settings)
        (partial / "README.md").write_text(CARD.format(**card), encoding="utf-8")
        (partial / "custom_generate" / "generate.py").write_text(GENERATE, encoding="utf-8")
        (partial / "custom_generate" / "requirements.txt").write_text(
            REQUIREMENTS.format(install=install), encoding="utf-8"
        )

    write_atomically(folder, write)
    return folder


def push_to_hub(own: Speculation, name: str, repository: str, **options: Any) -> str:
    """`save`, then the hub's repository `name`; its address. options: of `HfApi.create_repo`, such
    as private=True.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with TemporaryDirectory() as temporary:
        folder = save(own, Path(temporary) / "speculation", repository, name)
        api.create_repo(name, exist_ok=True, **options)
        return str(api.upload_folder(repo_id=name, folder_path=str(folder)))


def load(where: str) -> Speculation:
    """The speculation in a folder, or in the hub's repository of that name.

    Raises UserError if there is none.
    """
    from huggingface_hub import snapshot_download

    folder = Path(where)
    if not folder.is_dir():
        folder = Path(snapshot_download(where, allow_patterns=[FILE, f"{HEAD}/*", f"{SELECTOR}/*"]))
    settings = FORMAT.load(folder / FILE)
    draft = str(folder / HEAD) if settings["draft"] == HEAD else settings["draft"]
    selector = folder / SELECTOR if settings["selector"] else None
    return speculate(
        draft,
        selector,
        **{key: settings[key] for key in ("verifier", "draft_temperature", "forward")},
    )


_loaded: dict[str, Speculation] = {}
"""Of this process, by folder."""


def generate_from(model: Any, **arguments: Any) -> Any:
    """What `custom_generate/generate.py` of a saved folder calls: `model.generate` with the
    speculation of that folder.

    transformers copies the file elsewhere before it runs it, so the folder is read off the call of
    `generate`. A model whose own folder holds the file has that as its name.
    """
    where = of_generate("custom_generate")
    where = str(where if isinstance(where, str) else model.name_or_path)
    if where not in _loaded:
        _loaded[where] = load(where)
    tokenizer, strings = arguments.pop("tokenizer", None), arguments.pop("stop_strings", None)
    if strings is not None:  # transformers would not hand the tokenizer on to a callable
        if tokenizer is None:
            raise UserError("generate(stop_strings=...): give tokenizer=... too.")
        criteria = [
            *(arguments.get("stopping_criteria") or ()),
            StopStringCriteria(tokenizer, strings),
        ]
        arguments["stopping_criteria"] = StoppingCriteriaList(criteria)
    return GenerationMixin.generate(model, custom_generate=_loaded[where], **arguments)
