"""Timing of the lm_head over a draft vocabulary against the lm_head over all tokens."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from nde_talf.decoding.common.progress import console
from nde_talf.decoding.models.causal_model import CausalModel

LEVELS, REPEATS = 4, 5
"""Drafted levels of a step; passes per timing."""


def pays(target: CausalModel, vocabulary: Tensor, share: float) -> bool:
    """Return whether logits of `vocabulary` alone make a step cheaper, by timing both here.

    A step is a pass of the target and `LEVELS` drafted ones. With a `share` of the text covered, it
    commits a fraction of about 1 - share² fewer tokens.
    """
    one = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    rows = target.readout.weight.detach()[vocabulary.to(target.device)]

    def seconds(run: Callable[[], Tensor]) -> float:
        threads = torch.get_num_threads()
        timer = Timer("run().softmax(-1)", globals={"run": run}, num_threads=threads)
        return timer.timeit(REPEATS).median

    with torch.inference_mode():
        hidden = target.hidden(one, one, None, None)
        step = seconds(lambda: target.logits(target.hidden(one, one, None, None)))
        whole = seconds(lambda: target.logits(hidden))
        some = seconds(lambda: F.linear(hidden, rows))
    console.print(
        f"reading out {len(rows)} of {target.vocab_size} tokens takes {1e3 * some:.2f} ms, all"
        f" {1e3 * whole:.2f} ms, a step of plain decoding {1e3 * step:.2f} ms"
    )
    return step + LEVELS * some < share**2 * (step + LEVELS * whole)
