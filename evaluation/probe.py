"""Probe a pair before anything is trained: decode a few prompts and tell what drafting would win.

Plain decoding, n-grams, a path and a tree take turns, prompt by prompt.
"""

import random
import time
from collections.abc import Sequence

from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import duration
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.drafters.ngram import NgramDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.static_shapes import StaticShapes
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.policies.ngram import NgramTree
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting
from nde_talf.evaluation.benchmark import Record, Task
from nde_talf.evaluation.loops import Speculative
from nde_talf.evaluation.protocol import BASELINE, CONTROL

PATH, TREE = Action(1, 0, 8), Action(3, 1, 3)
DRAFTED_PATH, DRAFTED_TREE, NGRAMS = (
    f"path of {PATH.depth} drafted tokens",
    f"tree {tuple(TREE)}",
    "n-grams, no model",
)
PROMPTS, TEXT = 20, 64
"""Prompts, and tokens that are decoded after each."""
WARM_UP = 8
"""Tokens of the warm-up, which also tells how many prompts there is time for."""


def methods(
    target: CausalModel,
    drafter: Drafter | None,
    setting: SamplingSetting,
    static: StaticShapes | None = None,
) -> dict[str, SpeculativeDecoder]:
    """Make the decoders to compare: plain decoding twice, n-grams, and trees of a `drafter`.

    static: shapes of all passes, if they are fixed.
    """
    rule, picked = ("traversal", "nss") if setting.temperature else ("greedy", "greedy")
    kinds: dict[str, tuple[Drafter | None, TreePolicy, str]] = {
        BASELINE: (None, Autoregressive(), "naive"),
        CONTROL: (None, Autoregressive(), "naive"),
        NGRAMS: (NgramDrafter(target.vocab_size), NgramTree(), picked),
    }
    if drafter:
        kinds[DRAFTED_PATH] = drafter, Delayed(PATH), rule
        kinds[DRAFTED_TREE] = drafter, Delayed(TREE), rule
    return {
        name: SpeculativeDecoder(target, *parts, static=static) for name, parts in kinds.items()
    }


def decode(
    decoders: dict[str, SpeculativeDecoder],
    prompts: Sequence[list[int]],
    setting: SamplingSetting,
    seconds: float,
) -> list[Record]:
    """Decode as many of the prompts as there is time for, at least one; return the records.

    Raises UserError where not even one prompt fits into `seconds`.
    """
    started = time.monotonic()
    for name, decoder in decoders.items():
        Speculative(name, decoder, setting, WARM_UP)(Task(prompts[0]))
    longest = (time.monotonic() - started) * TEXT / WARM_UP
    if longest > seconds:
        raise UserError(
            f"a prompt takes about {duration(longest)} here, and {duration(seconds)} are left: too"
            " slow for a probe. Take a faster device."
        )
    records: list[Record] = []
    for index, tokens in enumerate(prompts):
        now = time.monotonic()
        if now - started + longest > seconds:
            break
        task = Task(tokens, index, str(index))
        for name in random.Random(index).sample([*decoders], len(decoders)):
            records.append(Speculative(name, decoders[name], setting, TEXT)(task))
        longest = time.monotonic() - now
    return records
