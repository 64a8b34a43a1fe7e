"""A target, a draft and a head over four tokens, the target's exact law, and a chi-square test of a
decoder against it.
"""

from collections import Counter
from itertools import product

import torch

from nde_talf import (
    Action,
    Beam,
    Delayed,
    DySpec,
    EagleDrafter,
    LMDrafter,
    Rng,
    SamplingSetting,
    Shaped,
)
from nde_talf.decoding.sampling.rng import warp
from nde_talf.decoding.testing import exact_law
from nde_talf.evaluation.chi_square import p_value
from tests.decoding.memoized import memoized, memoized_model
from tests.decoding.pairs import tiny_pair
from tests.draft_training.heads import random_head

VOCABULARY, TOKENS, TRIALS = 4, 3, 800
SETTING = SamplingSetting(0.9, 0.97)
PROMPT = [1, 3, 2]
TARGET, DRAFT = map(memoized_model, tiny_pair(VOCABULARY, noise=0.15))
HEAD = random_head(TARGET)
HEAD.forward = memoized(HEAD.forward)
SMALL = {  # trees small enough for exact laws
    "path": lambda: Delayed(Action(1, 0, 2)),
    "delayed": lambda: Delayed(Action(2, 0, 1)),
    "distinct": lambda: Shaped(((), ()), "without_replacement"),
    "deep": lambda: Shaped(((((),),), ()), "without_replacement"),
    "dyspec": lambda: DySpec(nodes=3),
    "iid": lambda: Shaped((((),), ()), "iid"),
    "beam": lambda: Beam(k=2, depth=2, nodes=3),
}


def drafter(name):
    return LMDrafter(DRAFT) if name == "lm" else EagleDrafter(HEAD)


@torch.inference_mode()
def target_law(length, setting=SETTING, stop=-1, target=TARGET):
    """P of every text of `length` tokens behind the prompt, or up to a token `stop`."""
    law = {}
    for tokens in product(range(VOCABULARY), repeat=length):
        logits = target.module(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
        chance = float(warp(logits.double(), setting)[torch.arange(length), list(tokens)].prod())
        text = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        law[text] = law.get(text, 0.0) + chance
    return law


def law_of(decoder, tokens, stop=(), prompt=PROMPT, setting=SETTING):
    """The exact law of the first tokens of a decoder's text."""
    return exact_law(lambda rng: tuple(decoder.generate(prompt, tokens, setting, rng, stop).tokens))


def chi_square(decoder, trials=TRIALS):
    """p-value of the sampled first tokens against the target's law."""
    rng = Rng.seeded(12345)
    counts = Counter(
        tuple(decoder.generate(PROMPT, TOKENS, SETTING, rng).tokens) for _ in range(trials)
    )
    return p_value(counts, target_law(TOKENS))
