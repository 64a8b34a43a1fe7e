"""The benchmark protocol: every method on the same prompts in one process, interleaved prompt by prompt.

The order of methods rotates from prompt to prompt, so that a slow moment of the machine hits them alike; a warm-up
prompt is not counted; all methods of a prompt share its seed. It knows methods by name and a function that generates.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from data.files import write_atomically
from data.progress import track
from decoding.loop import PHASES, Generation, SpeculativeDecoder
from decoding.sampling import Coins, SamplingSetting
from selector.policy import NeuralPolicy


@dataclass
class Record:
    """One generation: who, where, and what it took. seconds excludes the prefill and its token, for every method.
    forward_seconds: of these inside the models; draft_passes: forward passes of the draft. Both 0 where nobody counted."""

    setting: str
    method: str
    prompt: str
    kind: str
    tokens: int
    steps: int
    nodes: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    actions: dict[str, int] = field(default_factory=dict)  # steps by action, of a policy that chooses
    forward_seconds: float = 0.0
    draft_passes: int = 0


Generate = Callable[[list[int], int, str], Record]  # of prompt tokens, seed and kind of prompt


def speculative(name: str, decoder: SpeculativeDecoder, setting: SamplingSetting, new_tokens: int) -> Generate:
    """A method of our loop."""

    policy = decoder.policy

    def generate(prompt: list[int], seed: int, kind: str) -> Record:
        if isinstance(policy, NeuralPolicy):
            policy.counts.clear()
        record = record_of(name, setting, decoder.generate(prompt, new_tokens, setting, Coins.seeded(seed)))
        if isinstance(policy, NeuralPolicy):
            record.actions = {str(tuple(action)): steps for action, steps in policy.actions().items()}
        return record

    return generate


def record_of(name: str, setting: SamplingSetting, generation: Generation) -> Record:
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
    )


def run_benchmark(
    methods: dict[str, Generate],
    prompts: list[tuple[str, str, list[int]]],
    setting: SamplingSetting,
    records: Path,
    seed: int,
) -> None:
    """Run all `methods` on all `prompts` (id, kind, tokens), appending one JSON line a generation to `records`.

    A prompt whose lines are all there is not run again; a prompt that was cut short is run again whole, so that its
    methods are always measured side by side.
    """
    names = list(methods)
    done = finished_prompts(records, str(setting), names)
    todo = [entry for entry in enumerate(prompts) if entry[1][0] not in done]
    if not todo:
        return
    for name in names:
        methods[name](prompts[0][2], seed, prompts[0][1])  # warm-up
    for index, (prompt, kind, tokens) in track(todo, f"decode, {setting}", len(prompts), "prompt", len(prompts) - len(todo)):
        turn = index % len(names)
        lines = []
        for name in names[turn:] + names[:turn]:
            record = methods[name](tokens, seed + index, kind)
            record.prompt, record.kind = prompt, kind
            lines.append(json.dumps(asdict(record)))
        with records.open("a") as stream:
            stream.write("\n".join(lines) + "\n")


def read_records(records: Path) -> Iterator[Record]:
    """The records of a file; the last line of a killed run may be cut and is passed over."""
    if not records.exists():
        return
    for line in records.read_text().splitlines():
        try:
            yield Record(**json.loads(line))
        except (ValueError, TypeError):
            continue


def together(records: Iterable[Record]) -> list[Record]:
    """One record for all generations of a method behind a prompt under a setting, with their sums."""
    found: dict[tuple[str, str, str], Record] = {}
    for record in records:
        key = record.setting, record.method, record.prompt
        if key in found:
            sums = {f.name: _sum(getattr(found[key], f.name), getattr(record, f.name)) for f in fields(Record)[4:]}
            record = replace(record, **sums)
        found[key] = record
    return list(found.values())


def _sum(a, b):
    return {name: a.get(name, 0) + b.get(name, 0) for name in a | b} if isinstance(a, dict) else a + b


def finished_prompts(records: Path, setting: str, methods: list[str]) -> set[str]:
    """Prompts that every method has a record for under `setting`. Records of its other prompts, and a cut line, are
    dropped from the file."""
    found = list(read_records(records))
    by_prompt: dict[str, set[str]] = {}
    for record in found:
        if record.setting == setting:
            by_prompt.setdefault(record.prompt, set()).add(record.method)
    done = {prompt for prompt, names in by_prompt.items() if names == set(methods)}
    kept = [record for record in found if record.setting != setting or record.prompt in done]
    text = "".join(json.dumps(asdict(record)) + "\n" for record in kept)
    if records.exists() and records.read_text() != text:
        write_atomically(records, lambda path: path.write_text(text))
    return done
