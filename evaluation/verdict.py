"""The conclusion that a table supports: a sentence per setting, if the clock is trusted."""

from collections.abc import Sequence
from dataclasses import dataclass

from nde_talf.decoding.common.bootstrap import shown, times
from nde_talf.evaluation.benchmark import Record
from nde_talf.evaluation.protocol import BASELINE, CONTROL, NOT_TRUSTED, trusted
from nde_talf.evaluation.speed import speed_ratio
from nde_talf.evaluation.table import Row, by_setting, control_of

ENOUGH = 30  # with fewer prompts a measurement is called indicative
DO_NOT = "do not speculate with this pair"


@dataclass
class Verdict:
    """The conclusion that a setting's table supports.

    Attributes:
        clock: "trusted", NOT_TRUSTED, or "no control" in records without one.
        control: the control's ratio.
        speculate: True if the best method's interval is above 1, False if every method is slower
            than plain decoding, None if neither is shown.
        best: the method with the highest figure.
        speedup: its figure.
        sentence: the conclusion in words.
    """

    clock: str
    control: list[float] | None
    speculate: bool | None
    best: str | None
    speedup: list[float] | None
    sentence: str


def in_words(setting: str) -> str:
    """Write out a setting: "temperature 1, top-p 0.9" of "T=1, top-p=0.9"."""
    return setting.replace("T=", "temperature ").replace("=", " ")


def verdict(
    setting: str, rows: list[Row], conditions: str, records: Sequence[Record] = ()
) -> Verdict:
    """Return the verdict on one setting's table.

    Args:
        setting: as in records.
        rows: its table.
        conditions: batch size, dtype and machine, in words.
        records: behind the table, also of other settings; without them the sentence mentions no
            runner-up and no number of prompts.
    """
    control = control_of(rows)
    methods = [row for row in rows if row.method not in (BASELINE, CONTROL)]
    methods.sort(key=lambda row: -row.speedup[0])
    faster = [row for row in methods if row.speedup[1] > 1]  # a wide interval may be higher up
    best = next(iter(faster or methods), None)
    name, speedup = (best.method, best.speedup) if best else (None, None)
    if not trusted(control, speedup):
        clock = NOT_TRUSTED if control else "no control"
        return Verdict(clock, control, None, name, speedup, _no_claim(setting, control))
    speculate, sentence = _on_plain_decoding(setting, best, methods, conditions)
    decoded = by_setting(records).get(setting, {})
    if best and decoded:
        sentence += _runner_up(control, best, methods, decoded)
    sentence += _few_prompts({record.prompt for own in decoded.values() for record in own})
    return Verdict("trusted", control, speculate, name, speedup, sentence)


def _runner_up(
    control: list[float] | None, best: Row, methods: list[Row], decoded: dict[str, list[Record]]
) -> str:
    """Compare the next method with the best, paired by prompt; "" where the clock cannot."""
    second = next((row.method for row in methods if row is not best), "")
    behind = speed_ratio(decoded[second], decoded[best.method]) if second else None
    if not behind or not trusted(control, behind):
        return ""
    words = f"is slower: {shown(behind)} of that."
    if behind[2] >= 1:
        words = f"is at {shown(behind)} of it: the two cannot be told apart with these prompts."
    return f" The runner-up, {second}, {words}"


def _few_prompts(prompts: set[str]) -> str:
    """Return a sentence about few prompts, which the intervals resample; "" for enough."""
    if not 0 < (count := len(prompts)) < ENOUGH:
        return ""
    return f" {count} prompt{'s' * (count > 1)}: indicative."


def _no_claim(setting: str, control: list[float] | None) -> str:
    why = "no A/A control was timed: there is none, or its texts end with their first token"
    if control:
        figure = shown(control, 3, "×")
        why = f"plain decoding against itself is {figure}, where the interval should hold 1 and"
        why += " be within 0.9 to 1.1"
    return (
        f"At {in_words(setting)}: {NOT_TRUSTED}. On this table {why}, so that it supports no claim."
        " Measure once more on a quiet machine, as a run of its own (stage=evaluate run=NAME"
        " base=THIS_RUN force=true), and report both results."
    )


def _on_plain_decoding(
    setting: str, best: Row | None, methods: list[Row], conditions: str
) -> tuple[bool | None, str]:
    """Decide whether speculation pays, and write the sentence."""
    at, plain = f"At {in_words(setting)}", "plain autoregressive decoding"
    if best is None:
        return None, f"{at}: only plain decoding was measured."
    name, figure = best.method, times(best.speedup)
    if all(row.speedup[2] < 1 for row in methods):
        return False, (
            f"{at}: {DO_NOT}. Every method is slower than {plain}; {name} comes closest with"
            f" {figure} its tokens per second ({conditions})."
        )
    if best.speedup[1] <= 1:
        return None, (
            f"{at}, no method is measurably faster than {plain}: the best, {name}, reaches {figure}"
            f" ({conditions})."
        )
    loop = "both with the same forward pass of the target"
    if best.outside:
        loop = "transformers’ own loop against ours"
    return True, f"{at}, {name} decodes {figure} as fast as {plain} ({conditions}; {loop})."
