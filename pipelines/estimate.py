"""Estimate how long the stages of a run take on this machine.

Work is counted in passes of the target, those of smaller models by their share of its size. Times
are work times prices, which are measured, or follow from sizes where loading would take long.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nde_talf.data.text.settings import ANSWERS, SELF
from nde_talf.data.traces.settings import TracesConfig
from nde_talf.decoding.device import synchronised
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.super_tree import super_tree_layout
from nde_talf.draft_training.checkpoint import CHECKPOINT
from nde_talf.pipelines.config import DISTIL, Config
from nde_talf.pipelines.evaluate import FEWEST_PROMPTS
from nde_talf.pipelines.machine import threads
from nde_talf.pipelines.pair import ANSWERED, answers_to_learn
from nde_talf.selector.fit import PROBES

USUAL, QUESTION = 350, 45
"""Tokens of an answer that nothing cuts, and of a self-made question."""
TOGETHER = 32
"""Texts that are sampled together: of 128, most end early."""
LEVELS = 5
"""Drafted levels of a tree."""
LAYER = 1.5e-4
"""Seconds that a layer takes, however small."""
EPOCH = 4e-5
"""Seconds per root and epoch of a selector's training."""
METHODS = 5
"""Texts per prompt of a group of methods, those that choose trees by timing among them."""


class Size(NamedTuple):
    """Size of a model: parameters that a token meets, those of the output layer, and layers."""

    parameters: int
    readout: int
    layers: int


class Work(NamedTuple):
    """What a stage does, or what each of these takes in seconds.

    row: tokens in long rows. sampled: tokens sampled in batches. step, tree: passes over one token
    after a text, over a tree. seconds: those that are the same with every model.
    """

    row: float = 0
    sampled: float = 0
    step: float = 0
    tree: float = 0
    seconds: float = 0


def minutes(work: Work, prices: Work) -> float:
    """Multiply work with its prices in seconds."""
    return sum(count * price for count, price in zip(work, prices, strict=True)) / 60


def prices(row: float, step: float, tree: float) -> Work:
    """Return the prices of a target from those of a token in a row, and passes over 1 and 8."""
    return Work(row, row + step / TOGETHER, step, tree, 1)


def from_size(size: Size, width: int, device: str, decoding: int) -> Work:
    """Estimate a target's prices by how fast `device` multiplies.

    width: bytes per parameter. decoding: threads of single steps.
    """
    matrix = torch.ones(2048, 2048, device=device)
    share = size.parameters / matrix.numel()
    row = share * _seconds(lambda: matrix[:128] @ matrix) / 128
    with threads(decoding):
        step = share * width / 4 * _seconds(lambda: matrix[:1] @ matrix)
    step = max(step, LAYER * size.layers)
    return prices(row, step, step + 8 * row)


