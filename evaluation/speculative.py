"""A decoder of ours as a method of the benchmark: it generates, and records what that took."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nde_talf.decoding.drafter import Drafter
from nde_talf.decoding.loop import PHASES, Generation, SpeculativeDecoder, Stream
from nde_talf.decoding.ngram import statistics
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.evaluation.benchmark import Record
from nde_talf.selector.policy import NeuralPolicy
from nde_talf.selector.selector import action_at

TITLES = {
    "naive": "Naive",
    "bv": "BV",
    "nss": "NSS",
    "naivetree": "NaiveTree",
    "specinfer": "SpecInfer",
    "spectr": "SpecTr",
    "khisti": "Khisti",
    "traversal": "Traversal",
    "gbv": "GBV",
    "across": "Any rule",
}


@dataclass
class Speculative:
    """A method of our loop: generates after a prompt, and records what it took."""

    name: str
    decoder: SpeculativeDecoder
    setting: SamplingSetting
    new_tokens: int

    def __call__(self, prompt: list[int], seed: int, kind: str) -> Record:
        policy = self.decoder.policy
        if isinstance(policy, NeuralPolicy):
            policy.counts.clear()
        stream = self.blocks(prompt, seed)
        next(iter(stream))  # the prefill
        started = time.process_time()
        for _ in stream:
            pass
        record = record_of(self.name, self.setting, stream.generation)
        record.cpu_seconds = time.process_time() - started
        add_matches(record, self.decoder.drafting)
        if isinstance(policy, NeuralPolicy):
            verifiers = policy.selector.schema.verifiers
            record.actions = {
                action_title(index, verifiers): steps for index, steps in policy.counts.items()
            }
        return record

    def blocks(self, prompt: list[int], seed: int) -> Stream:
        """The same generation, block by block."""
        return self.decoder.blocks(prompt, self.new_tokens, self.setting, Rng.seeded(seed))


def action_title(index: int, verifiers: Sequence[str]) -> str:
    """What action `index` of a selector is called: its tree, after the rule where it chooses that
    too.
    """
    rule, tree = action_at(index, verifiers)
    return str(tuple(tree)) if len(verifiers) == 1 else f"{TITLES[rule]} {tuple(tree)}"


def record_of(name: str, setting: SamplingSetting, generation: Generation) -> Record:
    """What a generation of our loop took; the prompt is not filled in."""
    steps = generation.steps
    return Record(
        setting=str(setting),
        method=name,
        prompt="",
        kind="",
        tokens=generation.decoded,
        steps=len(steps),
        nodes=sum(step.nodes for step in steps),
        seconds=generation.decode_seconds,
        phases={phase: sum(step.seconds[phase] for step in steps) for phase in PHASES},
        first_seconds=generation.prefill_seconds,
        accepted={
            str(tau): count for tau, count in sorted(Counter(step.tau for step in steps).items())
        },
    )


def add_matches(record: Record, drafter: Drafter | None) -> None:
    """Enter what an n-gram drafter, or a mixed one, drafted by size of the match; nothing for
    others.
    """
    for size, tested in statistics(drafter).items():
        record.drafted_by_match[str(size)], record.accepted_by_match[str(size)] = (
            tested.drafted,
            tested.accepted,
        )
