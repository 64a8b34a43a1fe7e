"""Training the shipped pair for hours, in legs: a warm-up, a stable phase without an end, a decay.

The learning rate of the stable phase doesn't depend on how long it will be (WSD), so that it can
always go on. A decay is a leg of its own, in a copy of the state. Between two steps a leg waits as
long as there is a file `pause` in the folder of the states.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from nde_talf.decoding.common.progress import console
from nde_talf.decoding.common.settings import Count, Natural, settings
from nde_talf.draft_training.training.checkpoint import CHECKPOINT, save
from nde_talf.draft_training.training.lm_training import LanguageModel, build_llama
from nde_talf.draft_training.training.trainer import warm_up_then_linear
from nde_talf.draft_training.training_settings import LanguageModelConfig

PAUSE = "pause"
"""While a file of this name is in the folder of the states, a training waits between two steps."""
CURVES = "held_out.jsonl"


@settings("recipe", kw_only=True)
class RecipeConfig(LanguageModelConfig):
    """A model of the shipped pair and its training. Lengths are in tokens, batches in rows."""

    layers: int = 16
    """Decoder layers: many narrow ones, so that a draft of one layer costs little beside them."""
    max_length: int = 512
    steps: Count = 1_000_000
    """Steps after which a training ends; without a decay it is ended by its hours."""
    lr_adam: float = 0.003
    warm_up: int = 200
    checkpoint_seconds: float = 600.0
    decay_from: Natural | None = None
    """Step at which the learning rates begin to fall linearly, to zero at `steps`. None: never."""

    @property
    def tied(self) -> bool:
        """Share the embeddings with the output layer, as the deep target does."""
        return self.layers > 1


class RecipeModel(LanguageModel):
    """A `LanguageModel` with the schedule of the recipe, its pass compiled, on rows in int16."""

    config: RecipeConfig

    def __init__(
        self, config: RecipeConfig, vocab_size: int, teacher: LlamaForCausalLM | None = None
    ) -> None:
        super().__init__(build_llama(config, vocab_size, like=teacher), config, teacher)
        self._compiled = torch.compile(super().loss)

    def learning_rate_fraction(self, step: int) -> float:
        """See `RowModule`."""
        steps, begin = self.config.steps, self.config.decay_from
        fall = 0 if begin is None else steps - begin
        return warm_up_then_linear(step, steps, self.config.warm_up, fall)

    def loss(self, batch: Tensor, step: int = 0, part: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """See `RowModule`."""
        run = self._compiled if torch.is_grad_enabled() else super().loss
        return run(batch.long())

    @torch.no_grad()
    def figures(self, rows: Tensor) -> dict[str, float]:
        """Return `nats`, the loss on rows, and with a teacher the `overlap` with it."""
        parts = rows.to(self.device).split(16)
        nats = [self.loss(part)[0].expand(len(part)) for part in parts]  # the last has fewer rows
        found = {"nats": torch.cat(nats).mean().item()}
        for teacher in self.frozen:
            models = self.model, teacher
            pairs = ((F.softmax(m(x.long()).logits.float(), -1) for m in models) for x in parts)
            overlaps = [torch.minimum(*pair).sum(-1) for pair in pairs]
            found["overlap"] = torch.cat(overlaps).mean().item()
        return found

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """See `RowModule`. A stable phase may go on to another end, or into a decay."""
        known = checkpoint["settings"]
        free = ["precision"]  # what it is trained in is compared below
        if known["decay_from"] is None:
            free += ["steps", "decay_from"]
        known |= {key: getattr(self.config, key) for key in free}
        super().on_load_checkpoint(checkpoint)


class Leg(pl.Callback):
    """Waits while paused, ends a training in time, and evaluates on held-out text by domain.

    The figures go into `held_out.jsonl` beside the checkpoint. Without held-out rows it evaluates
    nothing.

    Args:
        state: folder of the checkpoint and of the curves.
        pause: while this file exists, the training waits.
        hours: after so many the training ends, pauses included.
        every: seconds from one evaluation to the next.
        held_out: rows by domain.
        bits: a function from nats a token to bits a byte, by domain.
    """

    def __init__(
        self,
        state: Path,
        pause: Path,
        hours: float,
        every: float = 0.0,
        held_out: Mapping[str, Tensor] | None = None,
        bits: Callable[[dict[str, float]], dict[str, float]] = dict,
    ) -> None:
        self.state, self.pause, self.every = state, pause, every
        self.held_out, self.bits = held_out or {}, bits
        self.ends, self.ended = time.time() + 3600 * hours, False
        self.seconds = self.since = self.evaluated = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        """Wait while paused; the state is written first."""
        if self.pause.exists():
            save(trainer, self.state / CHECKPOINT)
            console.print(f"paused at step {trainer.global_step}: delete {self.pause} to continue")
            while self.pause.exists() and time.time() < self.ends:
                time.sleep(1)
        self.since = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        """Count the time, and end the leg and evaluate where that is due."""
        self.seconds += time.perf_counter() - self.since
        last = trainer.global_step == trainer.max_steps
        if time.time() >= self.ends and not last:
            self.ended = True
            save(trainer, self.state / CHECKPOINT)
            trainer.should_stop = True
        due = self.ended or last or time.time() > self.evaluated + self.every
        if self.held_out and due:
            self._evaluate(trainer, module)

    def state_dict(self) -> dict[str, Any]:
        """Keep the time that was trained."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting it."""
        self.seconds = state_dict["seconds"]

    def _evaluate(self, trainer: pl.Trainer, module: RecipeModel) -> None:
        with trainer.precision_plugin.forward_context():
            by_domain = {domain: module.figures(rows) for domain, rows in self.held_out.items()}
        bits = self.bits({domain: each["nats"] for domain, each in by_domain.items()})
        figures = {f"{d}/{name}": x for d, own in by_domain.items() for name, x in own.items()}
        figures |= {f"{domain}/bits_a_byte": x for domain, x in bits.items()}
        length = next(iter(self.held_out.values())).shape[1]
        tokens = trainer.global_step * module.config.batch * length
        row = {"step": trainer.global_step, "tokens": tokens, "hours": self.seconds / 3600}
        row |= {name: round(x, 4) for name, x in figures.items()}
        with (self.state / CURVES).open("a") as file:
            file.write(json.dumps(row) + "\n")
        module.log_dict(figures)
        console.print(" ".join(f"{k} {v:.4g}" for k, v in row.items()))
        self.evaluated = time.time()


def reached(checkpoint: Path) -> int:
    """Return the step of a checkpoint."""
    return int(torch.load(checkpoint, map_location="meta", weights_only=True)["global_step"])