@torch.inference_mode()
def measured(model: CausalModel, decoding: int) -> Work:
    """Measure a target's prices. decoding: threads of single steps."""
    text = [(model.vocab_size // 3 + at) % model.vocab_size for at in range(64)]
    ids, at = torch.tensor([[text, [*range(len(text))]]], device=model.device).unbind(1)
    session = model.session()
    session.append(text)

    def grown(nodes: int) -> Tensor:
        return model.logits(session.grow(text[:nodes], [-1] * nodes))

    row = _seconds(lambda: model.logits(model.hidden(ids, at, None, None))) / len(text)
    with threads(decoding):
        step, tree = _seconds(partial(grown, 1)), _seconds(partial(grown, 8))
    return prices(row, step, tree)


def _seconds(run: Callable[[], Tensor]) -> float:
    """Return the time of a second call: of this thread, where it works alone."""
    device, alone = run().device, torch.get_num_threads() == 1
    clock = synchronised(time.thread_time if alone else time.perf_counter, device)
    started = clock()
    run()
    return clock() - started


def left(folder: Path, count: int, size: int) -> int:
    """Return how many of `count` texts, in shards of `size`, are not in a folder yet."""
    return max(0, count - size * len([*folder.glob("*.parquet")]))


def works(
    config: Config, target: Size, draft: Size | None, folders: dict[str, Path]
) -> dict[str, Work]:
    """Count what is left to do in each stage.

    Args:
        config: of the run.
        target: its size.
        draft: that of the draft model; None: a head drafts.
        folders: of the stages to do, by name.
    """
    layer = (target.parameters - target.readout) // target.layers
    head = Size(layer + target.readout, target.readout, 1)
    drafter = draft if draft and config.traces.drafter == "lm" else head
    share = drafter.parameters / target.parameters
    drafts = LEVELS * max(share, drafter.layers / target.layers)  # steps of the target
    counts = {
        "pair": lambda folder: _pair(config, share, folder),
        "draft": lambda folder: _head(config, head.parameters / target.parameters, folder),
        "latency": lambda folder: _latency(config, drafts),
        "traces": lambda folder: _traces(config.traces, share, folder),
        "selector": lambda folder: _selector(config),
        "evaluate": lambda folder: _evaluation(config),
    }
    return {name: counts[name](folder) for name, folder in folders.items()}


def memory(config: Config, vocabulary: int, context: int) -> int:
    """Return the bytes beside the models that the stages take at most.

    They are those of logits in training, four times, or of sampled texts in a cache.

    Args:
        config: of the run.
        vocabulary: tokens of the target.
        context: bytes of a token in its cache.
    """
    batches = [(lm.batch, config.model.length) for lm in config.model.trained.values()]
    tokens = max(batch * length for batch, length in [*batches, _rows(config)])
    most = max(config.dialogues.new_tokens, config.data.answer_tokens)
    return max(16 * tokens * vocabulary, config.engine.batch * most * context)


def _rows(config: Config) -> tuple[int, int]:
    """Return rows and tokens of a row in a pass of a head's training."""
    chats = config.data.source == SELF or config.dialogues.source
    return config.draft.batch, config.dialogues.length if chats else config.model.length


def _pair(config: Config, share: float, folder: Path) -> Work:
    data, model = config.data, config.model
    rows = {role: lm.steps * lm.batch * model.length for role, lm in model.trained.items()}
    row = 3 * rows.get("target", 0) + (1 + 3 * share) * rows.get("draft", 0)
    own = data.source in (ANSWERS, SELF)
    texts = (data.answers or ANSWERED) // 4 if own else 0
    if model.draft == DISTIL or (data.source == ANSWERS and not config.dialogues.source):
        texts += answers_to_learn(config)
    answers = left(folder / "answers", texts, config.engine.batch)
    asked = data.prompt_count if data.source == SELF else 0
    asked = left(folder / "questions", asked, config.engine.batch)
    return Work(row, answers * data.answer_tokens + asked * QUESTION, seconds=10)


def _head(config: Config, share: float, folder: Path) -> Work:
    draft, loss, dialogues = config.draft, config.draft.loss, config.dialogues
    own = config.data.source == SELF or dialogues.regenerate
    texts = (dialogues.count or config.data.self_made.count) if own else 0
    answers = left(folder / "answers", texts, config.engine.batch)
    batch, length = _rows(config)
    steps = draft.steps
    with suppress(OSError):
        path = folder / "training" / CHECKPOINT
        steps -= torch.load(path, mmap=True, weights_only=True)["global_step"]
    trees = min(draft.roots or length, length) * (loss.depth - 1) / length
    more = (1 - draft.chain_fraction) * trees * (loss.k if loss.target_trees else 1)
    passes = 1 + more * loss.target_trees + 3 * share * (1 + more)
    row = 1.1 * steps * batch * draft.accumulate * length * passes
    return Work(row, answers * (min(dialogues.new_tokens, USUAL) + QUESTION))


def _latency(config: Config, drafts: float) -> Work:
    rounds = 2.5 * config.latency.repeats * (1 + len(config.latency.contexts))
    probed = 2 * len(PROBES) * rounds
    return Work(step=18 * rounds + drafts * probed, tree=probed, seconds=5)


def roots_of(traces: TracesConfig) -> dict[str, int]:
    """Count the roots of each split, at most."""
    counts = {"train": traces.train_prompts, "validation": traces.validation_prompts}
    return {
        split: len(traces.settings) * count * -(-traces.new_tokens // traces.distance(split))
        for split, count in counts.items()
    }


def _traces(traces: TracesConfig, share: float, folder: Path) -> Work:
    layout, roots = super_tree_layout(), roots_of(traces)
    trees = roots["validation"] * (traces.validation_samples or traces.samples)
    trees += roots["train"] * traces.samples * (traces.labels == "trees")
    prompts = traces.train_prompts + traces.validation_prompts
    some = left(folder, prompts, traces.shard_prompts) / prompts
    sampled = prompts * len(traces.settings) * traces.new_tokens
    return Work(some * trees * layout.inner * (1 + share) * 2, some * sampled, seconds=10)


def _selector(config: Config) -> Work:
    selector, roots = config.selector, sum(roots_of(config.traces).values())
    epochs = selector.epochs * (2 * (selector.folds - 1) + 1) * len(selector.verifiers)
    return Work(seconds=5 + EPOCH * roots * epochs)


def _evaluation(config: Config) -> Work:
    own = config.evaluation
    texts = len(own.settings) * own.passes * (own.prompts or FEWEST_PROMPTS)
    return Work(step=texts * (2 + METHODS * len(own.methods)) * own.new_tokens, seconds=5)
