"""An exported selector: one folder of safetensors, JSON, its latency table and a model card."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nde_talf.decoding.actions import TREES
from nde_talf.decoding.common.card import write_card
from nde_talf.decoding.common.checksums import write_export
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json, reading, write_json
from nde_talf.decoding.common.formats import Format
from nde_talf.decoding.common.tensors import read_tensors
from nde_talf.decoding.common.typed import typed
from nde_talf.decoding.fitness import LARGEST
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.network import Selector, SelectorSchema, selectable
from nde_talf.selector.roots import INPUT_SCALARS

FORMAT = Format("selector", "train it again with stage=selector force=true")
INPUTS = {"scalars": [*INPUT_SCALARS], "trees": [[*tree] for tree in TREES]}
"""Inputs and choices that every export lists, in order."""
TABLE = "table.json"
"""The file of an export that holds its latency table."""
VECTORS = "vectors.safetensors"
"""The file of an export that holds `VECTOR_ROWS` made-up rows of the network's inputs, by argument
name, the `logits` [B, C] that it gives them, and the `trees` [B, 3] that it then chooses, so that
another reader can be tested.
"""
VECTOR_ROWS, VECTOR_ERROR = 3, 1e-3
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


def save_selector(
    selector: Selector,
    folder: Path,
    facts: Mapping[str, Any] | None = None,
    figures: Mapping[str, Any] | None = None,
) -> None:
    """Write weights, configuration, latency table, checksums and card, all or nothing.

    Args:
        selector: as trained.
        folder: the export.
        facts: what it was trained on, for the card.
        figures: throughputs on held-out roots.
    """
    schema = selector.schema
    known = {
        "verifier": schema.verifier,
        "settings (temperature, top-p)": [f"({t:g}, {p:g})" for t, p in schema.settings],
        "chooses by context there": [
            "yes" if learned else "no: the best static tree" for learned in schema.learned
        ],
        "hidden sizes of target and draft": (
            schema.target_hidden or "not looked at",
            schema.draft_hidden,
        ),
        **(facts or {}),
    }

    def write(temporary: Path) -> None:
        weights = {name: value.contiguous() for name, value in selector.state_dict().items()}
        save_file(weights, temporary / "model.safetensors")
        config = {"format": FORMAT.number, **asdict(schema), **INPUTS}
        write_json(temporary / "config.json", config)
        if selector.table is not None:
            selector.table.save(temporary / TABLE)
        save_file(vectors_of(selector), temporary / VECTORS)
        title = f"Selector of draft trees ({schema.verifier})"
        tags = ["speculative-decoding", "selector"]
        write_card(temporary, title, ABOUT, USE, tags, None, known, figures)

    write_export(folder, write)


def load_selector(folder: Path) -> Selector:
    """Load an exported selector. It has to give its test vectors, if it has some.

    Raises:
        UserError: `folder` holds none, one of other inputs, one that is not as it was written, or
            one with a verifier that does not take delayed trees.
    """
    path, weights = folder / "config.json", folder / "model.safetensors"
    if not path.exists():
        raise UserError(
            f"{folder}: it holds no selector (config.json is missing); run stage=selector first."
        )
    config = FORMAT.load_folder(folder, read_json(path, again=FORMAT.again), path)
    for key, value in INPUTS.items():
        if config.get(key) != value:
            raise UserError(
                f"{folder}: its selector was exported with other {key} than this version reads:"
                " retrain it."
            )
    with reading(path, FORMAT.again), torch.random.fork_rng(devices=[]):  # a new network draws
        (verifier,) = typed(config.get("verifiers"), tuple[str])
        selectable(verifier, f"{path}: verifiers")
        selector = Selector(typed(config, SelectorSchema))
    tensors = read_tensors(weights, FORMAT.again)
    _check_values(tensors, weights)
    if (counts := tensors.get("static_contexts")) is not None:  # a column for every context seen
        selector.static_contexts = selector.static_contexts.repeat(1, counts.shape[-1])
    try:
        selector.load_state_dict(tensors, assign=True)  # whatever torch's default type is
    except RuntimeError as error:
        fault = str(error).splitlines()[-1].strip()
        raise UserError(
            f"{weights}: it does not fit its config.json ({fault}): {FORMAT.again}."
        ) from error
    selector.table = LatencyTable.load(folder / TABLE) if (folder / TABLE).exists() else None
    if (folder / VECTORS).exists():
        _check_vectors(selector.eval(), folder / VECTORS)
    return selector.eval()


@torch.inference_mode()
def vectors_of(selector: Selector) -> dict[str, Tensor]:
    """Return rows of inputs with what a selector makes of them: see `VECTORS`."""
    schema, draws = selector.schema, torch.Generator().manual_seed(0)

    def normal(size: int) -> Tensor:
        return torch.randn(VECTOR_ROWS, size, generator=draws)

    names = ("h_p_previous", "h_q_previous", "h_q_root")
    sizes = (schema.target_hidden, schema.draft_hidden, schema.draft_hidden)
    inputs = {name: normal(size) for name, size in zip(names, sizes, strict=True)}
    spread = torch.where(selector.scale > 0, 1 / selector.scale, 0.0)
    inputs["scalars"] = (
        (selector.mean + spread * normal(len(INPUT_SCALARS)).to(spread)).float().cpu()
    )
    inputs["seconds"] = 0.01 * normal(len(TREES)).exp()
    return {**inputs, **_outputs(selector, inputs)}


def _outputs(selector: Selector, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    training, device = selector.training, selector.mean.device
    logits = selector.eval()(**{name: each.to(device) for name, each in inputs.items()}).cpu()
    selector.train(training)
    return {"logits": logits, "trees": torch.tensor([*TREES])[logits.argmax(-1)]}


@torch.inference_mode()
def _check_vectors(selector: Selector, path: Path) -> None:
    """Raise UserError where a selector does not give the logits of its test vectors."""
    vectors = read_tensors(path, FORMAT.again)
    with reading(path, FORMAT.again):
        known = vectors.pop("logits")
        vectors.pop("trees")
        error = (_outputs(selector, vectors)["logits"] - known).abs().max().item()
    if not error <= VECTOR_ERROR * (1 + known.abs().max().item()):
        raise UserError(
            f"{path}: its selector gives other logits than it was exported with, by up to"
            f" {error:.2g}: {FORMAT.again}."
        )


def _check_values(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise UserError for numbers that no training gives."""
    deepest = max(tree.depth for tree in TREES)
    ranges = {"static_efficiency": (1, 1 + deepest), "static_contexts": (0, 1 << 30)}
    for name, tensor in tensors.items():
        least, most = ranges.get(name, (0 if name == "scale" else -LARGEST, LARGEST))
        if tensor.numel() and not least - 1e-6 <= tensor.min() <= tensor.max() <= most + 1e-6:
            raise UserError(
                f"{path}: its tensor {name} holds numbers outside {least:g} to {most:g}:"
                f" {FORMAT.again}."
            )
