"""Train the shipped model by its recipe: `python -m recipes.small step=train`.

Everything is in one folder, `state`, outside the checkout: the text made from the frozen list, the
state of the stable phase, and each anneal in a folder of its own. A leg that was ended or killed is
gone on with by the same command. One process at a time works there.
"""

import os
import shutil
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from nde_talf.pipelines.commands.quiet import quiet  # isort: skip (before torch)

import torch
from pydantic import Field
from torch import Tensor
from transformers import AutoModelForCausalLM

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.data.engines.transformers import AT_ONCE, TransformersEngine
from nde_talf.data.text.pair import spread
from nde_talf.data.text.shipped import DRAFT, TARGET
from nde_talf.data.text.templates import load_tokenizer
from nde_talf.data.text.tokenizer import in_rows
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import write_atomically
from nde_talf.decoding.common.progress import console, working
from nde_talf.decoding.common.settings import Batch, Count, Natural, Seed, Text, one_of, settings
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.precision import native_bfloat16
from nde_talf.draft_training.training.checkpoint import CHECKPOINT
from nde_talf.draft_training.training.head_evaluation import SAMPLED
from nde_talf.draft_training.training.head_training import fit_head
from nde_talf.draft_training.training.precision import default_device
from nde_talf.draft_training.training.trainer import train_rows
from nde_talf.draft_training.training_settings import HeadConfig
from nde_talf.pipelines.config.schema import TrackingConfig
from nde_talf.pipelines.runs.lock import locked
from nde_talf.pipelines.runs.tracking import tracked
from nde_talf.pipelines.stages.answers import Sampling, sampled
from nde_talf.pipelines.stages.draft import export_head
from recipes.small.sources import documents, read_frozen
from recipes.small.text import Text as Rows
from recipes.small.text import prepared
from recipes.small.training import PAUSE, Leg, RecipeConfig, RecipeModel, reached

OPENING = 32
"""Tokens of a text that the target continues for its draft."""
TEXT_ROWS = 49_152
"""Rows of text that draft and head learn."""
HELD_OUT_ROWS = 32
"""Held-out rows that choose a head's best weights; as many others give its figures."""
STEPS = ("train", "anneal", "draft", "head")
DRAFT_HIDDEN = 192
"""Numbers of a hidden state of the draft, 64 to a head."""
DRAFT_STEPS = 6000
"""Steps of the distillation; the last two fifths decay."""
HEAD_STEPS = 6000
"""Steps of the head."""


@settings()
class SmallConfig:
    """Step of the recipe, and the folder of its state."""

    step: Annotated[str, one_of(STEPS)] = "train"
    """train: one leg of the stable phase; anneal: a decay from its last state, in a copy; draft:
    distil a draft of the newest annealed target, on text and on its own samples; head: train a
    TALF head of it on the same rows.
    """
    state: Text = "~/.local/state/nde-talf/small"
    """Folder of the text and of all states, outside the checkout.

    While there is a file `pause` in it, a training waits.
    """
    weights: Text | None = None
    """Folder of a target, draft or head whose weights this step begins with; null: random ones."""
    hours: Annotated[float, Field(gt=0, le=100)] = 2.5
    """A leg ends after so many hours; the state is written every ten minutes."""
    decay_steps: Count = 1000
    """Steps of an anneal."""
    samples: Natural = 768
    """Texts that the target writes for draft and head: a quarter of what they learn, repeated; 0:
    they learn text alone.
    """
    batch: Batch = 16
    """Rows of 512 tokens in a step."""
    threads: Batch = 2
    """CPU threads."""
    seed: Seed = 0
    """Seed of the weights and the order of the rows."""
    partial: bool = False
    """Train on the rest where packages of the frozen list are missing or have another version."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    run: ClassVar[str] = "small"
    """Group of the recipe's runs in W&B."""

    @property
    def folder(self) -> Path:
        """The folder of the state."""
        return Path(os.path.expanduser(self.state))

    @property
    def anneals(self) -> list[Path]:
        """The folders of anneals, the oldest first."""
        return sorted(self.folder.glob("anneal-*"), key=lambda f: int(f.name.partition("-")[2]))

    @property
    def finished(self) -> list[Path]:
        """The folders of finished anneals, the oldest first."""
        return [folder for folder in self.anneals if (folder / TARGET).exists()]

    def recipe(self, **changed: Any) -> RecipeConfig:
        """Return the settings of a model."""
        return RecipeConfig(batch=self.batch, seed=self.seed, **changed)


