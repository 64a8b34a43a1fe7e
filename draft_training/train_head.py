"""Training a draft head beside its frozen target, with the loss of TALF (SALF & TALF paper), HASS or EAGLE.

Each step takes rows of tokens and follows with the head, whose output features are fed back as in decoding: trees that the
target builds behind some tokens (TALF), the text itself (HASS), or nothing behind the text (EAGLE). Early steps may stop at a
smaller depth: the first pass is most of what a head has to learn and the cheapest to teach. It knows rows of token ids; not
text, and not decoding loops.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from torch import Tensor

from data.dialogues.token_rows import TokenRows
from decoding.common.errors import UserError
from decoding.common.progress import console
from decoding.model import CausalModel
from draft_training.averaging import HeadAverage
from draft_training.document_masks import choose_roots, counted_roots
from draft_training.draft_vocab import frequent_tokens, share_inside
from draft_training.eagle3 import Eagle3Head
from draft_training.export import load_head
from draft_training.head import EagleHead
from draft_training.label_source import Online, Targets, stored_targets
from draft_training.losses import tree_loss
from draft_training.muon import Muon
from draft_training.precision import check_resumed, resolved
from draft_training.settings import FSDP, ONLINE, HeadConfig, check_head_config
from draft_training.strategies import Sharded, ShardedHead, whole
from draft_training.trainer import CHECKPOINT, RowBatches, train_rows

HEADS = {"final": EagleHead, "three": Eagle3Head}
"""By `draft.features`."""


def build_head(target: CausalModel, config: HeadConfig, vocabulary: Tensor | None = None) -> EagleHead:
    """The head that training begins with: random, a pure function of the arguments, or the one in `config.warm_start`, with
    its own draft vocabulary. vocabulary: of a random one, as in `Eagle3Head`. Raises UserError as `load_head` does."""
    if config.warm_start:
        head = load_head(config.warm_start, target)
        if type(head) is not HEADS[config.features]:
            raise UserError(
                f"draft.warm_start={config.warm_start}: it holds a head of the kind {head.kind}, which draft.features="
                f"{config.features} cannot go on with. Choose a head trained with the same draft.features."
            )
        if (drafted := None if head.vocabulary is None else len(head.vocabulary)) != config.draft_vocab:
            raise UserError(
                f"draft.warm_start={config.warm_start}: its head drafts from a vocabulary of {drafted or 'all'} tokens, and "
                f"draft.draft_vocab={config.draft_vocab} asks for another. Choose the same."
            )
        return head.requires_grad_(True).train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        part = {} if vocabulary is None else {"vocabulary": vocabulary}
        return HEADS[config.features](target, config.layer, **part)


@dataclass
class HeadBatch:
    """Some rows, and their numbers among all rows [B]."""

    rows: TokenRows
    places: Tensor

    def to(self, device: torch.device) -> "HeadBatch":
        return HeadBatch(self.rows.to(device), self.places)


class NumberedRows:
    """Rows that come with their numbers."""

    def __init__(self, rows: TokenRows):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, places: Tensor) -> HeadBatch:
        return HeadBatch(self.rows[places], places)


class HeadModule(pl.LightningModule):
    """Trains `head` on batches of rows, with what `targets` says of them. Only the head's weights are in the checkpoint; the
    target is never trained."""

    def __init__(self, head: EagleHead, config: HeadConfig, targets: Targets | None = None):
        super().__init__()
        check_head_config(config)
        self.automatic_optimization = False  # a step is taken only if its gradients are finite
        self.head, self.config = head, config
        self.targets = targets or Online(head.target, config.loss, config.k, config.nodes_in_pass, head.feature_layers)
        self._clock = 0.0
        self.title = "training the head"

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        config = self.config
        hidden = [p for name, p in self.head.named_parameters() if p.ndim == 2 and name != "lm_head.weight"]
        matrices = hidden if config.optimizer == "muon" else []
        inside = {id(p) for p in matrices}
        others = [p for p in self.head.parameters() if id(p) not in inside]
        adamw = torch.optim.AdamW(others, lr=config.lr_adam, betas=(0.9, 0.95), weight_decay=0.0)
        if not matrices:
            return [adamw]
        return [adamw, Muon(matrices, lr=config.lr_muon, bfloat16=training_precision(self.head, config).startswith("bf16"))]

    def on_fit_start(self) -> None:
        self.head.target.to(self.device)  # no submodule: Lightning does not move it to this process's device

    def on_train_start(self) -> None:
        self._clock = time.perf_counter()

    def loss(self, batch: HeadBatch, step: int, part: int = 0) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """`tree_loss` of the head on the roots of one pass, a pure function of (batch, step, part, seed). part: number of the
        pass in its step."""
        config, rows = self.config, batch.rows
        document = rows.document if rows.packed else None
        depth = 1 if step < config.chain_fraction * config.steps else config.passes()
        counts = counted_roots(rows.loss, rows.document)
        weights = [counts[:, 1:] / counts.sum().clamp(min=1)]
        whole = counts.clone()  # roots whose whole tree counts: along the text (HASS), every token has to
        for ahead in range(1, depth if config.loss == "hass" else 1):
            whole &= counted_roots(rows.loss, rows.document, ahead)
        generator = torch.Generator().manual_seed((config.seed * 1_000_003 + step) * 1009 + part)
        roots, share = choose_roots(whole, config.roots if depth > 1 else 1, generator)
        trees = self.targets.trees(rows.tokens, document, batch.places, roots, depth)
        detach = config.detach_features or config.loss == "hass"
        outputs = self.head.tree_features(trees.tokens, trees.features, trees.roots, trees.levels, detach, document)
        lm_head, own = self.head.target.lm_head.weight, self.head.readout
        own = None if own is lm_head else own
        if torch.is_autocast_enabled(lm_head.device.type):
            lm_head = lm_head.to(torch.get_autocast_dtype(lm_head.device.type))
            own = own if own is None else own.to(lm_head.dtype)
        outputs = [self.head.read(level) for level in outputs]
        labels = [trees.along[:, 1:], *trees.labels]
        labels[0] = labels[0].flatten(0, 1)[:, None]
        outputs[0] = outputs[0].flatten(0, 1)[:, None]
        weights += [share] * (len(outputs) - 1)
        return tree_loss(outputs, labels, lm_head, 4 * config.nodes_in_pass, config.terms(), weights, own, self.head.vocabulary)

    def training_step(self, batch: HeadBatch, batch_idx: int) -> None:
        config, found = self.config, []
        self.head.zero_grad()
        parts = range(0, len(batch.places), config.batch)
        for part, start in enumerate(parts):
            rows = slice(start, start + config.batch)
            loss, losses, agreements = self.loss(HeadBatch(batch.rows[rows], batch.places[rows]), self.global_step, part)
            self.manual_backward(loss / len(parts))
            found.append(torch.stack([loss.detach(), *losses, *agreements]))
        value, *levels = torch.stack(found).mean(0).tolist()
        norm = whole(torch.nn.utils.get_total_norm([p.grad for p in self.head.parameters()])).item()
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise UserError(
                f"The head's training loss became {value} (norm of its gradient {norm}) at step "
                f"{self.global_step}: the training diverged. {CHECKPOINT}, if one was written by then, stands as it was, from "
                f"an earlier, finite step. Lower lr_muon (now {config.lr_muon}) and lr_adam (now {config.lr_adam}) or raise "
                "warm_up, and delete that checkpoint to start again."
            )
        share = self.learning_rate_share(self.global_step)
        optimizers = self.optimizers()
        adamw, *muon = optimizers if isinstance(optimizers, list) else [optimizers]
        for optimizer, peak in ((adamw, config.lr_adam), *((each, config.lr_muon) for each in muon)):
            for group in optimizer.param_groups:
                group["lr"] = peak * share
        for each in muon:
            each.optimizer.step()  # below Lightning's wrapper, so that only AdamW's counts as a step
        adamw.step()
        now = time.perf_counter()
        speed, self._clock = batch.rows.tokens.numel() / (now - self._clock), now
        self.log("loss", value, prog_bar=True)
        for depth in range(len(levels) // 2):
            self.log(f"loss_depth_{depth}", levels[depth])
            self.log(f"agreement_depth_{depth}", levels[len(levels) // 2 + depth], prog_bar=depth == 0)
        self.log("lr", (config.lr_muon if muon else config.lr_adam) * share)
        self.log("tokens_per_second", speed, prog_bar=True)

    def learning_rate_share(self, step: int) -> float:
        """The fraction of the peak learning rates at `step` (from 0)."""
        if step < self.config.warm_up:
            return (step + 1) / self.config.warm_up
        share = (step - self.config.warm_up) / max(1, self.config.steps - self.config.warm_up)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, share)))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["head_config"] = asdict(self.config)
        checkpoint["trained_in"] = training_precision(self.head, self.config)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if checkpoint.get("head_config") != asdict(self.config):
            raise UserError(
                f"The unfinished training in {CHECKPOINT} was started with other settings than those of now. Delete "
                "the checkpoint to start again, or go back to the settings it was started with."
            )
        check_resumed(checkpoint, training_precision(self.head, self.config), CHECKPOINT)


class ShardedHeadModule(ShardedHead, HeadModule):
    """The same, with the head shared out among the processes."""


def fit_head(
    target: CausalModel,
    rows: TokenRows | Tensor,
    config: HeadConfig,
    folder: Path,
    logger: Logger | None = None,
    callbacks: Sequence[pl.Callback] = (),
) -> EagleHead:
    """Train a head for `target` and return it, in evaluation mode on the target's device.

    A run that was killed continues from `folder/last.ckpt` with the batches and roots it would have seen, and ends
    with the weights it would have had. A finished run trains no further.

    rows: with loss masks and documents, or plain token ids [rows, length], of which every token counts. logger: gets `loss`,
    `loss_depth_d` (nats a node, weighted terms), `agreement_depth_d` (top-1, of a node), `lr` and `tokens_per_second`.
    Labels on disk are made in `folder/labels` first. The precision, such as what `draft.precision=auto` chose, is printed, and
    is the head's `trained_in`. Raises UserError if the loss diverges, the checkpoint is of other settings or another precision,
    the disk is too small for the labels, or rows and trees do not fit the target.
    """
    check_head_config(config)
    if config.ema_decay and target.dtype.itemsize < 4:
        raise UserError(
            f"draft.ema_decay={config.ema_decay}: an average of {target.dtype} weights would not move. Load the target with "
            "model.dtype=float32, or use ema_decay=0."
        )
    strategy = Sharded(config.devices) if config.strategy == FSDP else config.strategy
    if target.device.type == "cuda" and config.devices > torch.cuda.device_count():
        raise UserError(f"draft.devices={config.devices}: this machine has {torch.cuda.device_count()} GPUs. Use no more.")
    rows = training_rows(rows if isinstance(rows, TokenRows) else TokenRows.plain(rows), target, config)
    targets = None
    if config.labels != ONLINE:
        seen = rows_seen(len(rows), config)
        targets = stored_targets(
            target, rows[seen], folder / "labels", config.labels, config.loss, config.k, config.passes(), config.top_m,
            config.label_dtype, config.nodes_in_pass,
        )  # fmt: skip
        targets.numbers = torch.zeros(len(rows)).long().scatter_(0, seen, torch.arange(len(seen)))
    vocabulary = frequent_tokens(rows, config.draft_vocab, target.vocab_size) if config.draft_vocab else None
    head = build_head(target, config, vocabulary)
    if head.vocabulary is not None:
        share = share_inside(rows, head.vocabulary.cpu())
        console.print(f"{len(head.vocabulary)} of {target.vocab_size} tokens can be drafted: {share:.1%} of what is trained on")
    module = (ShardedHeadModule if config.strategy == FSDP else HeadModule)(head, config, targets)
    where = "cpu" if target.device.type == "cpu" else "auto"
    options = {"strategy": strategy, "devices": config.devices, "precision": config.precision}
    if config.ema_decay:
        callbacks = [*callbacks, HeadAverage(config.ema_decay)]
    train_rows(
        module, NumberedRows(rows), config, folder, [target.module], logger, callbacks, where,
        config.batch * config.accumulate, options,
    )  # fmt: skip
    module.head.trained_in = training_precision(module.head, config)
    return module.head.eval().requires_grad_(False).to(target.device)


def training_precision(head: EagleHead, config: HeadConfig) -> str:
    """Lightning's name of the precision in which `config` trains `head`: on a CPU where its target is there."""
    return resolved(config.precision, head.target.device if head.target.device.type == "cpu" else None)


