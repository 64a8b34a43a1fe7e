"""One's own data by one key, such as `data=prompts.jsonl`, and what the file will bear.

`in_full` writes the word out before Hydra reads it; it is the one exception to leaving the command
line to Hydra. `fit` has the file read, by `own_files`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from nde_talf.data.text.settings import FILE_FORMATS, is_hub_name
from nde_talf.data.text.shipped import is_shipped
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.settings import local
from nde_talf.pipelines.commands.work import work_of
from nde_talf.pipelines.config.command_line import presets, quoted, unquoted
from nde_talf.pipelines.config.schema import Config

WORDS = {"data": "data.sets.file.source", "dialogues": "dialogues.source"}
"""Groups that take a file in place of a preset, with the key that it is written out to."""
TEXTS = ("data.source", "data.sets", "data.mix")
"""Keys that give text or prompts."""


def in_full(arguments: Sequence[str]) -> Iterator[str]:
    """Write out arguments such as `data=prompts.jsonl`; presets win over a file of their name."""
    for each in arguments:
        group, _, given = each.partition("=")
        value = unquoted(given)
        preset = group in WORDS and value in presets(group)
        if group in WORDS and not preset and _is_source(value):
            yield f"{group}=file"
            yield quoted(WORDS[group], local(value))
        else:
            yield each


def without_data(arguments: Sequence[str]) -> bool:
    """Tell whether arguments give a target, and no text or prompts."""
    given = dict(each.lstrip("+~").partition("=")[::2] for each in arguments)
    target = given.get("model.target", "null").strip("'\"")
    texts = any(key == "data" or key.startswith(TEXTS) for key in given)
    return target != "null" and not is_shipped(target) and not texts and not given.get("model")


def _is_source(value: str) -> bool:
    """Tell a path or ORG/NAME from a list of presets, and from one that is spelt wrong."""
    if not value or value[0] in "[{'\"":
        return False
    on_hub = "/" in value and is_hub_name(value.partition(":")[0])
    path = Path(local(value))
    return on_hub or path.exists() or path.suffix in FILE_FORMATS or value[0] in "./~"


def fit(config: Config) -> tuple[Config, list[str]]:
    """Recognise the columns of own prompts, and fit counts and splits to their number.

    Also returns what is wrong with the files: they cannot be read, are ambiguous, or have too few
    rows.
    """
    own = {
        name: entry
        for name, entry in config.data.sets.items()
        if (entry.template is None or name == "file") and entry.source
    }
    # `check_config` reports a missing file.
    files = (Path(entry.source or "") for entry in own.values())
    if not own or any(file.suffix in FILE_FORMATS and not file.exists() for file in files):
        return config, []
    try:
        return work_of("own_files").fit_prompts(config, own), []
    except UserError as error:
        return config, [str(error)]
