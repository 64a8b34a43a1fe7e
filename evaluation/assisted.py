"""The outside reference: transformers' own assisted generation on the same pair, with its default schedule or a tuned one."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise

import torch

from data.engines.transformers import sampling_options
from decoding.model import CausalModel
from decoding.sampling import SamplingSetting
from evaluation.benchmark import Generate, Record

ASSISTED = "transformers assisted"
DEFAULT = None  # the library's own schedule: up to 20 tokens, and none after one whose probability is below 0.4
SCHEDULES = (DEFAULT, 2, 4, 6, 8, 12)  # tried when it is tuned


def assisted_title(tokens: int | None) -> str:
    """The method's name with its schedule: `tokens` drafted a step, or the default one."""
    return f"{ASSISTED} ({'default schedule' if tokens is DEFAULT else f'{tokens} tokens'})"


def is_assisted(method: str) -> bool:
    """Whether a method's name is that of transformers' own loop, with a schedule in it or not."""
    return method == ASSISTED or method.startswith(f"{ASSISTED} (")


@contextmanager
def schedule(draft: CausalModel, tokens: int | None) -> Iterator[None]:
    """The draft's generation_config with a constant number of assistant tokens and no threshold of confidence, put back after.
    transformers reads the schedule there alone: as arguments of `generate` these keys have no effect."""
    module, before = draft.module, draft.module.generation_config
    if tokens is not DEFAULT:
        module.generation_config = deepcopy(before)
        module.generation_config.num_assistant_tokens = tokens
        module.generation_config.num_assistant_tokens_schedule = "constant"
        module.generation_config.assistant_confidence_threshold = 0.0
    try:
        yield
    finally:
        module.generation_config = before


def transformers_assisted(
    name: str, target: CausalModel, draft: CausalModel, setting: SamplingSetting, new_tokens: int, tokens: int | None = DEFAULT
) -> Generate:
    """`target.generate(assistant_model=draft)` with its default schedule, or with a constant number of drafted `tokens`.

    Its first target pass holds the prompt and a first draft at once. As for our own methods, that pass and the tokens it
    gives are not counted: the clocks start when it ends, and what was committed is read off the cache before every later pass.
    """
    started = [0.0, 0.0]  # wall clock and CPU time when the first pass ended
    cached: list[int] = []  # tokens in the cache before every pass
    drafted: list[int] = []  # tokens given to every pass

    def before(module, args, kwargs) -> None:
        cache, rows = kwargs.get("past_key_values"), kwargs.get("input_ids", args[0] if args else None)
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
        hooks = [target.body.register_forward_pre_hook(before, with_kwargs=True), target.body.register_forward_hook(after)]
        begun = clock()
        try:
            with torch.inference_mode(), torch.random.fork_rng(), schedule(draft, tokens):
                torch.manual_seed(seed)
                out = target.module.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    assistant_model=draft.module,
                    max_new_tokens=new_tokens,
                    eos_token_id=None,
                    pad_token_id=0,
                    **sampling_options(setting),
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