def rows_seen(count: int, config: HeadConfig) -> Tensor:
    """Numbers of the rows, of `count`, that a training comes across; ascending."""
    batch = config.batch * config.accumulate * config.devices
    if batch * config.steps >= count:
        return torch.arange(count)
    order = RowBatches(torch.arange(count), batch, config.steps, config.seed, lambda: 0)
    return torch.cat([order.rows(step) for step in range(config.steps)]).unique()


def training_rows(rows: TokenRows, target: CausalModel, config: HeadConfig) -> TokenRows:
    """The rows that have something to train on. Raises UserError if there are none, or if they do not fit target or trees."""
    highest, length = int(rows.tokens.max()), rows.tokens.shape[1]
    if highest >= target.vocab_size or int(rows.tokens.min()) < 0:
        raise UserError(
            f"tokens: ids up to {highest} cannot train a head for a target of {target.vocab_size} tokens: encode them with "
            "the target's tokenizer."
        )
    if length < config.depth + 2:
        raise UserError(
            f"rows of {length} tokens are too short for draft.depth={config.depth}: a root needs a token before it and "
            f"{config.depth} behind it. Use longer rows ({config.depth + 2} or more) or a smaller depth."
        )
    useful = counted_roots(rows.loss, rows.document).any(1)
    if not bool(useful.any()):
        raise UserError(
            "none of the rows has a token whose prediction counts (two tokens or more into its document): is there an "
            "assistant's turn in the dialogues, and was the chat template's mask applied?"
        )
    return rows[useful]
