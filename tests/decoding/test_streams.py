"""Streams of one decoder, or of decoders that share a drafter and a policy, are read in turn or by
threads: each gives the text that it gives alone, or static shapes, which hold one sequence, say
that it cannot go on.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier

import pytest
import torch

from nde_talf import (
    VERIFIERS,
    Action,
    Autoregressive,
    Beam,
    Delayed,
    DynaTree,
    DySpec,
    EagleDrafter,
    FollowMean,
    LMDrafter,
    NeuralPolicy,
    Rng,
    Salf,
    SamplingSetting,
    Selector,
    SpeculativeDecoder,
    StaticShapes,
    Step,
    Stream,
)
from nde_talf.decoding.actions import TREES
from nde_talf.decoding.policies.dynatree import DynaTreeConfig
from nde_talf.selector.schema import SelectorSchema
from tests.decoding.pairs import tiny_pair
from tests.draft_training.heads import random_eagle3, random_head
from tests.refusal import refusal
from tests.selector.examples import TABLE

TARGET, DRAFT = tiny_pair(32, layers=3)
HEADS = {"head": random_head(TARGET), "head on three layers": random_eagle3(TARGET)}
# Prompts of several lengths and settings, each with rng of its own.
ASKED = [
    ([3, 1, 4, 1, 5], SamplingSetting(1.0)),
    ([9, 2], SamplingSetting(0.6, 0.9)),
    ([6, 5, 3, 5, 8, 9, 7], SamplingSetting(0.8)),
]
TOKENS = 24


def selector():
    """Chooses by the context under T = 1 and 0.8, and one tree under T = 0.6."""
    torch.manual_seed(4)
    settings = ((1.0, 1.0), (0.8, 1.0), (0.6, 0.9))
    selector = Selector(SelectorSchema(16, 16, ("specinfer",), settings, (True, True, False)))
    with torch.no_grad():
        selector.network.mlp[-1].weight.mul_(30)
        selector.network.mlp[-1].bias[torch.tensor([tree.depth > 6 for tree in TREES])] = -1e3
        selector.static_efficiency[2, TREES.index(Action(1, 0, 3))] = 50
    return NeuralPolicy(selector, TABLE)


POLICIES = {
    "autoregressive": (Autoregressive, "nss"),
    "delayed": (lambda: Delayed(Action(3, 1, 2)), "specinfer"),
    "mean": (lambda: FollowMean(1, 2, 5), "traversal"),
    "dynatree": (
        lambda: DynaTree(
            DynaTreeConfig(nodes=9, depth=2, max_depth=5, window=3, prune=0.0, stop=0.001)
        ),
        "nss",
    ),
    "salf": (lambda: Salf(nodes=8, batch=3, threshold=0.3), "nss"),
    "dyspec": (lambda: DySpec(6), "without_replacement"),
    "beam": (lambda: Beam(3, 3, 9), "nss"),
    "selector": (selector, None),
}


def drafter(name, static=None):
    return LMDrafter(DRAFT, static) if name == "lm" else EagleDrafter(HEADS[name], static)


def decoder(policy, drafting, static=None, shared=None):
    make, rule = POLICIES[policy]
    chosen = make()
    drafts = None if policy == "autoregressive" else shared or drafter(drafting, static)
    verify = chosen.verifier if rule is None else VERIFIERS[rule]
    return SpeculativeDecoder(TARGET, drafts, chosen, verify, static=static)


def stream(made, number, tokens=TOKENS):
    prompt, setting = ASKED[number]
    return made.blocks(prompt, tokens, setting, Rng.seeded(number))


@cache
def alone(policy, drafting):
    """The texts, each of a decoder of its own."""
    made = [stream(decoder(policy, drafting), number) for number in range(len(ASKED))]
    return [[token for block in one for token in block.tokens] for one in made]


def in_turn(streams):
    """A block of each at a time, until all are read."""
    texts, waiting = [[] for _ in streams], dict(enumerate(map(iter, streams)))
    while waiting:
        for number, one in list(waiting.items()):
            block = next(one, None)
            if block is None:
                del waiting[number]
            else:
                texts[number] += block.tokens
    return texts


CASES = [
    *((name, "lm") for name in POLICIES),
    *((name, head) for name in ("delayed", "salf") for head in HEADS),
]


def sizes(streams):
    """Of every stream the nodes of its trees, step by step: NSS gives the same text from any tree."""
    return [[step.nodes for step in one.generation.steps] for one in streams]


@pytest.mark.slow
@pytest.mark.parametrize("policy,drafting", CASES)
def test_streams_read_in_turn_are_those_read_alone(policy, drafting):
    made = decoder(policy, drafting)
    together, apart = (
        [stream(one, number) for number, one in enumerate(decoders)]
        for decoders in ([made] * len(ASKED), [decoder(policy, drafting) for _ in ASKED])
    )
    texts = in_turn(together)
    assert texts == [text for one in apart for text in in_turn([one])] and all(
        len(text) == TOKENS for text in texts
    )
    assert sizes(together) == sizes(apart)


@pytest.fixture
def restless():
    """Threads change as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(made, tokens=TOKENS):
    """A thread a text; an error stands for its own."""
    barrier = Barrier(len(made))

    def read(number):
        barrier.wait()
        try:
            prompt, setting = ASKED[number]
            return made[number].generate(prompt, tokens, setting, Rng.seeded(number)).tokens
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(read, range(len(made))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy,drafting",
    [
        ("autoregressive", "lm"),
        ("selector", "lm"),
        ("dynatree", "lm"),
        ("salf", "head"),
        ("delayed", "head on three layers"),
    ],
)
def test_threads_that_share_a_decoder_get_the_texts_of_one(restless, policy, drafting):
    made, expected = decoder(policy, drafting), alone(policy, drafting)
    for _ in range(2):
        assert in_threads([made] * len(ASKED)) == expected


def test_a_stream_that_is_being_read_refuses_another_reader():
    def steps():
        next(stream)
        yield Step([1], 1, {"other": 0.0})

    stream = Stream(steps(), 4, (), torch.device("cpu"))
    with refusal("thread"):
        next(stream)


@pytest.mark.parametrize("limit, text", [(9, [1, 4, 9]), (2, [1, 4])])
def test_a_step_ends_with_the_text_even_where_fewer_tokens_were_asked_for(limit, text):
    steps = iter([Step([1], 1, {"other": 0.0}), Step([4, 9, 5, 6], 5, {"other": 0.0})])
    stream = Stream(steps, limit, {9, 7}, torch.device("cpu"))
    assert [block.accepted for block in stream] == [0, len(text) - 1]
    assert stream.generation.tokens == text and stream.ended == (limit == 9)
    assert stream.generation.steps[0].tokens == [4, 9] and stream.generation.decoded == 2


@pytest.mark.slow
@pytest.mark.parametrize("drafting", ["lm", "head"])
def test_of_static_shapes_the_stream_begun_last_goes_on_and_the_others_say_that_they_cannot(
    drafting,
):
    made = decoder("delayed", drafting, StaticShapes(100, rows=16))
    first, second = stream(made, 0), stream(made, 1)
    next(iter(first))
    begun = next(iter(second)).tokens
    with refusal("another sequence"):
        next(iter(first))
    rest = [token for block in second for token in block.tokens]
    assert begun + rest == alone("delayed", drafting)[1]
