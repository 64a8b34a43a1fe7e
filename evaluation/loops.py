"""The two loops that the benchmark times: ours, and transformers' generation on the same models.

transformers decodes plainly, with a draft model (assisted generation), or by prompt lookup, which
needs no draft. It reads an assisted generation's schedule only from the draft's generation_config:
as arguments of `generate` these keys have no effect.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteriaList

from nde_talf.data.engines.transformers import sampling_options
from nde_talf.decoding.actions import TREES
from nde_talf.decoding.device import synchronised
from nde_talf.decoding.generation import Stream
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.end_tokens import up_to_end
from nde_talf.decoding.models.static_shapes import MARGIN
from nde_talf.decoding.sampling.rng import Rng, SamplingSetting
from nde_talf.decoding.step import PHASES
from nde_talf.evaluation.benchmark import Generate, Record, Task
from nde_talf.selector.policy import NeuralPolicy

TITLES = {
    "naive": "Naive",
    "bv": "BV",
    "nss": "NSS",
    "naivetree": "NaiveTree",
    "specinfer": "SpecInfer",
    "spectr": "SpecTr",
    "khisti": "Khisti",
    "khisti_lp": "Khisti, LP",
    "traversal": "Traversal",
    "gbv": "GBV",
}
"""Titles of verification rules in tables."""
ASSISTED = "transformers assisted"


@dataclass
class Speculative:
    """Our loop as a method.

    A text ends at the target's end tokens, or after `new_tokens`.
    """

    name: str
    decoder: SpeculativeDecoder
    setting: SamplingSetting
    new_tokens: int

    @property
    def chosen(self) -> Counter[int]:
        """Steps by a selector's action; empty without a selector."""
        policy = self.decoder.policy
        return policy.counts if isinstance(policy, NeuralPolicy) else Counter()

    def __call__(self, task: Task) -> Record:
        """Generate, and record tokens, steps and seconds."""
        stream = self.blocks(task.tokens, task.seed)
        self.chosen.clear()
        next(iter(stream))  # the prefill
        started = time.process_time()
        for _ in stream:
            pass
        cpu, steps = time.process_time() - started, stream.generation.steps
        if not steps:  # the prefill's token ended the text
            cpu = 0.0
        return Record(
            setting=str(self.setting),
            method=self.name,
            prompt=task.prompt,
            kind=task.kind,
            tokens=stream.generation.decoded,
            steps=len(steps),
            nodes=sum(step.nodes for step in steps),
            seconds=stream.generation.decode_seconds,
            phases={phase: sum(step.seconds[phase] for step in steps) for phase in PHASES},
            actions={str(tuple(TREES[index])): n for index, n in self.chosen.items()},
            cpu_seconds=cpu,
            accepted=_counted(step.tau for step in steps),
            ended=stream.ended,
        )

    def blocks(self, prompt: list[int], seed: int) -> Stream:
        """Return a generation after a prompt, as a stream of blocks."""
        ends = self.decoder.target.ends
        return self.decoder.blocks(prompt, self.new_tokens, self.setting, Rng.seeded(seed), ends)


def _counted(lengths: Iterable[int]) -> dict[str, int]:
    return {str(length): steps for length, steps in sorted(Counter(lengths).items())}


Schedule = dict[str, Any]
"""Tokens drafted per step, with the names of transformers' generation_config."""


def schedule(tokens: int, kind: str = "constant", threshold: float = 0.0) -> Schedule:
    """Make a schedule.

    Args:
        tokens: of the first step.
        kind: constant, or heuristic (two more after a step that accepted all, else one less).
        threshold: drafting stops after a token of lower probability.
    """
    return {
        "num_assistant_tokens": tokens,
        "num_assistant_tokens_schedule": kind,
        "assistant_confidence_threshold": threshold,
    }


SCHEDULES: tuple[Schedule | None, ...] = (
    None,  # the library's own: schedule(20, "constant", 0.4)
    *(schedule(tokens) for tokens in (2, 4, 6, 8, 12)),
    *(schedule(tokens, "heuristic") for tokens in (4, 8)),
    *(schedule(tokens, "constant", 0.4) for tokens in (4, 8)),
    *(schedule(tokens, "heuristic", 0.4) for tokens in (4, 8)),
)
"""The grid of assisted generation, as large as `UNLABELLED_TREES`."""


