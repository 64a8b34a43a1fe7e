"""The conclusion that a table of measurements supports: one sentence a setting, and none where the
clock is not trusted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nde_talf.decoding.common.bootstrap import shown, times
from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.loops import is_outside
from nde_talf.evaluation.protocol import BASELINE, CONTROL, NOT_TRUSTED, trusted
from nde_talf.evaluation.speed import speed_ratio
from nde_talf.evaluation.table import Row, control_of
from nde_talf.evaluation.text import in_words

ENOUGH = 30  # blocks; what is measured on fewer is called indicative
DO_NOT = "do not speculate with this pair"


@dataclass
class Verdict:
    """The conclusion that a setting's table supports.

    Attributes:
        clock: "trusted", NOT_TRUSTED, or "no control" in records without one.
        control: the control's ratio.
        speculate: True where all of the best method's interval is above 1, False where every method
            is slower than plain decoding, None where neither is shown.
        best: the method with the highest figure.
        speedup: its figure.
        sentence: the conclusion in words.
        runner_up: the next method.
        behind: the runner-up's tokens/s over the best's, paired by prompt, [ratio, low, high].
        clock_note: the control's reading in words, where it is trusted.
    """

    clock: str
    control: list[float] | None
    speculate: bool | None
    best: str | None
    speedup: list[float] | None
    sentence: str
    runner_up: str | None = None
    behind: list[float] | None = None
    clock_note: str = ""


def verdict(
    setting: str, rows: list[Row], conditions: str, records: Sequence[Record] = ()
) -> Verdict:
    """The verdict on one setting's table. conditions: batch size, dtype and machine, as the
    sentence names them. records: what the table was made of, of other settings too; without them
    the sentence does not mention the runner-up and the number of prompts.
    """
    found = _on_plain_decoding(setting, rows, conditions)
    if found.clock != "trusted":
        return found
    found.clock_note = (
        f"Clock trusted: plain decoding against itself (A/A) reads {times(found.control)}, which"
        " holds 1."
    )
    own = [record for record in records if record.setting == setting]
    methods = [row for row in rows if row.method not in (BASELINE, CONTROL, found.best)]
    if second := max(methods, key=lambda row: row.speedup[0], default=None):
        theirs, best = (
            [r for r in own if r.method == name] for name in (second.method, found.best)
        )
        if behind := speed_ratio(theirs, best):
            found.runner_up, found.behind = second.method, behind
            apart = f"is slower: {shown(behind)}."
            alike = f"is at {shown(behind)} of it: the two cannot be told apart with these prompts."
            found.sentence += (
                f" The runner-up, {second.method}, {apart if behind[2] < 1 else alike}"
            )
    blocks = {record.block for record in own}
    if 0 < len(blocks) < ENOUGH:
        prompts, passes = (len(set(part)) for part in zip(*blocks, strict=True))
        found.sentence += (
            f" {prompts} prompt{'s' * (prompts > 1)}{f' in {passes} passes' * (passes > 1)}:"
            " indicative."
        )
    return found


def _on_plain_decoding(setting: str, rows: list[Row], conditions: str) -> Verdict:
    control, at = control_of(rows), f"At {in_words(setting)}"
    methods = [row for row in rows if row.method not in (BASELINE, CONTROL)]
    faster = [
        row for row in methods if row.speedup[1] > 1
    ]  # measurably; a wide interval may have a larger middle
    best = max(faster or methods, key=lambda row: row.speedup[0], default=None)
    name, speedup = (best.method, best.speedup) if best else (None, None)
    if not trusted(control):
        clock, why = "no control", "these records have no A/A control"
        if control:
            clock, why = (
                NOT_TRUSTED,
                f"plain decoding against itself reads {times(control)}, where 1 is right",
            )
        said = (
            f"{at}: {NOT_TRUSTED}. On this table {why}, so that it supports no claim. Measure once"
            " more on a quiet machine, as a run of its own (stage=evaluate run=NAME"
            " base=THIS_RUN), and report both results."
        )
        return Verdict(clock, control, None, name, speedup, said)
    speculate, figure, plain = None, times(speedup), "plain autoregressive decoding"
    if best is None:
        said = f"{at}: only plain decoding was measured."
    elif best.speedup[0] < 1:
        speculate, closest = False, f"{name} comes closest with {figure} its tokens per second"
        said = f"{at}: {DO_NOT}. Every method is slower than {plain}; {closest} ({conditions})."
    elif best.speedup[1] <= 1:
        said = (
            f"{at}, no method is measurably faster than {plain}: the best, {name}, reaches {figure}"
            f" ({conditions})."
        )
    else:
        speculate, ours = True, "both with the same forward pass of the target"
        loop = "transformers’ own loop against ours" if is_outside(best.method) else ours
        said = f"{at}, {name} decodes {figure} as fast as {plain} ({conditions}; {loop})."
    return Verdict("trusted", control, speculate, name, speedup, said)


def verdicts(
    tables: dict[str, list[Row]], conditions: str, records: Sequence[Record] = ()
) -> dict[str, Verdict]:
    """By setting."""
    return {
        setting: verdict(setting, rows, conditions, records) for setting, rows in tables.items()
    }
