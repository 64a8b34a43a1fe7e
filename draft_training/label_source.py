"""Training labels from the target model, computed online or cached on disk.

On disk are, for every row, the target's features along it (the head's input) and, for TALF, the
trees after all its roots with their labels: the target's features at the nodes, or the m most
likely tokens there. Shards of a few rows are written atomically, so that an interrupted preparation
goes on where it stopped. Nothing here knows heads.
"""

import shutil
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json, reading, write_atomically, write_json
from nde_talf.decoding.common.progress import console, track
from nde_talf.decoding.common.units import size
from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.export import fingerprint
from nde_talf.draft_training.losses import TopProbabilities
from nde_talf.draft_training.settings import HeadConfig
from nde_talf.draft_training.target_trees import (
    TargetTrees,
    TreeSpec,
    chains,
    target_beam,
    target_features,
)
from nde_talf.draft_training.tree_attention import TreeLevel, take_rows

SHARD_ROWS = 16
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
    """Reads what `stored_labels` wrote. numbers [N]: of every row of a training, which row it is
    here; None: the same.
    """

    folder: Path
    target_trees: bool
    dtype: torch.dtype
    numbers: Tensor | None = None

    def trees(
        self, tokens: Tensor, document: Tensor | None, numbers: Tensor, roots: Tensor, depth: int
    ) -> TargetTrees:
        """See `OnlineSource.trees`."""
        rows = numbers if self.numbers is None else self.numbers[numbers]
        features = self._read(rows, "features", tokens.device)[""].to(self.dtype)
        if not self.target_trees:
            return chains(tokens, features, roots, depth)
        along = self._labels(self._read(rows, "_0", tokens.device)) or features
        trees = TargetTrees(tokens, features, roots, [], [], along)
        for level in range(1, depth):
            nodes = {
                name: take_rows(part, roots)
                for name, part in self._read(rows, f"_{level}", tokens.device).items()
            }
            trees.levels.append(TreeLevel(nodes["tokens"].long(), nodes["parents"].long()))
            trees.labels.append(self._labels(nodes) or nodes["labels"].to(self.dtype))
        return trees

    def _labels(self, nodes: dict[str, Tensor]) -> TopProbabilities | None:
        return TopProbabilities(nodes["ids"], nodes["probabilities"]) if "ids" in nodes else None

    @torch.autocast("cpu", enabled=False)  # under bfloat16 it cannot stack float16
    def _read(self, rows: Tensor, suffix: str, device: torch.device) -> dict[str, Tensor]:
        """The tensors whose names end with `suffix`, by the rest of their names, of `rows` [B]."""
        found: dict[str, list[Tensor]] = {}
        for row in rows.tolist():
            path = self.folder / shard_name(row // SHARD_ROWS)
            with (
                reading(path, "delete it: the labels in it are made anew"),
                safe_open(path, "pt") as file,
            ):
                for name in file.keys():  # noqa: SIM118
                    if name.endswith(suffix):
                        found.setdefault(name.removesuffix(suffix), []).append(
                            file.get_slice(name)[row % SHARD_ROWS]
                        )
        return {name: torch.stack(parts).to(device) for name, parts in found.items()}


LabelSource = OnlineSource | StoredSource


def shard_name(number: int) -> str:
    return f"labels-{number:05d}.safetensors"


def bytes_needed(config: HeadConfig, rows: int, length: int, hidden: int) -> int:
    """Bytes of all labels of `rows` rows of `length` tokens on disk, but for the files' headers."""
    loss, labels, number = config.loss, config.labels, getattr(torch, config.labels.dtype).itemsize
    top = labels.name == "top_m"
    label = labels.m * (4 + number) if top else hidden * number
    token = hidden * number  # the features along the rows
    if loss.target_trees:
        token += (loss.depth - 1) * loss.k * (label + 4 + 2) + (label if top else 0)
    return rows * length * token


def stored_labels(
    target: CausalModel, rows: TokenRows, folder: Path, config: HeadConfig
) -> StoredSource:
    """Write what `config.labels` keeps of `target` on `rows` into `folder`, unless it is there, and
    return its reader.

    Raises:
        UserError: before anything is computed, if the disk can't hold it or the folder holds other
            labels.
    """
    loss, labels = config.loss, config.labels
    m = labels.m if labels.name == "top_m" else None
    if m is not None and m > target.vocab_size:
        raise UserError(f"draft.labels.m={m}: it must lie in 1..{target.vocab_size}.")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {
        "mode": labels.name, "loss": loss.name, "k": loss.k, "depth": loss.depth, "top_m": m, "dtype": labels.dtype,
        "target": fingerprint(target), "rows": _digest(rows),
    }  # fmt: skip
    if (folder / INDEX).exists() and (found := read_json(folder / INDEX)) != wanted:
        changed = ", ".join(key for key in wanted if found.get(key) != wanted[key])
        raise UserError(
            f"{folder}: its labels have another {changed}. Delete the folder, or go back to those"
            " settings."
        )
    shards = torch.arange(len(rows)).split(SHARD_ROWS)  # numbers of rows
    missing = [shard for shard in range(len(shards)) if not (folder / shard_name(shard)).exists()]
    if missing:
        count = sum(len(shards[shard]) for shard in missing)
        needed = bytes_needed(config, count, rows.tokens.shape[1], target.hidden_size)
        console.print(f"labels of {count} rows ({labels.name}): {size(needed)} of disk")
        check_disk(folder, needed, labels.name)
        write_json(folder / INDEX, wanted)
        for shard in track(missing, "labels", len(shards), "shard", len(shards) - len(missing)):
            tensors = _labels_of(target, rows[shards[shard]], config)
            write_atomically(
                folder / shard_name(shard), lambda path, tensors=tensors: save_file(tensors, path)
            )
    return StoredSource(folder, loss.target_trees, target.dtype)


def check_disk(folder: Path, needed: int, name: str) -> None:
    """Raise UserError, with the numbers, unless the disk of `folder` has `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder}: draft.labels.name={name} needs {size(needed)} and its disk has {size(free)}"
            " left. Use draft.labels.name=online, which needs none, or top_m, fewer rows, or"
            " another disk (paths.checkpoints)."
        )


def _labels_of(target: CausalModel, rows: TokenRows, config: HeadConfig) -> dict[str, Tensor]:
    """Tensors of one shard: n rows, and after every token of them (the first has no root, and its
    entry is not read).
    """
    found: dict[str, list[Tensor]] = {}
    for row in range(len(rows)):
        for name, part in _labels_of_row(
            target, rows[row : row + 1].to(target.device), config
        ).items():
            part = (
                part.to(getattr(torch, config.labels.dtype)) if part.is_floating_point() else part
            )
            if part.is_floating_point() and not part.isfinite().all():
                raise UserError(
                    f"draft.labels.dtype={config.labels.dtype}: a feature does not fit it; use"
                    " bfloat16 or float32."
                )
            found.setdefault(name, []).append(part.cpu())
    return {name: torch.cat(parts).contiguous() for name, parts in found.items()}


@torch.no_grad()
def _labels_of_row(target: CausalModel, row: TokenRows, config: HeadConfig) -> dict[str, Tensor]:
    document, loss, nodes = row.document if row.packed else None, config.loss, config.nodes_in_pass
    if not loss.target_trees:
        return {"features": target_features(target, row.tokens, document)[0]}
    roots = torch.arange(row.tokens.shape[1], device=target.device)
    trees = target_beam(target, row.tokens, TreeSpec(loss.k, loss.depth, nodes), roots, document)
    found = {"features": trees.features}
    for level, features in enumerate([trees.features, *trees.labels]):
        if level:
            tree = trees.levels[level - 1]
            found |= {
                f"tokens_{level}": tree.tokens.int(),
                f"parents_{level}": tree.parents.short(),
            }
        if config.labels.name == "top_m":
            states = features.flatten(0, -2).split(4 * nodes)
            parts = [
                target.logits(some).float().softmax(-1).topk(config.labels.m, -1) for some in states
            ]
            values, ids = (
                torch.cat(each).unflatten(0, features.shape[:-1])
                for each in zip(*parts, strict=True)
            )
            found |= {f"ids_{level}": ids.int(), f"probabilities_{level}": values}
        elif level:
            found[f"labels_{level}"] = features
    return found


def _digest(rows: TokenRows) -> str:
    digest = sha256()
    for part in (rows.tokens, rows.loss, rows.document):
        digest.update(part.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
