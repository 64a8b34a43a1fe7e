"""What a table of measurements allows to be said: one sentence a setting, and nothing where the clock is not trusted."""

from dataclasses import dataclass

from evaluation.bootstrap import times
from evaluation.methods import ASSISTED
from evaluation.protocol import BASELINE, CONTROL, NOT_TRUSTED, trusted
from evaluation.table import Row, control_of

DO_NOT = "do not speculate with this pair"


@dataclass
class Verdict:
    """clock: "trusted", NOT_TRUSTED, or "no control" in records without one. control: its ratio. speculate: True where the best
    method's whole interval is above 1, False where every method is slower than plain decoding, None where neither is shown.
    best, speedup: the method with the highest figure. sentence: what may be said."""

    clock: str
    control: list[float] | None
    speculate: bool | None
    best: str | None
    speedup: list[float] | None
    sentence: str


def verdict(setting: str, rows: list[Row], conditions: str) -> Verdict:
    """The verdict on one setting's table. conditions: batch size, dtype and machine, as the sentence names them."""
    control = control_of(rows)
    methods = [row for row in rows if row.method not in (BASELINE, CONTROL)]
    best = max(methods, key=lambda row: row.speedup[0], default=None)
    at, name, speedup = in_words(setting), best and best.method, best and best.speedup
    if not trusted(control):
        clock, why = "no control", "these records have no A/A control"
        if control:
            clock, why = NOT_TRUSTED, f"plain decoding against itself reads {times(control)}, where 1 is right"
        said = (
            f"At {at}: {NOT_TRUSTED}. On this table {why}, so that it supports no claim. Measure once more on a quiet "
            f"machine, as a run "
            "of its own (stage=evaluate run=NAME base=THIS_RUN), and report both results."
        )
        return Verdict(clock, control, None, name, speedup, said)
    if best is None:
        return Verdict("trusted", control, None, None, None, f"At {at}: only plain decoding was measured.")
    if speedup[0] < 1 and all(row.speedup[0] < 1 for row in methods):
        said = f"At {at}: {DO_NOT}. Every method is slower than plain autoregressive decoding; {name} comes closest with "
        return Verdict(
            "trusted", control, False, name, speedup, f"{said}{times(speedup)} its tokens per second ({conditions})."
        )
    if speedup[1] <= 1:
        said = f"At {at}, no method is measurably faster than plain autoregressive decoding: the best, {name}, reaches "
        return Verdict("trusted", control, None, name, speedup, f"{said}{times(speedup)} ({conditions}).")
    loop = "transformers’ own loop against ours" if name == ASSISTED else "both with the same forward pass of the target"
    said = f"At {at}, {name} decodes {times(speedup)} as fast as plain autoregressive decoding ({conditions}; {loop})."
    return Verdict("trusted", control, True, name, speedup, said)


def verdicts(tables: dict[str, list[Row]], conditions: str) -> dict[str, Verdict]:
    """By setting."""
    return {setting: verdict(setting, rows, conditions) for setting, rows in tables.items()}


def in_words(setting: str) -> str:
    """ "T=1, top-p=0.9" as "temperature 1, top-p 0.9"."""
    return setting.replace("T=", "temperature ").replace("top-p=", "top-p ")
