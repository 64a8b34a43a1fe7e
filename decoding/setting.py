"""Sampling settings: what a user chooses. Imports no torch, so that a configuration can be read without it."""

from dataclasses import dataclass

from decoding.common.errors import UserError


@dataclass(frozen=True)
class SamplingSetting:
    """Temperature (0 = greedy) and nucleus threshold top-p in (0, 1]."""

    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"temperature={self.temperature}: it must be 0 (greedy) or larger.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: it must lie in (0, 1]; 1 switches nucleus sampling off.")

    def __str__(self) -> str:
        return f"T={self.temperature:g}" + (f", top-p={self.top_p:g}" if self.top_p < 1 else "")


RAW = SamplingSetting(1.0, 1.0)
