"""The format of what this project writes: one number, and one reader for each kind of artefact.

Everything is of format 1. Another number is refused with what a person can do about it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from nde_talf.decoding.common.checksums import CHECKSUMS, check_checksums
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json, read_sealed, unreadable
from nde_talf.decoding.common.json_validation import typed


@dataclass(frozen=True)
class Format:
    """The format of one kind of artefact.

    Attributes:
        what: its name in messages.
        again: what a person does to make one anew.
        kind: what its content has to be, as an annotation, see `typed`.
    """

    what: str
    again: str
    kind: Any = dict[str, Any]
    number: ClassVar[int] = 1

    def checked(self, content: dict[str, Any], path: Path) -> Any:
        """Return `content`, checked.

        Raises UserError naming `path` if it is of another format, or not of this kind.
        """
        self._check_number(content, path)
        try:
            typed(content, self.kind)
        except ValueError as error:
            raise unreadable(path, error, self.again) from error
        return content

    def load(self, path: Path) -> Any:
        """Return the content of a sealed JSON file.

        Raises UserError naming `path` if it is damaged, or of another format.
        """
        self._check_number(read_json(path, again=self.again), path)
        return self.checked(read_sealed(path, self.again), path)

    def load_folder(self, folder: Path, content: dict[str, Any], path: Path) -> Any:
        """Return `content`, of the file `path` of an exported folder.

        Raises UserError if a file of the folder is not as it was written.
        """
        if not check_checksums(folder, again=self.again):
            raise UserError(
                f"{folder}: it has no {CHECKSUMS}, so nobody can tell whether it is whole:"
                f" {self.again}."
            )
        return self.checked(content, path)

    def _check_number(self, content: dict[str, Any], path: Path) -> None:
        if content.get("format") != self.number:
            raise UserError(
                f"{path}: it is no {self.what} that this version reads (its format is"
                f" {content.get('format')}, and has to be {self.number}). It is of another version,"
                f" or damaged: {self.again}."
            )
