"""Training a draft head with the tree-aware loss (TALF, paper 003), on trees that its frozen target builds as it goes.

Each step takes rows of tokens, lets the target build its beams behind some of their tokens and follows them with the
head, whose output features are fed back as in decoding. Early steps may stop at a smaller depth: the first pass is most
of what a head has to learn and the cheapest to teach. It knows rows of token ids; not text, and not decoding loops.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import RichProgressBar
from pytorch_lightning.loggers import Logger
from torch import Tensor

from decoding.errors import UserError
from decoding.model import CausalModel
from draft_training.head import EagleHead
from draft_training.language_model import CHECKPOINT, ResumableCheckpoint, RowBatches, training_precision
from draft_training.losses import row_metrics, talf_loss
from draft_training.trees import TargetTrees, target_beam


@dataclass(frozen=True)
class HeadConfig:
    """How a head is trained. Lengths are in tokens, batches in rows; the defaults suit a small target on a CPU."""

    k: int = 4
    """Nodes of a tree at each depth, and candidates of each node."""
    depth: int = 3
    """Draft passes of a tree: the root, its children, ... ; each carries a loss (the paper's and HASS's 3 align steps)."""
    roots: int = 16
    """Roots of a row that get a tree in a step, drawn anew each time; 0: all of them, as in the paper. The loss at depth 0
    takes all in any case, and the loss's expectation does not depend on this."""
    chain_fraction: float = 0.5
    """Share of the steps, at the start, that train depth 0 alone."""
    detach_features: bool = False
    """Stop gradients at fed-back features (HASS), instead of training through them."""
    steps: int = 300
    batch: int = 8
    """Rows in a step; the length of a row is that of the tokens given."""
    lr: float = 4e-3
    """Peak learning rate (AdamW): linear warm-up, then a cosine to zero. The paper's, for large heads, is 3e-4."""
    warm_up: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    nodes_in_pass: int = 128
    """Nodes of a row in one pass of the target, and 4 of them make rows of [V] held at once in the loss: a memory limit."""
    checkpoint_seconds: float = 10.0
    """A checkpoint is written at the first step that ends this long after the last one."""
    seed: int = 0
    """Of the initial weights, the order of the rows and the choice of roots."""


def build_head(target: CausalModel, config: HeadConfig) -> EagleHead:
    """A fresh head for `target`, a pure function of the arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return EagleHead(target)


class TalfModule(pl.LightningModule):
    """Trains `head` on rows of tokens. Only the head's weights are in the checkpoint; the target is never trained."""

    def __init__(self, head: EagleHead, config: HeadConfig):
        super().__init__()
        self.automatic_optimization = False  # rates and finite gradients are checked by hand before a step is taken
        self.head, self.config = head, config
        self._clock = 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.head.parameters(), self.config.lr, betas=self.config.betas, weight_decay=self.config.weight_decay
        )

    def on_train_start(self) -> None:
        self._clock = time.perf_counter()

    def trees(self, rows: Tensor, step: int) -> TargetTrees:
        """The target's trees behind the roots of one step, a pure function of (rows, step, seed)."""
        config, last = self.config, rows.shape[1] - 1
        depth = 1 if step < config.chain_fraction * config.steps else config.depth
        roots = torch.arange(1, last + 1)
        if 0 < config.roots < last:
            generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
            roots = roots[torch.randperm(last, generator=generator)[: config.roots]].sort().values
        return target_beam(self.head.target, rows, config.k, depth, roots.to(rows.device), config.nodes_in_pass)

    def loss(self, trees: TargetTrees) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """`talf_loss` of the head on `trees`."""
        outputs = self.head.tree_features(
            trees.tokens, trees.features, trees.roots, trees.levels, self.config.detach_features
        )
        labels = [trees.features[:, 1:, None], *trees.labels]
        lm_head = self.head.target.lm_head.weight
        if torch.is_autocast_enabled(lm_head.device.type):
            lm_head = lm_head.to(torch.get_autocast_dtype(lm_head.device.type))
        return talf_loss([outputs[0][:, :, None], *outputs[1:]], labels, lm_head, 4 * self.config.nodes_in_pass)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss, losses, agreements = self.loss(self.trees(batch, self.global_step))
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.config.max_norm)
        if not (math.isfinite(float(loss)) and math.isfinite(float(norm))):
            raise UserError(
                f"The head's training loss became {float(loss)} (gradient norm {float(norm)}) at step {self.global_step}: "
                f"the training diverged, and {CHECKPOINT} still holds an earlier, finite state. Lower lr (now "
                f"{self.config.lr}) or raise warm_up, and delete that checkpoint to start again."
            )
        rate = self.config.lr * self.learning_rate_share(self.global_step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        now = time.perf_counter()
        speed, self._clock = batch.numel() / (now - self._clock), now
        self.log("loss", loss.detach(), prog_bar=True)
        for depth, (level, agreement) in enumerate(zip(losses, agreements, strict=True)):
            self.log(f"loss_depth_{depth}", level)
            self.log(f"agreement_depth_{depth}", agreement, prog_bar=depth == 0)
        self.log("lr", rate)
        self.log("tokens_per_second", speed, prog_bar=True)

    def learning_rate_share(self, step: int) -> float:
        """The fraction of the peak learning rate at `step` (from 0)."""
        if step < self.config.warm_up:
            return (step + 1) / self.config.warm_up
        share = (step - self.config.warm_up) / max(1, self.config.steps - self.config.warm_up)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, share)))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["head_config"] = asdict(self.config)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if checkpoint.get("head_config") != asdict(self.config):
            raise UserError(
                f"The unfinished training in {CHECKPOINT} was started with other settings than those of now. Delete the "
                "checkpoint to start again, or go back to the settings it was started with."
            )