def assisted_title(schedule: Schedule | None) -> str:
    """Return the title of assisted generation with a schedule."""
    if schedule is None:
        return f"{ASSISTED} (default schedule)"
    tokens, kind, threshold = schedule.values()
    words = [f"{tokens} tokens"]
    if kind != "constant":
        words.append(kind)
    if threshold:
        words.append(f"threshold {threshold:g}")
    return f"{ASSISTED} ({', '.join(words)})"


@contextmanager
def scheduled(draft: CausalModel, schedule: Schedule | None) -> Iterator[None]:
    """Set a schedule in the draft's generation_config inside the block.

    The old one is restored: transformers writes adapted values into it.
    """
    module, before = draft.module, draft.module.generation_config
    module.generation_config = deepcopy(before)
    module.generation_config.update(**schedule or {})
    try:
        yield
    finally:
        module.generation_config = before


class PassClock:
    """Records the target's passes: end of the first, and sizes of all."""

    def __init__(self, target: CausalModel):
        self.target, self.now = target, synchronised(time.perf_counter, target.device)
        self.seconds = self.cpu = 0.0  # clocks when the first pass ended
        self.cached: list[int] = []  # tokens in the cache before every pass
        self.given: list[int] = []  # tokens given to every pass

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the passes inside the block."""
        body = self.target.body
        before = body.register_forward_pre_hook(self._before, with_kwargs=True)
        after = body.register_forward_hook(self._after)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _before(self, module: Any, args: tuple, kwargs: dict) -> None:
        self.cached.append(kwargs[self.target.original.memory].get_seq_length())

    def _after(self, module: Any, args: tuple, output: Any) -> None:
        self.given.append(output.last_hidden_state.shape[1])
        if len(self.cached) == 1:
            self.seconds, self.cpu = self.now(), time.process_time()


class _Enough(MaxLengthCriteria):
    """Ends a text at a number of tokens; with transformers' own class `generate` would warn."""


def generated(
    target: CausalModel,
    prompt: list[int],
    setting: SamplingSetting,
    new_tokens: int,
    room: int = 0,
    **options: Any,
) -> Tensor:
    """Return a prompt and the output of transformers' `generate(**options)` after it, [1, n].

    It ends at the target's end tokens. room: extra tokens that the last step may write, as ours
    does; without it the last step drafts less.
    """
    ids = torch.tensor([prompt], device=target.device)
    return target.module.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens + room,
        stopping_criteria=StoppingCriteriaList([_Enough(len(prompt) + new_tokens)]),
        eos_token_id=sorted(target.ends) or None,
        pad_token_id=0,
        **sampling_options(setting),
        **options,
    )


def transformers_loop(
    name: str,
    target: CausalModel,
    setting: SamplingSetting,
    new_tokens: int,
    draft: CausalModel | None = None,
    schedule: Schedule | None = None,
    **options: Any,
) -> Generate:
    """Make a method of `target.generate(**options)`, with a draft model by a schedule if given.

    Its first target pass holds the prompt, and perhaps a first draft. As in our own methods, this
    pass and its tokens are not counted: the clocks start when it ends, and committed tokens are
    read off the cache before every later pass.
    """
    around: Callable[[], AbstractContextManager] = nullcontext
    if draft is not None:
        around, options["assistant_model"] = partial(scheduled, draft, schedule), draft.module

    def generate(task: Task) -> Record:
        prompt, passes = task.tokens, PassClock(target)
        isolated: AbstractContextManager = torch.random.fork_rng(range(torch.cuda.device_count()))
        with passes.watching(), torch.inference_mode(), isolated, around():
            torch.manual_seed(task.seed)
            out = generated(target, prompt, setting, new_tokens, MARGIN, **options)
            seconds = passes.now() - passes.seconds
            cpu = time.process_time() - passes.cpu
        text = up_to_end(out[0, len(prompt) :].tolist(), target.ends)
        # All committed tokens but the last are in the cache when a pass begins.
        committed = [length + 1 for length in passes.cached[1:]] + [len(prompt) + len(text)]
        if len(committed) == 1:  # the uncounted first pass wrote all
            seconds = cpu = 0.0
        return Record(
            setting=str(setting),
            method=name,
            prompt=task.prompt,
            kind=task.kind,
            tokens=committed[-1] - committed[0],
            steps=len(passes.cached) - 1,
            nodes=sum(passes.given[1:]),
            seconds=seconds,
            cpu_seconds=cpu,
            accepted=_counted(end - start - 1 for start, end in pairwise(committed)),
            ended=not target.ends.isdisjoint(text[:new_tokens]),
            outside=True,
        )

    return generate
