"""Estimate how long the stages of a run take on this machine.

Work is counted in passes of the target; a smaller model's pass counts by its share of parameters.
Minutes are counts times prices. Prices are measured, or follow from sizes and how fast the machine
multiplies.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nde_talf.data.text.settings import ANSWERS, SELF, DataConfig
from nde_talf.data.traces.settings import TracesConfig
from nde_talf.decoding.device import synchronised
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.super_tree import super_tree_layout
from nde_talf.decoding.threads import threads
from nde_talf.draft_training.training_settings import HeadConfig
from nde_talf.pipelines.config.schema import MOST_PROMPTS, Config, ModelConfig
from nde_talf.pipelines.stages.evaluate import FEWEST_PROMPTS
from nde_talf.pipelines.stages.pair_text import ANSWERED
from nde_talf.selector.table_fit import PROBES

ANSWER, QUESTION = 350, 45
"""Tokens of an answer that nothing cuts, and of a self-made question."""
TOGETHER = 32
"""Texts that are sampled together: of a batch of 128 most end early."""
LEVELS = 5
"""Drafted levels of a tree."""
EPOCH = 4e-5
"""Seconds per root and epoch of a selector's training."""
TEXTS = 3
"""Texts per prompt and group of methods, with those that choose trees by timing."""


class Size(NamedTuple):
    """Parameters that a token meets in a target, in a draft head beside it, and in the draft."""

    target: int
    head: int
    draft: int | None = None


class Work(NamedTuple):
    """Work of a stage; or the seconds that one unit of each takes.

    row: tokens in long rows. step, tree: passes over one token after a text, over eight. seconds:
    those that are the same with every model.
    """

    row: float = 0
    step: float = 0
    tree: float = 0
    seconds: float = 0


def minutes(work: Work, prices: Work) -> float:
    """Multiply work by its prices."""
    return sum(count * price for count, price in zip(work, prices, strict=True)) / 60


def from_size(parameters: int, width: int, device: str, decoding: int) -> Work:
    """Estimate a target's prices by how fast `device` multiplies.

    width: bytes per parameter. decoding: threads of single steps.
    """
    matrix = torch.ones(2048, 2048, device=device)
    share = parameters / matrix.numel()
    row = share * _seconds(lambda: matrix[:128] @ matrix) / 128
    with threads(decoding):
        step = share * width / 4 * _seconds(lambda: matrix[:1] @ matrix)
    return Work(row, step, step + 8 * row, 1)


@torch.inference_mode()
def measured(model: CausalModel, decoding: int) -> Work:
    """Measure a target's prices. decoding: threads of single steps."""
    text = [(model.vocab_size // 3 + at) % model.vocab_size for at in range(64)]
    session = model.session()

    def passed(nodes: int) -> Tensor:
        return model.logits(session.grow(text[:nodes], [-1] * nodes))

    def row() -> Tensor:
        session.reset()
        return model.logits(session.append(text))

    whole = _seconds(row)
    with threads(decoding):
        step, tree = (_seconds(partial(passed, nodes)) for nodes in (1, 8))
    return Work(whole / len(text), step, tree, 1)


def _seconds(run: Callable[[], Tensor]) -> float:
    """Time a second call of `run`: CPU time where torch has one thread, else wall time."""
    device, alone = run().device, torch.get_num_threads() == 1
    clock = synchronised(time.thread_time if alone else time.perf_counter, device)
    started = clock()
    run()
    return clock() - started


def works(config: Config, size: Size) -> dict[str, Work]:
    """Count the work of every stage."""
    head, drafter = size.head / size.target, size.head
    if size.draft and config.drafter == "lm":
        drafter = size.draft
    share, latency, evaluation = drafter / size.target, config.latency, config.evaluation
    rounds = 2.5 * latency.repeats * (1 + len(latency.contexts))
    probes = 2 * len(PROBES) * rounds
    texts = len(evaluation.settings) * (2 + TEXTS * len(config.method_groups))
    texts *= evaluation.prompts or (FEWEST_PROMPTS + MOST_PROMPTS) // 2
    selector, traces = config.selector, config.traces
    roots = traces.roots("train") + traces.roots("validation")
    epochs = selector.epochs * selector.folds * len(selector.verifiers)
    dialogues, written = config.dialogues, 0
    if config.data.source == SELF or dialogues.regenerate:
        answered = dialogues.count or config.data.self_made.count
        written = answered * (min(dialogues.new_tokens, ANSWER) + QUESTION)
    return {
        "pair": _pair(config.data, config.model, config.chats, share),
        "draft": _head(config.draft, config.head_length, written, head),
        "latency": Work(0, 18 * rounds + LEVELS * share * probes, probes, 5),
        "traces": _traces(traces, share),
        "selector": Work(seconds=5 + EPOCH * roots * epochs),
        "evaluate": Work(0, texts * evaluation.new_tokens, 0, 5),
    }


def _pair(data: DataConfig, model: ModelConfig, chats: bool, share: float) -> Work:
    rows = {role: lm.steps * lm.batch * model.length for role, lm in model.trained.items()}
    trained = 3 * rows.get("target", 0) + (1 + 3 * share) * rows.get("draft", 0)
    answers = data.answers or ANSWERED
    texts = answers // 4 if data.source in (ANSWERS, SELF) else 0
    if data.source == ANSWERS and not chats:
        texts += answers
    tokens = texts * data.answer_tokens + data.prompt_count * QUESTION * (data.source == SELF)
    return Work(trained + tokens, tokens / TOGETHER, 0, 10)


def _head(draft: HeadConfig, length: int, written: int, share: float) -> Work:
    loss = draft.loss
    trees = (1 - draft.chain_fraction) * min(draft.roots or length, length) * (loss.depth - 1)
    more = trees / length * (loss.k if loss.target_trees else 1)
    passes = 1 + more * loss.target_trees + 3 * share * (1 + more)
    # A tenth for held-out figures.
    rows = 1.1 * draft.steps * draft.batch * draft.accumulate * length
    return Work(rows * passes + written, written / TOGETHER)


def _traces(traces: TracesConfig, share: float) -> Work:
    trees = traces.roots("validation") * (traces.validation_samples or traces.samples)
    trees += traces.roots("train") * traces.samples * (traces.labels == "trees")
    prompts = traces.train_prompts + traces.validation_prompts
    tokens = prompts * len(traces.settings) * traces.new_tokens
    # Each row is run by both models, and as much again is computed of its distributions.
    rows = trees * super_tree_layout().inner * 2 * (1 + share)
    return Work(rows + tokens, tokens / TOGETHER, 0, 10)
