"""Formats of what this project writes: one number each, and for each older number a function that
upgrades content to the next.

An older file is read as if it had been written today, with a notice if it is from before checksums.
Files are never rewritten.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nde_talf.decoding.common.checksums import CHECKSUMS, check_checksums
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import SEAL, read_json, read_sealed, unreadable
from nde_talf.decoding.common.typed import typed


class OldFormatWarning(UserWarning):
    """An artefact is of an older format, without checksums."""


@dataclass(frozen=True)
class Format:
    """The format of one kind of artefact.

    Attributes:
        what: its name in messages.
        number: of what is written today.
        checked: the first number that has checksums.
        again: what a person does to make one anew.
        upgrades: number -> function from content of that number to content of the next.
        absent: the number of content that names none; None if every format names its own.
        kind: what today's content has to be, as an annotation, see `typed`.
    """

    what: str
    number: int
    checked: int
    again: str
    upgrades: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = field(default_factory=dict)
    absent: int | None = None
    kind: Any = dict[str, Any]

    def number_of(self, content: Any, path: Path) -> int:
        """The number that content names. Raises UserError if this version does not read it."""
        number = content.get("format", self.absent) if isinstance(content, dict) else None
        if type(number) is not int or number not in {*self.upgrades, self.number}:
            known = " and ".join(map(str, sorted({*self.upgrades, self.number})))
            raise UserError(
                f"{path}: it is no {self.what} that this version reads (its format is {number};"
                f" known are {known}). It is of another version, or damaged: {self.again}."
            )
        return number

    def upgraded(self, content: dict[str, Any], path: Path, notice: bool = True) -> dict[str, Any]:
        """`content` of any known number as that of today. notice: say so if it is from before
        checksums.

        Raises UserError naming `path` if it is not of this `kind`.
        """
        number = self.number_of(content, path)
        if notice and number < self.checked:
            warnings.warn(
                f"{path}: {self.what} of format {number}, from before checksums. It is read, but"
                f" damage to it cannot be seen; to have checksums, {self.again}.",
                OldFormatWarning,
                stacklevel=3,
            )
        while number != self.number:
            content = {**self.upgrades[number](content), "format": number + 1}
            number += 1
        try:
            return typed(content, self.kind)
        except ValueError as error:
            raise unreadable(path, error, self.again) from error

    def load(
        self, path: Path, notice: Callable[[dict[str, Any]], bool] | bool = True
    ) -> dict[str, Any]:
        """The content of a sealed JSON file, or of an older one without a seal, as that of today.
        notice: as in `upgraded`, or what says so of the content.

        Raises UserError naming `path` if it is damaged or of an unknown format.
        """
        content = read_json(path, Any, self.again)
        if self.number_of(content, path) >= self.checked:
            content = read_sealed(path, self.again)
        elif SEAL in content:
            raise UserError(
                f"{path}: it names an older format and has a checksum, so it was damaged:"
                f" {self.again}."
            )
        return self.upgraded(content, path, notice(content) if callable(notice) else notice)

    def load_folder(self, folder: Path, content: dict[str, Any], path: Path) -> dict[str, Any]:
        """`content`, of the file `path` of an exported folder, as that of today.

        Raises UserError if a file of the folder is not as it was written, or if the format is
        unknown.
        """
        checked = check_checksums(folder, again=self.again)
        if (self.number_of(content, path) >= self.checked) != checked:
            how = "has no" if not checked else "names an older format and has a"
            raise UserError(
                f"{folder}: it {how} {CHECKSUMS}, so nobody can tell whether it is whole:"
                f" {self.again}."
            )
        return self.upgraded(content, path)
