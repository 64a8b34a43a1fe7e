"""Decoding methods timed side by side by `nde_talf.evaluation.protocol`, and their records.

A method has a title and a function that generates.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from nde_talf.decoding.common.files import opened, refuse_link, write_atomically
from nde_talf.decoding.common.json_validation import typed
from nde_talf.decoding.common.progress import console, track
from nde_talf.decoding.sampling.rng import SamplingSetting

Count = Annotated[int, Field(ge=0, le=10**12)]
Length = Annotated[str, Field(pattern="^[0-9]{1,5}$")]
Seconds = Annotated[float, Field(ge=0, le=1e9)]


class Task(NamedTuple):
    """One generation to run.

    Attributes:
        tokens: of the prompt.
        seed: of the sampling.
        prompt: id of the prompt.
        kind: domain of the prompt.
    """

    tokens: list[int]
    seed: int = 0
    prompt: str = ""
    kind: str = ""


@dataclass
class Record:
    """One generation and its cost; what a method does not report is 0 or empty.

    Attributes:
        setting: sampling setting, as text.
        method: its title.
        prompt: id of the prompt.
        kind: domain of the prompt.
        tokens: committed by `steps` target passes after the prefill, whose token is not counted, up
            to and including the end of the text.
        steps: target passes.
        nodes: of all trees, roots included.
        seconds: of these steps, by the wall clock.
        phases: seconds by phase.
        actions: steps by tree, of a policy that chooses.
        pass_: number of a run, where several are read together; "pass" in files.
        cpu_seconds: of these steps, of the process's CPU.
        accepted: steps by number of accepted drafted tokens; the end of a text counts as the last
            step's own token, drafted or not.
        ended: whether an end token ended the text, and not the number of tokens.
        outside: whether transformers' own loop decoded it.
    """

    setting: str
    method: str
    prompt: str
    kind: str
    tokens: Count
    steps: Count
    nodes: Count
    seconds: Seconds
    phases: dict[str, Seconds] = field(default_factory=dict)
    actions: dict[str, Count] = field(default_factory=dict)
    pass_: Annotated[Count, Field(alias="pass")] = 0
    cpu_seconds: Seconds = 0.0
    accepted: dict[Length, Count] = field(default_factory=dict)
    ended: bool = False
    outside: bool = False

    @property
    def block(self) -> tuple[str, int]:
        """Prompt and pass: what all methods decode side by side."""
        return self.prompt, self.pass_

    def line(self) -> str:
        """Write it as one line of JSON."""
        content = asdict(self)
        content["pass"] = content.pop("pass_")
        return json.dumps(content)

    @classmethod
    def of_line(cls, line: str) -> "Record":
        """Read a line. Raises ValueError for one that holds no record."""
        record: Record = typed(json.loads(line), cls)
        if len({bool(n) for n in (record.steps, record.tokens, record.seconds)}) > 1:
            raise ValueError("steps, tokens and seconds are not 0 together")
        return record


Generate = Callable[[Task], Record]


def run_benchmark(
    methods: dict[str, Generate],
    prompts: list[tuple[str, str, list[int]]],
    setting: SamplingSetting,
    records: Path,
    seed: int,
) -> None:
    """Run all `methods` on all `prompts` (id, kind, tokens).

    One JSON line per generation is appended to `records`. Complete blocks are not run again; a
    block that was cut short is run again in full, so that its methods are always measured side by
    side. The order within a block is drawn by its seed: in a fixed or rotating order every method
    would follow the same other one, and find its data in the machine's caches.
    """
    names = list(methods)
    done = {prompt for prompt, _ in finished_blocks(records, str(setting), names)}
    todo = [index for index, (prompt, *_) in enumerate(prompts) if prompt not in done]
    if not todo:
        return
    for name in names:
        methods[name](Task(prompts[0][2], seed))  # warm-up
    count = len(prompts)
    for index in track(todo, f"decode, {setting}", count, "block", count - len(todo)):
        prompt, kind, tokens = prompts[index]
        task, lines = Task(tokens, seed + index, prompt, kind), {}
        for name in random.Random(task.seed).sample(names, len(names)):
            lines[name] = methods[name](task).line()
        refuse_link(records)
        with records.open("a") as stream:
            stream.write("".join(lines[name] + "\n" for name in names))  # tables keep this order


def read_records(records: Path) -> Iterator[Record]:
    """Yield the records of a file.

    A killed run may leave a cut last line, which is skipped. So is any other damaged line, with a
    notice: its block is decoded again.
    """
    if not records.exists():
        return
    with opened(records) as stream:
        lines = stream.read().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            yield Record.of_line(line.decode())
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                console.print(f"! {records}: line {number} is damaged ({error}) and left out")


def finished_blocks(records: Path, setting: str, methods: list[str]) -> set[tuple[str, int]]:
    """Return the blocks (prompt, pass) with one record of every method under `setting`.

    Records of the setting's other blocks, and a cut line, are dropped from the file.
    """
    recorded = list(read_records(records))
    by_block: dict[tuple[str, int], list[str]] = {}
    for record in recorded:
        if record.setting == setting:
            by_block.setdefault(record.block, []).append(record.method)
    done = {block for block, names in by_block.items() if sorted(names) == sorted(methods)}
    text = "".join(
        record.line() + "\n"
        for record in recorded
        if record.setting != setting or record.block in done
    )
    if records.exists() and records.read_bytes() != text.encode():
        write_atomically(records, lambda path: path.write_text(text))
    return done
