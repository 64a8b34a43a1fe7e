"""What the target says of the rows a head is trained on: computed in the step, or computed once and kept on disk.

On disk are, for every row, the target's features along it (the head's input) and, for TALF, the trees behind all its roots
with their labels: the target's features at the nodes, or the m most likely tokens there. Shards of a few rows are written
whole, so an interrupted preparation goes on where it stopped. It knows nothing of heads.
"""

import shutil
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.dialogues.token_rows import TokenRows
from data.traces.budget import size
from decoding.common.errors import UserError
from decoding.common.files import read_json, write_atomically, write_json
from decoding.common.progress import console, track
from decoding.model import CausalModel
from draft_training.export import fingerprint
from draft_training.head import TreeLevel, take_rows
from draft_training.losses import Labels, TopLabels
from draft_training.settings import TARGET_FEATURES, TOP_M
from draft_training.target_trees import TargetTrees, chains, target_beam, target_features

SHARD_ROWS = 16
INDEX = "labels.json"
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class Targets(Protocol):
    """The target's part of a training step."""

    def trees(self, tokens: Tensor, document: Tensor | None, places: Tensor, roots: Tensor, depth: int) -> TargetTrees:
        """Trees of `depth` draft passes behind `roots` [B, R] of the rows `tokens` [B, L], which are number `places` [B] of
        all rows; document [B, L]: None where a row is one document."""
        ...


@dataclass
class Online:
    """Runs the target in the step."""

    target: CausalModel
    loss: str
    k: int
    nodes_in_pass: int
    layers: tuple[int, ...] = ()

    def trees(self, tokens: Tensor, document: Tensor | None, places: Tensor, roots: Tensor, depth: int) -> TargetTrees:
        """See `Targets`."""
        if self.loss == "talf":
            return target_beam(self.target, tokens, self.k, depth, roots, self.nodes_in_pass, document, self.layers)
        with torch.no_grad():
            return chains(tokens, target_features(self.target, tokens, document)[0], roots, depth)


