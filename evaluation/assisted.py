"""The outside references: transformers' own generation on the same models.

It decodes plainly, with a draft model (assisted generation) under its default schedule or another,
or by prompt lookup, which needs no draft. What is tuned, on the same prompts as our own trees, is
in `SCHEDULES` and `LOOKUPS`.

transformers reads an assisted generation's schedule in the draft's generation_config alone: as
arguments of `generate` its keys have no effect. With scikit-learn installed it adapts a threshold
of confidence while it decodes; without, it leaves it.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch

from nde_talf.data.engines.transformers import sampling_options
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.evaluation.benchmark import Generate, Record

ASSISTED, LOOKUP, PLAIN = (
    "transformers assisted",
    "transformers prompt lookup",
    "transformers plain",
)


class Schedule(NamedTuple):
    """How many tokens are drafted a step, by the names of transformers' generation_config.

    Attributes:
        tokens: num_assistant_tokens, of the first step.
        kind: num_assistant_tokens_schedule: constant, or heuristic (two more after a step that
            accepted all, else one less).
        threshold: assistant_confidence_threshold: nothing is drafted after a token that the draft
            holds less likely.
    """

    tokens: int
    kind: str = "constant"
    threshold: float = 0.0


class Lookup(NamedTuple):
    """prompt_lookup_num_tokens and max_matching_ngram_size."""

    tokens: int = 10
    size: int = 2


DEFAULT = None
"""The library's own schedule: Schedule(20, "constant", 0.4)."""
SCHEDULES = (
    DEFAULT,
    *(Schedule(tokens) for tokens in (2, 4, 6, 8, 12)),
    *(Schedule(tokens, "heuristic") for tokens in (4, 8)),
    *(Schedule(tokens, "constant", 0.4) for tokens in (4, 8)),
    *(Schedule(tokens, "heuristic", 0.4) for tokens in (4, 8)),
)
"""Tried when it is tuned: as many as there are trees for a head
(`evaluation.methods.TIMED_ACTIONS`).
"""
GRID = (
    DEFAULT,
    *map(Schedule._make, product((2, 3, 4, 6, 8, 12), ("constant", "heuristic"), (0.0, 0.4))),
)
"""Tried where there is more time."""
LOOKUPS = tuple(Lookup(tokens, size) for size in (1, 2, 3, 4) for tokens in (2, 4, 10))


def assisted_title(schedule: Schedule | None) -> str:
    """The method's name with its schedule."""
    if schedule is DEFAULT:
        return f"{ASSISTED} (default schedule)"
    more = [schedule.kind] * (schedule.kind != "constant") + [
        f"threshold {schedule.threshold:g}"
    ] * (schedule.threshold > 0)
    return f"{ASSISTED} ({', '.join([f'{schedule.tokens} tokens', *more])})"


def lookup_title(lookup: Lookup) -> str:
    """The method's name with its sizes."""
    return f"{LOOKUP} ({lookup.tokens} tokens, n up to {lookup.size})"


def is_outside(method: str) -> bool:
    """Whether a method's name is that of a loop of transformers, with a schedule in it or not."""
    return method.split(" (")[0] in (ASSISTED, LOOKUP, PLAIN)


@contextmanager
def scheduled(draft: CausalModel, schedule: Schedule | None) -> Iterator[None]:
    """The draft's generation_config with a schedule, put back after: transformers writes there what
    it has adapted.
    """
    module, before = draft.module, draft.module.generation_config
    module.generation_config = config = deepcopy(before)
    if schedule is not DEFAULT:
        config.num_assistant_tokens = schedule.tokens
        config.num_assistant_tokens_schedule = schedule.kind
        config.assistant_confidence_threshold = schedule.threshold
    try:
        yield
    finally:
        module.generation_config = before


def transformers_assisted(
    name: str,
    target: CausalModel,
    draft: CausalModel,
    setting: SamplingSetting,
    new_tokens: int,
    schedule: Schedule | None = DEFAULT,
) -> Generate:
    """`target.generate(assistant_model=draft)` with a schedule."""

    def around() -> AbstractContextManager[None]:
        return scheduled(draft, schedule)

    return transformers_loop(
        name, target, setting, new_tokens, around, assistant_model=draft.module
    )


def transformers_lookup(
    name: str,
    target: CausalModel,
    setting: SamplingSetting,
    new_tokens: int,
    lookup: Lookup = Lookup(),
) -> Generate:
    """`target.generate(prompt_lookup_num_tokens=..., max_matching_ngram_size=...)`."""
    options = {"prompt_lookup_num_tokens": lookup.tokens, "max_matching_ngram_size": lookup.size}
    return transformers_loop(name, target, setting, new_tokens, **options)


def transformers_loop(
    name: str,
    target: CausalModel,
    setting: SamplingSetting,
    new_tokens: int,
    around: Any = nullcontext,
    **options: Any,
) -> Generate:
    """`target.generate(**options)` inside `around()`; plain decoding without options.

    Its first target pass holds the prompt, and a first draft where one comes before it. As for our
    own methods, that pass and the tokens it gives are not counted: the clocks start when it ends,
    and what was committed is read off the cache before every later pass.
    """
    started = [0.0, 0.0]  # wall clock and CPU time when the first pass ended
    cached: list[int] = []  # tokens in the cache before every pass
    drafted: list[int] = []  # tokens given to every pass

    def before(module, args, kwargs) -> None:
        cache, rows = (
            kwargs.get("past_key_values"),
            kwargs.get("input_ids", args[0] if args else None),
        )
        cached.append(cache.get_seq_length() if cache is not None else 0)
        drafted.append((rows if rows is not None else kwargs["inputs_embeds"]).shape[1])

    def after(*_) -> None:
        if len(cached) == 1:
            started[:] = clock(), time.process_time()

    def clock() -> float:
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        return time.perf_counter()

    def generate(prompt: list[int], seed: int, kind: str) -> Record:
        ids = torch.tensor([prompt], device=target.device)
        cached.clear()
        drafted.clear()
        hooks = [
            target.body.register_forward_pre_hook(before, with_kwargs=True),
            target.body.register_forward_hook(after),
        ]
        begun = clock()
        try:
            with (
                torch.inference_mode(),
                torch.random.fork_rng(range(torch.cuda.device_count())),
                around(),
            ):
                torch.manual_seed(seed)
                out = target.module.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new_tokens,
                    eos_token_id=None,
                    pad_token_id=0,
                    **sampling_options(setting),
                    **options,
                )
                seconds, cpu = clock() - started[0], time.process_time() - started[1]
        finally:
            for hook in hooks:
                hook.remove()
        # All committed tokens but the last are in the cache when a pass begins.
        committed = [length + 1 for length in cached[1:]] + [out.shape[1]]
        accepted = Counter(end - start - 1 for start, end in pairwise(committed))
        return Record(
            setting=str(setting),
            method=name,
            prompt="",
            kind="",
            tokens=out.shape[1] - committed[0],
            steps=len(cached) - 1,
            nodes=sum(drafted[1:]),
            seconds=seconds,
            cpu_seconds=cpu,
            first_seconds=started[0] - begun,
            accepted={str(count): steps for count, steps in sorted(accepted.items())},
        )

    return generate