def fit_head(
    target: CausalModel,
    tokens: Tensor,
    config: HeadConfig,
    folder: Path,
    logger: Logger | None = None,
    callbacks: Sequence[pl.Callback] = (),
) -> EagleHead:
    """Train a head for `target` and return it, in evaluation mode on the target's device.

    A run that was killed continues from `folder/last.ckpt` with the batches and roots it would have seen, and ends with the
    weights it would have had. A finished run trains no further.

    tokens: rows of token ids, [rows, length], as `data.tokenizer.pack` makes them. logger: gets `loss`, `loss_depth_d` (nats
    a node), `agreement_depth_d` (top-1, of a node), `lr` and `tokens_per_second`. Raises UserError if the loss diverges, the
    checkpoint is of other settings, or tokens and trees do not fit the target.
    """
    if int(tokens.max()) >= target.vocab_size or tokens.shape[1] < 2:
        raise UserError(
            f"tokens: rows of length {tokens.shape[1]} with ids up to {int(tokens.max())} cannot train a head for a target "
            f"of {target.vocab_size} tokens: encode them with the target's tokenizer, in rows of 2 or more."
        )
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / CHECKPOINT
    module = TalfModule(build_head(target, config), config)
    trainer = pl.Trainer(
        accelerator="auto" if target.device.type != "cpu" else "cpu",
        devices=1,
        precision=training_precision(),
        max_epochs=1,
        max_steps=config.steps,
        logger=logger or False,
        log_every_n_steps=10,
        callbacks=[*callbacks, ResumableCheckpoint(checkpoint, config.checkpoint_seconds), RichProgressBar()],
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    batches = RowBatches(tokens, config.batch, config.steps, config.seed, first=lambda: trainer.global_step)
    module.train()
    trainer.fit(module, batches, ckpt_path=str(checkpoint) if checkpoint.exists() else None, weights_only=True)
    return module.head.eval().requires_grad_(False).to(target.device)


@torch.inference_mode()
def held_out_report(
    head: EagleHead, target: CausalModel, tokens: Tensor, k: int = 4, depth: int = 3, stride: int = 8, seed: int = 0
) -> dict[str, Any]:
    """How well `head` follows `target` on held-out rows `tokens` [rows, length], behind every `stride`-th token.

    Returns `roots` (count); `agreement` and `kl` (nats), lists by depth over the nodes of the target's own beams;
    `agreement_by_rank`: for each depth >= 1, a list over the node's rank (1..k by joint probability) in its beam; and
    `overlap`: mean of sum_v min(p, q) at the root and after 1, ..., 4 tokens sampled from q, which is the acceptance rate of
    one speculative draw at temperature 1 there.
    """
    report: dict[str, Any] = {"roots": 0}
    lm_head = target.lm_head.weight
    roots = torch.arange(1, tokens.shape[1], stride, device=target.device)
    agreement: list[list[Tensor]] = [[] for _ in range(depth)]
    kl: list[list[Tensor]] = [[] for _ in range(depth)]
    generator = torch.Generator().manual_seed(seed)
    overlap: list[list[Tensor]] = []
    for row in tokens.to(target.device).split(4):
        trees = target_beam(target, row, k, depth, roots)
        outputs = head.tree_features(row, trees.features, roots, trees.levels)
        outputs = [outputs[0][:, roots - 1, None], *outputs[1:]]
        labels = [trees.features[:, roots, None], *trees.labels]
        report["roots"] += len(row) * len(roots)
        for level, (guess, truth) in enumerate(zip(outputs, labels, strict=True)):
            metrics = row_metrics(guess.flatten(0, 2), truth.flatten(0, 2), lm_head)
            agreement[level].append(metrics.agree.float().view(-1, guess.shape[2]))
            kl[level].append(metrics.kl)
    report["agreement"] = [float(torch.cat(parts).mean()) for parts in agreement]
    report["kl"] = [float(torch.cat(parts).mean()) for parts in kl]
    report["agreement_by_rank"] = [torch.cat(parts).mean(0).tolist() for parts in agreement[1:]]
    return report
