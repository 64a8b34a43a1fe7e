"""An exported selector: one folder of safetensors, JSON, its latency table and a model card."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.card import write_card
from nde_talf.decoding.common.checksums import write_export as write_folder
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json, reading, write_json
from nde_talf.decoding.common.formats import Format
from nde_talf.decoding.common.json_validation import typed
from nde_talf.decoding.common.tensors import LARGEST, read_tensors
from nde_talf.selector.prices import LatencyTable
from nde_talf.selector.roots import INPUT_SCALARS
from nde_talf.selector.schema import SelectorSchema, selectable

FORMAT = Format("selector", "train it again with stage=selector force=true")
INPUTS = {"scalars": [*INPUT_SCALARS], "trees": [[*tree] for tree in TREES]}
"""Inputs and choices in order, as listed in every export."""
CONFIG, WEIGHTS, TABLE = "config.json", "model.safetensors", "table.json"
VECTORS = "vectors.safetensors"
"""Files of an export."""
ABOUT = (
    "A selector of draft trees for lossless speculative decoding (NDE, Dynamic Delayed Tree"
    " Expansion): at every step it chooses the tree that gives most tokens a second. The text, or"
    " its law, does not depend on it. It fits the pair of models that it was trained beside, and"
    " prices trees by the latency table in this folder."
)
USE = """
```python
from nde_talf import NeuralPolicy, Rng, SamplingSetting, Selector, SpeculativeDecoder

policy = NeuralPolicy(Selector.from_pretrained("PATH OF THIS FOLDER"))
decoder = SpeculativeDecoder(target, drafter, policy, policy.verifier)
generation = decoder.generate(prompt_ids, 128, SamplingSetting(0.6), Rng.seeded(0), target.ends)
```
"""


def write_export(
    folder: Path,
    schema: SelectorSchema,
    weights: dict[str, Tensor],
    table: LatencyTable | None,
    vectors: dict[str, Tensor],
    facts: Mapping[str, Any],
    figures: Mapping[str, Any] | None,
) -> None:
    """Write weights, configuration, latency table, checksums and model card, all or nothing.

    vectors: of `vectors`. facts, figures: see `Selector.save_pretrained`.
    """
    known = {
        "verifier": schema.verifier,
        "settings (temperature, top-p)": [f"({t:g}, {p:g})" for t, p in schema.settings],
        "chooses by context there": [
            "yes" if learned else "no: the best static tree" for learned in schema.learned
        ],
        "hidden sizes of target and draft": (schema.target_hidden, schema.draft_hidden),
        **facts,
    }

    def write(temporary: Path) -> None:
        save_file(weights, temporary / WEIGHTS)
        write_json(temporary / CONFIG, {"format": FORMAT.number, **asdict(schema), **INPUTS})
        if table is not None:
            table.save(temporary / TABLE)
        save_file(vectors, temporary / VECTORS)
        title = f"Selector of draft trees ({schema.verifier})"
        tags = ["speculative-decoding", "selector"]
        write_card(temporary, title, ABOUT, USE, tags, None, known, figures)

    write_folder(folder, write)


def read_export(folder: Path) -> tuple[SelectorSchema, dict[str, Tensor], LatencyTable | None]:
    """Read schema, weights and latency table. Raises UserError as `Selector.from_pretrained`."""
    path = folder / CONFIG
    if not path.exists():
        raise UserError(
            f"{folder}: it holds no selector ({CONFIG} is missing); run stage=selector first."
        )
    config = FORMAT.load_folder(folder, read_json(path, again=FORMAT.again), path)
    for key, value in INPUTS.items():
        if config.get(key) != value:
            raise UserError(
                f"{folder}: its selector was exported with other {key} than this version reads:"
                " retrain it."
            )
    with reading(path, FORMAT.again):
        (verifier,) = typed(config.get("verifiers"), tuple[str])
        selectable(verifier, f"{path}: verifiers")
        schema: SelectorSchema = typed(config, SelectorSchema)
    weights = read_tensors(folder / WEIGHTS, FORMAT.again)
    _check_values(weights, folder / WEIGHTS)
    table = LatencyTable.load(folder / TABLE) if (folder / TABLE).exists() else None
    return schema, weights, table


def unfit(folder: Path, error: Exception) -> UserError:
    """Make the error for weights in `folder` that do not fit their configuration."""
    fault = str(error).splitlines()[-1].strip()
    return UserError(f"{folder / WEIGHTS}: it does not fit its {CONFIG} ({fault}): {FORMAT.again}.")


def _check_values(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise UserError for numbers outside the range of a training's results."""
    deepest = max(tree.depth for tree in TREES)
    ranges = {"static_efficiency": (1, 1 + deepest), "static_contexts": (0, 1 << 30)}
    for name, tensor in tensors.items():
        least, most = ranges.get(name, (0 if name == "scale" else -LARGEST, LARGEST))
        if tensor.numel() and not least - 1e-6 <= tensor.min() <= tensor.max() <= most + 1e-6:
            raise UserError(
                f"{path}: its tensor {name} holds numbers outside {least:g} to {most:g}:"
                f" {FORMAT.again}."
            )
