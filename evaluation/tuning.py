"""A method is a name and a grid of candidates; the fastest candidate of the grid is taken.

`Method("Traversal, mean acceptance", {title: candidate, ...})`. Candidates are timed on prompts
that are not evaluated.

A method that equals one already there under another name (the same rule, tree and drafter) is
listed and not decoded a second time. Two rules are the same on a single path where they take the
same decisions from the same random numbers, so that with one seed they write the same text: Naive,
NaiveTree and SpecInfer at K = 1 all accept with min(1, p / q) and otherwise draw from the residual;
block verification is Traversal on a path, and so is GBV where there is one branch. Rules that have
the same law there but do other work, such as SpecTr and Khisti at K = 1, are compared.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nde_talf.decoding.actions import Action, canonical
from nde_talf.decoding.common.files import read_json, write_json
from nde_talf.decoding.names import ON_PATHS
from nde_talf.evaluation.benchmark import Generate

LM_DRAFT, HEAD = "LM draft", "draft head"
SAME_ON_PATHS = {"specinfer": "naivetree", "gbv": "traversal"}
WARM_UP = 8  # tokens decoded before a candidate is timed


class Configuration(NamedTuple):
    """A static method, its rule and tree in normal form: see `configuration`."""

    rule: str
    tree: Action
    drafter: str = LM_DRAFT


def configuration(rule: str, tree: Action, drafter: str = LM_DRAFT) -> Configuration:
    """Equal for methods that write the same text from the same seed."""
    tree, rule = canonical(tree), ON_PATHS.get(rule, rule)
    return Configuration(SAME_ON_PATHS.get(rule, rule) if tree.k == 1 else rule, tree, drafter)


class Candidate(NamedTuple):
    """One way to decode.

    Attributes:
        make: its generator, from a title and a number of new tokens.
        alike: equal for candidates that write the same text; None for one like no other.
    """

    make: Callable[[str, int], Generate]
    alike: Configuration | None = None


class Method(NamedTuple):
    """A row of the table.

    Attributes:
        role: its name under every setting, where a candidate's title holds what was tuned:
            "Traversal, best static" is "Traversal (1, 0, 4)" under one setting and "Traversal (2,
            0, 3)" under another.
        grid: candidates by title; the fastest is decoded.
        learned: whether something learned in the run drafts or chooses.
    """

    role: str
    grid: dict[str, Candidate]
    learned: bool = False


@dataclass
class Tuner:
    """Takes the fastest candidate of a grid, once: a resumed evaluation reads it from `file`.

    Attributes:
        file: titles by role.
        new_tokens: of every trial.
        prompts: tokens of the calibration prompts.
    """

    file: Path
    new_tokens: int
    prompts: list[list[int]]

    def __call__(
        self, role: str, grid: dict[str, Candidate], prompts: list[list[int]] | None = None
    ) -> str:
        """The title of the fastest. prompts: others than all of the tuner's."""
        prompts = self.prompts if prompts is None else prompts
        if len(grid) == 1 or not prompts:
            return next(iter(grid))
        chosen = read_json(self.file, dict[str, str]) if self.file.exists() else {}
        if chosen.get(role) not in grid:
            chosen[role] = self._fastest(grid, prompts)
            write_json(self.file, chosen)
        return chosen[role]

    def _fastest(self, grid: dict[str, Candidate], prompts: list[list[int]]) -> str:
        """The title of the candidate with the most tokens per second.

        Successive halving: the prompts are dealt to as many rounds as halving needs, or to one a
        prompt where they are fewer. After a warm-up all are tried on the prompts of the first
        round; after each round the faster half goes on to the next, and after the last the fastest
        is taken. Example: 12 trees and 24 prompts: 12 trees on 6 prompts, 6, 3 and 2 on 6 others
        each.
        """
        for title, candidate in grid.items():
            candidate.make(title, min(WARM_UP, self.new_tokens))(prompts[0], 0, "")
        methods = {title: grid[title].make(title, self.new_tokens) for title in grid}
        left, tokens, seconds = list(grid), dict.fromkeys(grid, 0.0), dict.fromkeys(grid, 0.0)
        rounds = min(len(prompts), max(1, (len(grid) - 1).bit_length()))
        for number in range(rounds):
            for index in range(number, len(prompts), rounds):
                for title in left:
                    record = methods[title](prompts[index], index + 1, "")
                    tokens[title] += record.tokens
                    seconds[title] += record.seconds
            left.sort(key=lambda at: seconds[at] / tokens[at] if tokens[at] else math.inf)
            left = left[: -(-len(left) // 2)] if number + 1 < rounds else left[:1]
        return left[0]
