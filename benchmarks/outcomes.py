"""What a campaign's cases came to: the outcomes, what they mean, and the table of counts."""

import sys
from collections import Counter
from collections.abc import Iterator

from benchmarks.forked import TOLD
from benchmarks.timing import report

KINDS = (
    "bad command lines",
    "damaged exports",
    "flipped bits",
    "killed",
    "signals",
    "full disk",
    "short memory",
)
KINDS += ("two processes",)
"""What a table has cases of."""
EQUAL, SILENT, ROUNDED = "resumed and equal", "silent wrong result", "equal but for rounding"
LESS = (
    "told in other words",
    "told, without the word",
    "waits for a thread",
    "killed for want of memory",
)
"""What is refused less well than it should be, and is listed."""
MEANING = {
    TOLD: "one paragraph that names the file or key, no traceback",
    EQUAL: "the same command went on, and its result is the undisturbed run's",
    ROUNDED: (
        "the same, made in smaller batches for want of memory, as was reported: numbers agree to"
        " 1e-5"
    ),
    "harmless, equal result": (
        "what was changed decides nothing: the loaded value is the undamaged one's"
    ),
    "ended by the signal": "killed, as SIGKILL does",
    "interrupted": "one line, status 130 or 143",
    "had ended before": "the stage had ended when the signal came",
    "it was enough": "the stage ended with so much memory or disk",
    "told in other words": "one paragraph, not with the expected words",
    "told, without the word": "one paragraph, which does not say that memory or disk is short",
    "waits for a thread": (
        "in CPython's Thread.start, whose thread found no memory (python/cpython#140746); a signal"
        " ends it"
    ),
    "killed for want of memory": (
        "a native library aborts, or reads at address 0, where an allocation fails"
    ),
}
"""What the outcomes mean.

Any other is wrong: a traceback, a silent wrong result, a hang, something taken as it stands.
"""
KNOWN = (
    (
        "Not seen by any check: a flipped bit in a head of another publisher, or in the records of"
        " an unfinished evaluation, that leaves valid numbers. These files have no checksums, and"
        " no bits were flipped in them. A checkpoint of an older version has no fingerprint of its"
        " inputs, and is taken for this run's if names, shapes and settings agree."
    ),
    (
        "Less well than it should be: at the edge of the memory a native library may end the"
        " process before Python can say so (the C library's `cannot allocate memory for"
        " thread-local data: ABORT`: seen twice with 20 MiB left, and not when the same cases ran"
        " again). CPython's Thread.start may wait for ever there (python/cpython#140746). We take"
        " that for the cause of a stage that waited in a futex in an earlier campaign; it was not"
        " seen again."
    ),
    "Kills of Ray workers have a table of their own, kills_of_workers.md.",
)


def write(cases: list[list[str]], short: bool) -> None:
    """Print the table of counts with what they mean, then every case that ended badly or less well,
    and a message of each part.

    It is written to benchmarks/results unless it is of a short campaign.

    Args:
        cases: part, name, outcome and message of each.
    """
    counts = Counter((part, what) for part, _, what, _ in cases)
    rows = [
        [part, what, count, MEANING.get(what, "**not explained**")]
        for (part, what), count in sorted(counts.items())
    ]
    wrong = [case for case in cases if case[2] not in MEANING]
    missing = [kind for kind in KINDS if kind not in {part for part, _ in counts}]
    notes = [f"Not run yet: {', '.join(missing)}."] if missing else []
    notes += [f"{part}: {name}: **{what}**: {text[-200:]}" for part, name, what, text in wrong]
    notes += (
        ["Refused less well than it should be:"]
        if (less := [case for case in cases if case[2] in LESS])
        else []
    )
    notes += [
        f"- {part}: {name}: {what}: {text.strip(' ╰─╯')[-240:]}" for part, name, what, text in less
    ]
    notes += KNOWN
    notes += [f"For example, {part}, {name}: {text[:240]}" for part, name, text in _examples(cases)]
    rows.append(["in all", "", len(cases), f"not explained: {len(wrong)}"])
    if short:
        print(
            "\n".join(f"{part:20} {what:28} {count}" for part, what, count, _ in rows),
            *notes,
            sep="\n",
        )
    else:
        columns = ["what was done", "what came of it", "cases", "which means"]
        report("campaign", "python -m benchmarks.campaign", columns, rows, notes)
    if wrong:
        sys.exit(f"{len(wrong)} cases ended in a traceback, a wrong result or not at all")


def _examples(cases: list[list[str]]) -> Iterator[tuple[str, str, str]]:
    """The first message of each part."""
    seen = set()
    for part, name, what, text in cases:
        if what == TOLD and part not in seen:
            seen.add(part)
            yield part, name, text
