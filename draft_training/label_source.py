"""Training labels from the target model, computed in the step or cached on disk.

On disk are, for every row, the target's features along it (the head's input) and, for TALF, the
trees after all its roots with the target's features at their nodes. A row's file is written
atomically, so that an interrupted preparation goes on where it stopped. Nothing here knows heads.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.filesize import decimal as size
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.common.checkpoint import fingerprint as digest
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json, reading, write_atomically, write_json
from nde_talf.decoding.common.progress import console, track
from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.export import fingerprint
from nde_talf.draft_training.settings import HeadConfig
from nde_talf.draft_training.target_trees import (
    TargetTrees,
    TreeSpec,
    chains,
    target_beam,
    target_features,
)
from nde_talf.draft_training.tree_attention import TreeLevel, take_rows

INDEX = "labels.json"


@dataclass
class OnlineSource:
    """Runs the target in the step. layers: of the target, whose features the head takes."""

    target: CausalModel
    config: HeadConfig
    layers: tuple[int, ...] = ()

    def trees(
        self, tokens: Tensor, document: Tensor | None, numbers: Tensor, roots: Tensor, depth: int
    ) -> TargetTrees:
        """Trees and their labels.

        Args:
            tokens: rows, [B, L].
            document: the document of every token, [B, L]; None where a row is one document.
            numbers: which of all rows these are, [B].
            roots: indices of tokens, [B, R].
            depth: draft passes.
        """
        if self.config.loss.target_trees:
            tree = TreeSpec(self.config.loss.k, depth, self.config.nodes_in_pass)
            return target_beam(self.target, tokens, tree, roots, document, self.layers)
        with torch.no_grad():
            return chains(tokens, target_features(self.target, tokens, document)[0], roots, depth)


@dataclass
class StoredSource:
    """Reads what `stored_labels` wrote."""

    folder: Path
    target_trees: bool
    dtype: torch.dtype

    def trees(
        self, tokens: Tensor, document: Tensor | None, numbers: Tensor, roots: Tensor, depth: int
    ) -> TargetTrees:
        """See `OnlineSource.trees`."""
        features = self._read(numbers, tokens.device, "features")[0].to(self.dtype)
        if not self.target_trees:
            return chains(tokens, features, roots, depth)
        trees = TargetTrees(tokens, features, roots, [], [], features)
        for level in range(1, depth):
            names = (f"{name}_{level}" for name in ("tokens", "parents", "labels"))
            nodes, parents, labels = (
                take_rows(part, roots) for part in self._read(numbers, tokens.device, *names)
            )
            trees.levels.append(TreeLevel(nodes.long(), parents.long()))
            trees.labels.append(labels.to(self.dtype))
        return trees

    @torch.autocast("cpu", enabled=False)  # under bfloat16 it cannot concatenate float16
    def _read(self, numbers: Tensor, device: torch.device, *names: str) -> list[Tensor]:
        """Read the tensors called `names` of the rows `numbers`."""
        rows = []
        for path in (self.folder / file_name(number) for number in numbers.tolist()):
            with (
                reading(path, "delete it: the labels in it are made anew"),
                safe_open(path, "pt") as file,
            ):
                rows.append([file.get_tensor(name) for name in names])
        return [torch.cat(parts).to(device) for parts in zip(*rows, strict=True)]


LabelSource = OnlineSource | StoredSource


def file_name(number: int) -> str:
    """Name the file with the labels of row `number`."""
    return f"row-{number:06d}.safetensors"


def stored_labels(
    target: CausalModel, rows: TokenRows, numbers: Iterable[int], folder: Path, config: HeadConfig
) -> StoredSource:
    """Write the labels of some rows into `folder`, unless they are there, and return their reader.

    Args:
        target: makes the labels.
        rows: all rows of a training.
        numbers: the rows that are needed.
        folder: where the labels go.
        config: of the training.

    Raises:
        UserError: the disk can't hold them, which is known after the first row, or the folder holds
            other labels.
    """
    loss, labels = config.loss, config.labels
    index = {
        "loss": loss.name,
        "k": loss.k,
        "depth": loss.depth,
        "dtype": labels.dtype,
        "target": fingerprint(target),
        "rows": digest(rows),
    }
    if (folder / INDEX).exists() and (before := read_json(folder / INDEX)) != index:
        changed = ", ".join(key for key in index if before.get(key) != index[key])
        raise UserError(
            f"{folder}: its labels have another {changed}. Delete the folder, or go back to those"
            " settings."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / INDEX, index)
    missing = [number for number in numbers if not (folder / file_name(number)).exists()]
    for number in track(missing, "labels", len(missing), "row"):
        tensors = _labels_of_row(target, rows[number : number + 1].to(target.device), config)
        if number == missing[0]:
            row_bytes = sum(tensor.nbytes for tensor in tensors.values())
            _check_disk(folder, row_bytes * len(missing))
        write_atomically(
            folder / file_name(number), lambda path, tensors=tensors: save_file(tensors, path)
        )
    return StoredSource(folder, loss.target_trees, target.dtype)


def _check_disk(folder: Path, needed: int) -> None:
    """Print what the labels need; raise UserError unless the disk of `folder` has it."""
    console.print(f"labels: {size(needed)} of disk")
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder}: the labels need {size(needed)} and its disk has {size(free)} left. Use"
            " draft.labels.name=online, which needs none, fewer rows, or another disk"
            " (paths.checkpoints)."
        )


@torch.no_grad()
def _labels_of_row(target: CausalModel, row: TokenRows, config: HeadConfig) -> dict[str, Tensor]:
    """Compute what is kept of one row, after every token of it.

    The first token is no root, and its entry is not read.
    """
    document, loss = row.document if row.packed else None, config.loss
    if loss.target_trees:
        roots = torch.arange(row.tokens.shape[1], device=target.device)
        tree = TreeSpec(loss.k, loss.depth, config.nodes_in_pass)
        trees = target_beam(target, row.tokens, tree, roots, document)
        kept = {"features": trees.features}
        for level, (nodes, labels) in enumerate(zip(trees.levels, trees.labels, strict=True), 1):
            kept[f"tokens_{level}"] = nodes.tokens.int()
            kept[f"parents_{level}"] = nodes.parents.short()
            kept[f"labels_{level}"] = labels
    else:
        kept = {"features": target_features(target, row.tokens, document)[0]}
    dtype = getattr(torch, config.labels.dtype)
    for name, part in kept.items():
        part = part.to(dtype) if part.is_floating_point() else part
        if not part.isfinite().all():
            raise UserError(
                f"draft.labels.dtype={config.labels.dtype}: a feature does not fit it; use bfloat16"
                " or float32."
            )
        kept[name] = part.cpu().contiguous()
    return kept
