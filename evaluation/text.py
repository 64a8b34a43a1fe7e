"""Numbers, names and tables as text: what the pair's and the head's held-out figures are called in
the report, with units.

A figure that has no name here keeps its key, so that none is lost.
"""

from collections.abc import Callable, Iterable, Sequence


def percent(fraction: float) -> str:
    """ "76.1 %"."""
    return f"{100 * fraction:.1f} %"


def count(number: float) -> str:
    """ "2.8 M", "426 k", "12"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.{1 if number < 100 * size else 0}f} {unit}"
    return f"{number:.0f}"


# What a figure is called, and how its value reads. {}: the role or the temperature, of a figure
# that has several values.
FIGURES: dict[str, tuple[str, Callable[..., str]]] = {
    "positions": ("held-out positions", "{:,}".format),
    "target_nats": ("loss of the target", "{:.3f} nats a token".format),
    "draft_nats": ("loss of the draft", "{:.3f} nats a token".format),
    "greedy_agreement": ("positions with the same most likely token", percent),
    "overlap": ("overlap of both distributions, temperature {}", percent),
    "seconds_per_token": (
        "one pass of the {}, one token",
        lambda seconds: f"{1e3 * seconds:.2f} ms",
    ),
    "cost_ratio": ("a target token costs", "{:.1f} draft tokens".format),
    "parameters": ("parameters of the {}", count),
    "trained_in": ("precision of the {}'s training", str),
    "roots": ("held-out positions drafted from", "{:,}".format),
}
BY_TOKEN: dict[str, tuple[str, Callable[..., str]]] = {
    "agreement": ("same most likely token", percent),
    "overlap": ("overlap along the head's own draws", percent),
    "kl": ("divergence (KL), nats", "{:.3f}".format),
}


def pair_rows(figures: dict, before: str = "") -> list[list[str]]:
    """Name and value of every figure, such as those of the pair; those of a domain begin with its
    name.
    """
    rows = []
    for key, value in figures.items():
        name, text = FIGURES.get(key, (key.replace("_", " "), _number))
        if key == "domains":
            rows += [row for domain, own in value.items() for row in pair_rows(own, f"{domain}: ")]
        elif isinstance(value, dict) and key not in FIGURES:
            rows += pair_rows(value, f"{before}{name}, ")
        else:
            values = value if isinstance(value, dict) else {"": value}
            rows += [
                [before + name.format(part.removesuffix(".0")), text(own)]
                for part, own in values.items()
            ]
    return rows


def head_rows(figures: dict) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """Columns and rows of the figures by drafted token, and name and value of the others.

    Token n is at depth n - 1 of `nde_talf.draft_training.evaluate`'s lists.
    """
    by_token = []
    for key, value in figures.items():
        if key in BY_TOKEN:
            name, text = BY_TOKEN[key]
            by_token.append([name, *map(text, value)])
        elif key == "agreement_by_rank":
            for rank, own in enumerate(zip(*value, strict=True), start=1):
                by_token.append(
                    [f"same most likely token, after the beam's no. {rank}", "", *map(percent, own)]
                )
    others = {
        key: value for key, value in figures.items() if key not in (*BY_TOKEN, "agreement_by_rank")
    }
    width = max(map(len, by_token), default=1)
    rows = [row + [""] * (width - len(row)) for row in by_token]
    return ["by drafted token", *map(ordinal, range(1, width))], rows, pair_rows(others)


def stage_rows(seconds: dict[str, float]) -> list[list[str]]:
    """Name and time of every stage."""
    return [
        [name, f"{own:.0f} s" if own >= 10 else f"{own:.1f} s"] for name, own in seconds.items()
    ]


def ordinal(number: int) -> str:
    """ "1st", "2nd", "3rd", "4th"; of small numbers."""
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")


def _number(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_number, value))
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else f"{value:,}"
        if type(value) is int
        else str(value)
    )


def in_words(setting: str) -> str:
    """ "T=1, top-p=0.9" as "temperature 1, top-p 0.9"."""
    return setting.replace("T=", "temperature ").replace("=", " ")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of text in Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
