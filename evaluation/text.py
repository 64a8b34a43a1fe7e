"""Numbers, names and tables as text: what the pair's and the head's held-out figures are called in the report, with units.

A figure that has no name here keeps its key, so that none is lost.
"""

from collections.abc import Iterable, Iterator, Sequence

from decoding.common.bootstrap import shown

ORDINALS = ("1st", "2nd", "3rd")
NAMES = {
    "positions": "held-out positions",
    "greedy_agreement": "positions with the same most likely token",
    "cost_ratio": "a target token costs",
    "precision of training": "precision of training",
    "roots": "held-out positions drafted from",
}


def pair_rows(figures: dict) -> list[list[str]]:
    """Name and value of every figure of the pair; those of a domain begin with its name."""
    rows = []
    for key, value in figures.items():
        if key == "domains":
            rows += [[f"{domain}: {name}", cell] for domain, own in value.items() for name, cell in pair_rows(own)]
        elif key in ("target_nats", "draft_nats"):
            rows.append([f"loss of the {key.removesuffix('_nats')}", f"{value:.3f} nats a token"])
        elif key == "overlap":
            rows += [[f"overlap of both distributions, temperature {float(t):g}", percent(own)] for t, own in value.items()]
        elif key == "seconds_per_token":
            rows += [[f"one pass of the {role}, one token", f"{1e3 * own:.2f} ms"] for role, own in value.items()]
        elif key == "parameters":
            rows += [[f"parameters of the {role}", count(own)] for role, own in value.items()]
        elif key == "trained_in":
            rows += [[f"precision of the {role}'s training", str(own)] for role, own in value.items()]
        else:
            rows += [list(row) for row in flat({key: value})]
    return rows


def head_rows(figures: dict) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """Columns and rows of the figures by drafted token, and name and value of the others. Token n is at depth n - 1 of
    `draft_training.evaluate`'s lists."""
    by_token, others = [], []
    for key, value in figures.items():
        if key in ("agreement", "overlap"):
            name = "same most likely token" if key == "agreement" else "overlap along the head's own draws"
            by_token.append([name, *map(percent, value)])
        elif key == "kl":
            by_token.append(["divergence (KL), nats", *(f"{own:.3f}" for own in value)])
        elif key == "agreement_by_rank":
            for rank, own in enumerate(zip(*value, strict=True), start=1):
                by_token.append([f"same most likely token, after the beam's no. {rank}", "", *map(percent, own)])
        else:
            others += [list(row) for row in flat({key: value})]
    width = max(map(len, by_token), default=1)
    rows = [row + [""] * (width - len(row)) for row in by_token]
    return ["by drafted token", *map(ordinal, range(1, width))], rows, others


def stage_rows(seconds: dict[str, float]) -> list[list[str]]:
    """Name and time of every stage."""
    return [[name, f"{own:.0f} s" if own >= 10 else f"{own:.1f} s"] for name, own in seconds.items()]


def ordinal(number: int) -> str:
    """ "1st", "2nd", "3rd", "4th"; of small numbers."""
    return ORDINALS[number - 1] if number <= len(ORDINALS) else f"{number}th"


def percent(fraction: float) -> str:
    """ "76.1 %"."""
    return f"{100 * fraction:.1f} %"


def count(number: float) -> str:
    """ "2.8 M", "426 k", "12"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.{1 if number < 100 * size else 0}f} {unit}"
    return f"{number:.0f}"


def flat(numbers: dict, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested numbers as (name, text)."""
    for key, value in numbers.items():
        name = prefix + NAMES.get(key, key.replace("_", " "))
        if isinstance(value, dict):
            yield from flat(value, f"{name}, ")
        else:
            yield name, ", ".join(map(_number, value)) if isinstance(value, list) else _number(value, key)


def _number(value: object, key: str = "") -> str:
    if key == "greedy_agreement":
        return percent(value)
    if key == "cost_ratio":
        return f"{value:.1f} draft tokens"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def in_words(setting: str) -> str:
    """ "T=1, top-p=0.9" as "temperature 1, top-p 0.9"."""
    return setting.replace("T=", "temperature ").replace("top-p=", "top-p ")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of text in Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def ablation_table(ablations: dict[str, dict]) -> str:
    """Markdown: held-out tokens/s against the best static actions under every latency table, and the worst 5 % of the roots, by
    variant of `selector.ablation`."""
    rows = []
    for name, result in ablations.items():
        tables = result["tables"]
        worst = sum(own["worst_5_percent"] for own in tables.values()) / len(tables)
        speeds = (shown(own["selector"], 3) for own in tables.values())
        rows.append([name, str(result["training_roots"]), *speeds, f"{worst:.3f}"])
    return markdown(["variant", "training roots", *tables, "worst 5 % of roots"], rows) + "\n"
