"""Training a selector with Lightning: Eq. 12 on labelled roots, early stopping on held-out log-TPS."""

from dataclasses import dataclass, field
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar
from pytorch_lightning.loggers import Logger
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from decoding.errors import UserError
from selector.objective import aggregate_throughput, best_static, selector_loss
from selector.roots import Roots
from selector.selector import Selector, SelectorSchema


@dataclass
class SelectorConfig:
    """Network, objective and optimiser of the selector.

    verifier: whose labels it learns. tail_weight, tail_fraction: lambda and alpha of Eq. 12; entropy_weight: see
    `selector.objective.selector_loss`. epochs: at most; patience:
    epochs without a better held-out loss before it stops. static_start: how sharply the untrained policy prefers the
    trees that are best used throughout (0: not at all; too much, and other trees get no gradient). contexts: of the
    latency warm-up, in tokens; the longest traced one is added.
    """

    verifier: str = "specinfer"
    width: int = 128
    hidden: list[int] = field(default_factory=lambda: [512, 32])
    dropout: float = 0.1
    static_start: float = 20.0
    tail_weight: float = 1.0
    tail_fraction: float = 0.05
    entropy_weight: float = 0.003
    lr: float = 3e-4
    weight_decay: float = 0.1
    batch: int = 128
    epochs: int = 200
    patience: int = 40
    contexts: list[int] = field(default_factory=lambda: [64, 256])
    seed: int = 0


class SelectorModule(pl.LightningModule):
    """Lightning wrapper: batches are (index,) into the roots, whose tensors it holds."""

    def __init__(self, selector: Selector, config: SelectorConfig, training: Roots, validation: Roots, base: Tensor):
        super().__init__()
        self.selector, self.config = selector, config
        self._roots = {"training": training, "validation": validation}
        self._efficiency = {name: roots.efficiency for name, roots in self._roots.items()}
        self._base = base  # [settings] index of the baseline action

    def loss(self, name: str, index: Tensor) -> tuple[Tensor, Tensor]:
        """Eq. 12 and the chosen actions [B] on the roots `index` [B] of one split."""
        roots = self._roots[name]
        states = (roots.h_p_previous[index], roots.h_q_previous[index], roots.h_q_root[index])
        logits = self.selector(*(h.to(self.device) for h in states), roots.scalars[index].to(self.device))
        loss = selector_loss(
            logits,
            self._efficiency[name][index].to(self.device),
            roots.seconds[index].to(self.device),
            self._base[roots.setting[index]].to(self.device),
            self.config.tail_weight,
            self.config.tail_fraction,
            self.config.entropy_weight if name == "training" else 0.0,
        )
        return loss, logits.argmax(-1)

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        torch.manual_seed(self.config.seed * 1_000_003 + self.global_step)  # dropout, the same after a resume

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss, _ = self.loss("training", batch[0])
        if not torch.isfinite(loss):
            raise UserError(f"selector: the loss became {float(loss)} at step {self.global_step}; lower selector.lr.")
        self.log("loss", loss, prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss, chosen = self.loss("validation", batch[0])
        roots, index = self._roots["validation"], batch[0]
        efficiency, seconds = self._efficiency["validation"][index], roots.seconds[index]
        ratio = aggregate_throughput(chosen.cpu(), efficiency, seconds)
        ratio = ratio / aggregate_throughput(self._base[roots.setting[index]], efficiency, seconds)
        self.log("held_out_loss", loss, prog_bar=True)
        self.log("held_out_tps_ratio", ratio, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.config.lr, weight_decay=self.config.weight_decay)


def baselines(training: Roots, allowed: Tensor | None = None) -> Tensor:
    """The best static action of every sampling setting on the training roots, [settings] indices into `TREES`."""
    chosen = []
    for index in range(len(training.settings)):
        roots = training.where(training.setting == index)
        if not len(roots):
            raise UserError(f"the traces hold no training roots for setting {training.settings[index]}.")
        chosen.append(best_static(roots.efficiency, roots.seconds, allowed))
    return torch.tensor(chosen)


def start_from_static(selector: Selector, training: Roots, sharpness: float) -> None:
    """Set the output layer so that the untrained policy prefers what is best over all training roots: logits are
    `sharpness` times the log throughput of each tree used throughout. Training then learns where to deviate."""
    throughput = training.efficiency.mean(0) / training.seconds.mean(0)
    with torch.no_grad():
        output = selector.network.mlp[-1]
        output.weight.mul_(0.1)
        output.bias.copy_(sharpness * (throughput / throughput.max()).log())


def fit_selector(
    training: Roots,
    validation: Roots,
    config: SelectorConfig,
    folder: Path,
    logger: Logger | list[Logger] | None = None,
) -> Selector:
    """Train on `training`, keep the epoch with the lowest held-out loss (expected log-TPS and tail). `folder` receives
    checkpoints; a killed training resumes from the last one and ends with the weights it would have had."""
    pl.seed_everything(config.seed, verbose=False)
    schema = SelectorSchema(
        training.h_p_previous.shape[1],
        training.h_q_root.shape[1],
        config.verifier,
        config.width,
        tuple(config.hidden),
        config.dropout,
    )
    selector = Selector(schema)
    selector.standardise(training.scalars)
    if config.static_start:
        start_from_static(selector, training, config.static_start)
    module = SelectorModule(selector, config, training, validation, baselines(training))
    keep = ModelCheckpoint(folder, "best", monitor="held_out_loss", save_last=True, enable_version_counter=False)
    trainer = pl.Trainer(
        accelerator="cpu",  # a small network on tensors that lie on the CPU
        devices=1,
        max_epochs=config.epochs,
        logger=logger or False,
        callbacks=[keep, EarlyStopping("held_out_loss", patience=config.patience), RichProgressBar()],
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        default_root_dir=folder,
    )
    last = folder / "last.ckpt"
    # With one replica this sampler is a plain shuffle whose order is a pure function of (seed, epoch).
    order = DistributedSampler(_indices(training), num_replicas=1, rank=0, seed=config.seed)
    trainer.fit(
        module,
        DataLoader(_indices(training), config.batch, sampler=order),
        DataLoader(_indices(validation), len(validation)),
        ckpt_path=str(last) if last.exists() else None,
        weights_only=True,
    )
    module.load_state_dict(torch.load(keep.best_model_path, weights_only=True)["state_dict"])
    return selector.cpu().eval()


def _indices(roots: Roots) -> TensorDataset:
    return TensorDataset(torch.arange(len(roots)))
