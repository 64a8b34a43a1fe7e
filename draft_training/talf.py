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
from pytorch_lightning.loggers import Logger
from torch import Tensor

from decoding.errors import UserError
from decoding.model import CausalModel
from draft_training.head import EagleHead, TreeLevel
from draft_training.losses import row_metrics, talf_loss
from draft_training.muon import Muon
from draft_training.resumable import CHECKPOINT, train_rows
from draft_training.trees import TargetTrees, target_beam, target_levels

_SAMPLED = 4  # tokens drafted in the simulated figure of a report


@dataclass
class HeadConfig:
    """How a head is trained. Lengths are in tokens, batches in rows; the defaults suit a small target on a CPU."""

    k: int = 4
    """Nodes of a tree at each depth, and candidates of each node."""
    depth: int = 3
    """Draft passes of a tree: the root, its children, ... ; each carries a loss (the paper's and HASS's 3 align
    steps)."""
    roots: int = 32
    """Roots of a row that get a tree in a step, drawn anew each time; 0: all of them, as in the paper. The loss at
    depth 0 takes all in any case, and the loss's expectation does not depend on this; its noise does, and 8 roots of
    256 were so noisy that trees made depth 0 worse (overlap 0.70 against 0.76 with 32)."""
    chain_fraction: float = 0.6
    """Share of the steps, at the start, that train depth 0 alone."""
    detach_features: bool = False
    """Stop gradients at fed-back features (HASS), instead of training through them."""
    steps: int = 350
    batch: int = 4
    """Rows in a step; the length of a row is that of the tokens given."""
    optimizer: str = "muon"
    """`muon`: Muon for the matrices and AdamW for the norm; `adamw`: AdamW for all, as in the paper."""
    lr_muon: float = 0.02
    """Peak learning rate of what Muon trains; linear warm-up, then a cosine to zero, as for AdamW."""
    lr_adam: float = 6e-3
    """Peak learning rate of what AdamW trains. The paper's, for the heads of 7B to 70B targets, is 3e-4."""
    warm_up: int = 10
    nodes_in_pass: int = 128
    """Nodes of a row in one pass of the target, and 4 of them make rows of [V] held at once in the loss: a memory
    limit."""
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
        if config.optimizer not in ("muon", "adamw"):
            raise UserError(f"optimizer={config.optimizer}: a head is trained with muon or adamw.")
        self.automatic_optimization = False  # a step is taken only if its gradients are finite
        self.head, self.config = head, config
        self._clock = 0.0

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        config = self.config
        matrices = [p for p in self.head.parameters() if p.ndim == 2 and config.optimizer == "muon"]
        inside = {id(p) for p in matrices}
        others = [p for p in self.head.parameters() if id(p) not in inside]
        adamw = torch.optim.AdamW(others, lr=config.lr_adam, betas=(0.9, 0.95), weight_decay=0.0)
        if not matrices:
            return [adamw]
        return [adamw, Muon(matrices, lr=config.lr_muon)]

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
        outputs = self.head.tree_features(trees.tokens, trees.features, trees.roots, trees.levels, self.config.detach_features)
        labels = [trees.features[:, 1:, None], *trees.labels]
        lm_head = self.head.target.lm_head.weight
        if torch.is_autocast_enabled(lm_head.device.type):
            lm_head = lm_head.to(torch.get_autocast_dtype(lm_head.device.type))
        return talf_loss([outputs[0][:, :, None], *outputs[1:]], labels, lm_head, 4 * self.config.nodes_in_pass)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss, losses, agreements = self.loss(self.trees(batch, self.global_step))
        self.head.zero_grad()
        self.manual_backward(loss)
        value = loss.item()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.head.parameters()]).item()
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise UserError(
                f"The head's training loss became {value} (norm of its gradient {norm}) at step "
                f"{self.global_step}: the training diverged; {CHECKPOINT} still holds an earlier, finite state. Lower "
                f"lr_muon (now {self.config.lr_muon}) and lr_adam (now {self.config.lr_adam}) or raise warm_up, and "
                "delete that checkpoint to start again."
            )
        share = self.learning_rate_share(self.global_step)
        optimizers = self.optimizers()
        adamw, *muon = optimizers if isinstance(optimizers, list) else [optimizers]
        for optimizer, peak in ((adamw, self.config.lr_adam), *((each, self.config.lr_muon) for each in muon)):
            for group in optimizer.param_groups:
                group["lr"] = peak * share
        for each in muon:
            each.optimizer.step()  # below Lightning's wrapper, so that only AdamW's counts as a step
        adamw.step()
        now = time.perf_counter()
        speed, self._clock = batch.numel() / (now - self._clock), now
        self.log("loss", value, prog_bar=True)
        for depth, (level, agreement) in enumerate(zip(losses, agreements, strict=True)):
            self.log(f"loss_depth_{depth}", level)
            self.log(f"agreement_depth_{depth}", agreement, prog_bar=depth == 0)
        self.log("lr", (self.config.lr_muon if muon else self.config.lr_adam) * share)
        self.log("tokens_per_second", speed, prog_bar=True)

    def learning_rate_share(self, step: int) -> float:
        """The fraction of the peak learning rates at `step` (from 0)."""
        if step < self.config.warm_up:
            return (step + 1) / self.config.warm_up
        share = (step - self.config.warm_up) / max(1, self.config.steps - self.config.warm_up)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, share)))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["head_config"] = asdict(self.config)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if checkpoint.get("head_config") != asdict(self.config):
            raise UserError(
                f"The unfinished training in {CHECKPOINT} was started with other settings than those of now. Delete "
                "the checkpoint to start again, or go back to the settings it was started with."
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

    A run that was killed continues from `folder/last.ckpt` with the batches and roots it would have seen, and ends
    with the weights it would have had. A finished run trains no further.

    tokens: rows of token ids, [rows, length], as `data.tokenizer.pack` makes them. logger: gets `loss`,
    `loss_depth_d` (nats a node), `agreement_depth_d` (top-1, of a node), `lr` and `tokens_per_second`. Raises
    UserError if the loss diverges, the checkpoint is of other settings, or tokens and trees do not fit the target.
    """
    if int(tokens.max()) >= target.vocab_size or tokens.shape[1] < 2:
        raise UserError(
            f"tokens: rows of length {tokens.shape[1]} with ids up to {int(tokens.max())} cannot train a head for a "
            f"target of {target.vocab_size} tokens: encode them with the target's tokenizer, in rows of 2 or more."
        )
    module = TalfModule(build_head(target, config), config)
    where = "cpu" if target.device.type == "cpu" else "auto"
    train_rows(module, tokens, config, folder, [target.module], logger, callbacks, where)
    return module.head.eval().requires_grad_(False).to(target.device)


@torch.inference_mode()
def held_out_report(
    head: EagleHead, target: CausalModel, tokens: Tensor, k: int = 4, depth: int = 3, stride: int = 8, seed: int = 0
) -> dict[str, Any]:
    """How well `head` follows `target` on held-out rows `tokens` [rows, length], behind every `stride`-th token.

    Returns `roots` (count); `agreement` and `kl` (nats), lists by depth over the nodes of the target's own beams;
    `agreement_by_rank`: for each depth >= 1, a list over the node's rank (1..k by joint probability) in its beam; and
    `overlap`: mean of sum_v min(p, q) at the root and after 1, ..., 4 tokens sampled from q, which is the acceptance
    rate of one speculative draw at temperature 1 there.
    """
    report: dict[str, Any] = {"roots": 0}
    lm_head = target.lm_head.weight
    roots = torch.arange(1, tokens.shape[1], stride, device=target.device)
    agreement: list[list[Tensor]] = [[] for _ in range(depth)]
    kl: list[list[Tensor]] = [[] for _ in range(depth)]
    generator = torch.Generator().manual_seed(seed)
    overlap: list[Tensor] = []
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
        overlap.append(sampled_overlap(head, target, trees, generator))
    report["agreement"] = [float(torch.cat(parts).mean()) for parts in agreement]
    report["kl"] = [float(torch.cat(parts).mean()) for parts in kl]
    report["agreement_by_rank"] = [torch.cat(parts).mean(0).tolist() for parts in agreement[1:]]
    report["overlap"] = torch.cat(overlap, 1).mean(1).tolist()
    return report


@torch.inference_mode()
def sampled_overlap(head: EagleHead, target: CausalModel, trees: TargetTrees, generator: torch.Generator) -> Tensor:
    """sum_v min(p, q) [5, B * R] behind each root of `trees`, and after 1, ..., 4 tokens sampled one after another
    from q with `generator` (on the CPU); temperature 1."""
    tokens, roots, lm_head = trees.tokens, trees.roots, target.lm_head.weight
    batch, count = len(tokens), len(roots)
    paths = tokens.new_zeros(batch, count, 0)
    outputs = head.tree_features(tokens, trees.features, roots, [])[0][:, roots - 1]
    labels, overlaps = trees.features[:, roots], []
    for drafted in range(_SAMPLED + 1):
        overlaps.append(row_metrics(outputs.flatten(0, 1), labels.flatten(0, 1), lm_head).overlap)
        if drafted == _SAMPLED:
            return torch.stack(overlaps)
        q = target.logits(outputs).float().softmax(-1).flatten(0, 1).cpu()
        drawn = torch.multinomial(q, 1, generator=generator).view(batch, count, 1).to(tokens.device)
        paths = torch.cat([paths, drawn], -1)
        levels = [TreeLevel(token[..., None], torch.zeros_like(token[..., None])) for token in paths.unbind(-1)]
        outputs = head.tree_features(tokens, trees.features, roots, levels)[-1][:, :, 0]
        labels = target_levels(target, tokens, roots, levels)[-1][:, :, 0]