def run(config: SmallConfig) -> None:
    """Run one step."""
    quiet()
    torch.set_num_threads(config.threads)
    steps = {"train": _train, "anneal": _anneal, "draft": _draft, "head": _head}
    with locked(config.folder.resolve()):
        if config.step == "anneal" and not (state := config.folder / TARGET / CHECKPOINT).exists():
            raise UserError(f"There is no {state} yet: run step=train first.")
        if config.step in ("draft", "head") and not config.finished:
            raise UserError("There is no finished anneal yet: run step=anneal first.")
        with working("reading the text, or making it"):
            text = prepared(config.folder / "text", documents(read_frozen(), config.partial))
        steps[config.step](config, text)


def _train(config: SmallConfig, text: Rows) -> None:
    module = RecipeModel(config.recipe(), len(text.tokenizer))
    _begin_with(config, text, module)
    _leg(config, text, module, config.folder / TARGET)


def _anneal(config: SmallConfig, text: Rows) -> None:
    """Decay from the stable phase's last state, or finish an anneal that was begun."""
    stable, begun = config.folder / TARGET / CHECKPOINT, config.anneals[-1:]
    if begun and (begun[0] / CHECKPOINT).exists() and not (begun[0] / TARGET).exists():
        folder = begun[0]
    else:
        folder = config.folder / f"anneal-{reached(stable)}"
        if (folder / TARGET).exists():
            console.print(f"finished: {folder}")
            return
        write_atomically(folder / CHECKPOINT, lambda path: shutil.copy(stable, path))
    start = int(folder.name.partition("-")[2])
    settings = config.recipe(decay_from=start, steps=start + config.decay_steps)
    _leg(config, text, RecipeModel(settings, len(text.tokenizer)), folder)


def _begin_with(config: SmallConfig, text: Rows, module: RecipeModel) -> None:
    """Load the weights to begin with, if any; raise UserError if their tokenizer is another."""
    if not (where := config.weights):
        return
    if load_tokenizer(where, "weights").get_vocab() != text.tokenizer.get_vocab():
        raise UserError(
            f"weights={where}: it has other tokens than the text in {config.folder}, whose"
            " tokenizer was trained on what is installed. Install all of the frozen list (without"
            " partial=true), and give another folder as state."
        )
    begun = AutoModelForCausalLM.from_pretrained(where, trust_remote_code=False)
    module.model.load_state_dict(begun.state_dict())


