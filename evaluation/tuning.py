"""A method is a key and a grid of candidates; the fastest candidate of the grid is taken.

Candidates are timed on prompts that are not evaluated. Keys identify methods and options identify
candidates, in files too; titles are for print.

A method with the rule and tree of an earlier one is listed and not decoded again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nde_talf.decoding.common.files import read_json, write_json
from nde_talf.evaluation.benchmark import Generate, Task

WARM_UP = 8  # tokens decoded before a candidate is timed


Options = dict[str, Any]
"""Settings of a candidate that differ from the others of its grid, as a JSON value."""


class Candidate(NamedTuple):
    """One way to decode.

    Attributes:
        title: in tables.
        make: its generator, from a title and a number of new tokens.
        options: see `Options`.
        alike: title of a method that writes the same text; None: no other does.
    """

    title: str
    make: Callable[[str, int], Generate]
    options: Options
    alike: str | None = None

    def generator(self, new_tokens: int) -> Generate:
        """Make its generator."""
        return self.make(self.title, new_tokens)


class Method(NamedTuple):
    """A row of the table.

    Attributes:
        key: the same under every setting.
        role: its title under every setting, where a candidate's holds what was tuned: "Traversal,
            best static" is "Traversal (1, 0, 4)" under one setting and "Traversal (2, 0, 3)" under
            another.
        grid: candidates; the fastest is decoded.
        learned: whether something learned in the run drafts or chooses.
        exported: whether it is a selector that exported its best static tree.
        rule: verification of a method with something learned.
    """

    key: str
    role: str
    grid: Sequence[Candidate]
    learned: bool = False
    exported: bool = False
    rule: str = ""


@dataclass
class Tuner:
    """Takes the fastest candidate of a grid, once: a resumed evaluation reads it from `file`.

    Attributes:
        file: options by method's key.
        new_tokens: of every trial.
        prompts: tokens of the calibration prompts.
    """

    file: Path
    new_tokens: int
    prompts: list[list[int]]

    def __call__(self, method: Method, prompts: list[list[int]] | None = None) -> Candidate:
        """Return the fastest. prompts: others than all of the tuner's."""
        key, grid = method.key, method.grid
        prompts = self.prompts if prompts is None else prompts
        if len(grid) == 1 or not prompts:
            return grid[0]
        chosen = read_tuned(self.file)
        known = [candidate for candidate in grid if candidate.options == chosen.get(key)]
        fastest = known[0] if known else self._fastest(grid, prompts)
        if not known:
            write_json(self.file, {**chosen, key: fastest.options})
        return fastest

    def _fastest(self, grid: Sequence[Candidate], prompts: list[list[int]]) -> Candidate:
        """Return the candidate with the most tokens per second.

        Successive halving: the prompts are dealt to as many rounds as halving needs, or to one a
        prompt where they are fewer. After a warm-up all are tried on the prompts of the first
        round; after each round the faster half goes to the next, and after the last the fastest
        is taken. Example: 12 trees and 24 prompts: 12 trees on 6 prompts, 6, 3 and 2 on 6 others
        each.
        """
        for candidate in grid:
            candidate.generator(min(WARM_UP, self.new_tokens))(Task(prompts[0]))
        methods = [candidate.generator(self.new_tokens) for candidate in grid]
        left, tokens, seconds = [*range(len(grid))], [0.0] * len(grid), [0.0] * len(grid)
        rounds = min(len(prompts), max(1, (len(grid) - 1).bit_length()))
        for number in range(rounds):
            for index in range(number, len(prompts), rounds):
                for at in left:
                    record = methods[at](Task(prompts[index], index + 1))
                    tokens[at] += record.tokens
                    seconds[at] += record.seconds
            left.sort(key=lambda at: seconds[at] / tokens[at] if tokens[at] else math.inf)
            left = left[: -(-len(left) // 2)] if number + 1 < rounds else left[:1]
        return grid[left[0]]


def read_tuned(file: Path) -> dict[str, Options]:
    """Read a tuner's file; empty where there is none."""
    return read_json(file, dict[str, Options]) if file.exists() else {}