@dataclass
class Stored:
    """Reads what `stored_targets` wrote. numbers [N]: of every row of a training, which row it is here; None: the same."""

    folder: Path
    loss: str
    dtype: torch.dtype
    numbers: Tensor | None = None

    def trees(self, tokens: Tensor, document: Tensor | None, places: Tensor, roots: Tensor, depth: int) -> TargetTrees:
        """See `Targets`."""
        places = places if self.numbers is None else self.numbers[places]
        features = self._read("features", places, tokens.device).to(self.dtype)
        if self.loss != "talf":
            return chains(tokens, features, roots, depth)
        trees = TargetTrees(tokens, features, roots, [], [], self._labels(0, places, tokens.device, features))
        for level in range(1, depth):
            kept = [self._read(f"{name}_{level}", places, tokens.device) for name in ("tokens", "parents")]
            trees.levels.append(TreeLevel(*(take_rows(part, roots).long() for part in kept)))
            labels = self._labels(level, places, tokens.device, None)
            if isinstance(labels, TopLabels):
                labels = TopLabels(take_rows(labels.ids, roots), take_rows(labels.probabilities, roots))
            else:
                labels = take_rows(labels, roots).to(self.dtype)
            trees.labels.append(labels)
        return trees

    def _labels(self, level: int, places: Tensor, device: torch.device, features: Tensor | None) -> Labels:
        with safe_open(self._file(int(places[0])), "pt") as file:
            names = set(file.keys())
        if f"ids_{level}" in names:
            return TopLabels(*(self._read(f"{name}_{level}", places, device) for name in ("ids", "probabilities")))
        return features if level == 0 else self._read(f"labels_{level}", places, device)

    def _file(self, place: int) -> Path:
        return self.folder / shard_name(place // SHARD_ROWS)

    def _read(self, name: str, places: Tensor, device: torch.device) -> Tensor:
        rows = []
        for place in places.tolist():
            with safe_open(self._file(place), "pt") as file:
                rows.append(file.get_slice(name)[place % SHARD_ROWS])
        return torch.stack(rows).to(device)


def shard_name(number: int) -> str:
    return f"labels-{number:05d}.safetensors"


def bytes_needed(
    rows: int, length: int, hidden: int, mode: str, loss: str, k: int, depth: int, top_m: int, dtype: torch.dtype
) -> int:
    """Bytes of all labels on disk, but for the files' headers. depth: draft passes."""
    number = dtype.itemsize
    label = hidden * number if mode == TARGET_FEATURES else top_m * (4 + number)
    token = hidden * number  # the features along the rows
    if loss == "talf":
        token += (depth - 1) * k * (label + 4 + 2) + (label if mode == TOP_M else 0)
    return rows * length * token


def stored_targets(
    target: CausalModel,
    rows: TokenRows,
    folder: Path,
    mode: str,
    loss: str,
    k: int,
    depth: int,
    top_m: int,
    dtype: str,
    nodes_in_pass: int = 128,
) -> Stored:
    """Write what `mode` keeps of `target` on `rows` into `folder`, unless it is there, and return its reader.

    Raises UserError, before anything is computed, if the disk can't hold it or the folder holds other labels.
    """
    if dtype not in _DTYPES:
        raise UserError(f"draft.label_dtype={dtype}: choose one of {', '.join(_DTYPES)}.")
    if mode == TOP_M and not 1 <= top_m <= target.vocab_size:
        raise UserError(f"draft.top_m={top_m}: it must lie in 1..{target.vocab_size}.")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {
        "mode": mode, "loss": loss, "k": k, "depth": depth, "top_m": top_m if mode == TOP_M else None, "dtype": dtype,
        "target": fingerprint(target), "rows": _digest(rows),
    }  # fmt: skip
    if (folder / INDEX).exists() and (found := read_json(folder / INDEX)) != wanted:
        changed = ", ".join(key for key in wanted if found.get(key) != wanted[key])
        raise UserError(
            f"{folder}: it holds labels made otherwise ({changed}). Delete the folder, or go back to those settings."
        )
    shards = range(-(-len(rows) // SHARD_ROWS))
    missing = [shard for shard in shards if not (folder / shard_name(shard)).exists()]
    length = rows.tokens.shape[1]
    if missing:
        count = sum(len(rows.tokens[shard * SHARD_ROWS : (shard + 1) * SHARD_ROWS]) for shard in missing)
        needed = bytes_needed(count, length, target.hidden_size, mode, loss, k, depth, top_m, _DTYPES[dtype])
        console.print(f"labels of {count} rows ({mode}): {size(needed)} of disk")
        check_disk(folder, needed, mode)
        write_json(folder / INDEX, wanted)
    for shard in track(missing, "labels", len(shards), "shard", len(shards) - len(missing)) if missing else ():
        part = rows[slice(shard * SHARD_ROWS, (shard + 1) * SHARD_ROWS)]
        tensors = _label(target, part, mode, loss, k, depth, top_m, _DTYPES[dtype], nodes_in_pass)
        write_atomically(folder / shard_name(shard), lambda path, tensors=tensors: save_file(tensors, path))
    return Stored(folder, loss, target.dtype)


def check_disk(folder: Path, needed: int, mode: str) -> None:
    """Raise UserError, with the numbers, unless the disk of `folder` has `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder}: draft.labels={mode} needs {size(needed)} and its disk has {size(free)} left. Use draft.labels=online, "
            "which needs none, or top_m, fewer rows, or another disk (paths.checkpoints)."
        )


@torch.no_grad()
def _label(
    target: CausalModel, rows: TokenRows, mode: str, loss: str, k: int, depth: int, top_m: int, dtype: torch.dtype, nodes: int
) -> dict[str, Tensor]:
    """Tensors of one shard: n rows, and behind every token of them (the first has no root: what is there is not read)."""
    found: dict[str, list[Tensor]] = {}

    def keep(name: str, states: Tensor) -> None:
        states = (
            states.to(dtype) if states.is_floating_point() else states.to(torch.int16 if "parents" in name else torch.int32)
        )
        if states.is_floating_point() and not states.isfinite().all():
            raise UserError(f"draft.label_dtype={dtype}: a feature does not fit it; use bfloat16 or float32.")
        found.setdefault(name, []).append(states.cpu())

    def keep_labels(level: int, features: Tensor) -> None:
        if mode == TARGET_FEATURES:
            return keep(f"labels_{level}", features) if level else None
        parts = [
            target.logits(states).float().softmax(-1).topk(top_m, -1) for states in features.flatten(0, -2).split(4 * nodes)
        ]
        shape = (*features.shape[:-1], top_m)
        keep(f"ids_{level}", torch.cat([part.indices for part in parts]).view(shape))
        keep(f"probabilities_{level}", torch.cat([part.values for part in parts]).view(shape))
        return None

    for row in range(len(rows)):
        one = rows[slice(row, row + 1)].to(target.device)
        document = one.document if one.packed else None
        if loss != "talf":
            keep("features", target_features(target, one.tokens, document)[0])
            continue
        roots = torch.arange(one.tokens.shape[1], device=target.device)
        trees = target_beam(target, one.tokens, k, depth, roots, nodes, document)
        keep("features", trees.features)
        keep_labels(0, trees.features)
        for level, (tree, labels) in enumerate(zip(trees.levels, trees.labels, strict=True), 1):
            keep(f"tokens_{level}", tree.tokens)
            keep(f"parents_{level}", tree.parents)
            keep_labels(level, labels)
    return {name: torch.cat(parts).contiguous() for name, parts in found.items()}


def _digest(rows: TokenRows) -> str:
    digest = sha256()
    for part in (rows.tokens, rows.loss, rows.document):
        digest.update(part.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