def _annealed(config: SmallConfig, text: Rows) -> tuple[Path, Rows]:
    """Return the folder of the newest annealed target, and rows of text and of its own samples."""
    folder, read = config.finished[-1], text.train[-TEXT_ROWS:]
    if not config.samples:
        return folder, replace(text, train=read)
    written = samples(folder / TARGET, folder / "samples", text.train, config.samples)
    times = max(1, len(read) // (3 * len(written)))
    return folder, replace(text, train=torch.cat([written] * times + [read]))


def samples(target: Path, folder: Path, rows: Tensor, count: int) -> Tensor:
    """Return rows of the target's own texts in `folder`, where those that are missing are written.

    `count` texts, half of them sampled at temperature 1 and half at 0.6 after the first tokens of
    `rows`, are laid end to end and cut into rows.
    """
    device = default_device()
    dtype = "bfloat16" if native_bfloat16(device) else "float32"
    model, store = CausalModel.load(str(target), device.type, dtype), TraceStore(folder)
    end = min(model.ends, default=0)
    engine, begun = TransformersEngine(model), rows[:count, :OPENING].tolist()
    most = rows.shape[1] - OPENING
    texts = sampled(store, Sampling(lambda: engine, AT_ONCE, 0), begun, most, (1.0, 0.6))
    return in_rows(texts, end, rows.shape[1]).to(rows.dtype)


def _draft(config: SmallConfig, text: Rows) -> None:
    """Distil a draft from the newest annealed target, on its own samples and on text."""
    folder, text = _annealed(config, text)
    teacher: Any = AutoModelForCausalLM.from_pretrained(
        folder / TARGET, dtype=torch.float32, trust_remote_code=False
    )
    settings = config.recipe(
        hidden=DRAFT_HIDDEN,
        layers=1,
        heads=DRAFT_HIDDEN // 64,
        intermediate=2 * DRAFT_HIDDEN,
        warm_up=50,
        steps=DRAFT_STEPS,
        decay_from=DRAFT_STEPS * 3 // 5,
    )
    module = RecipeModel(settings, len(text.tokenizer), teacher)
    _begin_with(config, text, module)
    _leg(config, text, module, folder / f"draft-{DRAFT_HIDDEN}", DRAFT)


def _head(config: SmallConfig, text: Rows) -> None:
    """Train a TALF head of the newest annealed target on the rows of its draft."""
    above, text = _annealed(config, text)
    folder, target = above / "head", CausalModel.load(str(above / TARGET), default_device().type)
    folder.mkdir(exist_ok=True)
    length = text.train.shape[1] - SAMPLED  # a tree at a row's last token fits the context
    rows = TokenRows.plain(text.train[:, :length])
    held_out = TokenRows.plain(torch.cat([each[::2] for each in text.held_out.values()]))
    some = spread(held_out.cut(length), 2 * HELD_OUT_ROWS)
    settings = HeadConfig(
        steps=HEAD_STEPS,
        batch=config.batch,
        warm_up=50,
        evaluate_every=max(1, HEAD_STEPS // 12),
        warm_start=config.weights,
        seed=config.seed,
    )
    leg = Leg(folder, config.folder / PAUSE, config.hours)
    with tracked(config, "head", folder) as tracker:
        loggers = tracker.loggers("head")
        head = fit_head(target, rows, settings, folder, loggers, [leg], some[::2])
    if not leg.ended:
        facts, others = {"text": ", ".join(text.held_out)}, some[1::2]
        report = export_head(head, target, settings, rows, others, folder / "export", facts)
        console.print_json(data=report)


def _leg(
    config: SmallConfig,
    text: Rows,
    module: RecipeModel,
    folder: Path,
    name: str = TARGET,
) -> None:
    """Train `module` in `folder`, and write the model there under `name` when it is finished."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, settings, pause = text.train, module.config, config.folder / PAUSE
    millions = sum(p.numel() for p in module.model.parameters()) / 1e6
    console.print(
        f"{millions:.2f}M parameters; text: {rows.numel() / 1e6:.1f}M tokens; a step:"
        f" {settings.batch * rows.shape[1]:,}; this leg: at most {config.hours:g} hours. Two quiet"
        " cores of a server train a target on 2,500 to 3,500 tokens/s, 9M to 12M an hour. To pause:"
        f" touch {pause}",
    )
    held_out = {domain: each[::2] for domain, each in text.held_out.items()}
    leg = Leg(folder, pause, config.hours, 360 * config.hours, held_out, text.bits_a_byte)
    with tracked(config, name, folder) as tracker:
        train_rows(module, rows, folder, tracker.loggers(name), [leg])
    if not leg.ended:
        write_atomically(folder / name, module.model.eval().cpu().save_pretrained)
