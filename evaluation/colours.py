"""The line of a method: the same colour and dashes in every plot, whatever other methods there are."""

from evaluation.assisted import is_assisted
from evaluation.identity import TITLES

LEARNED, CHOOSES, OUTSIDE = "#0072b2", "#56b4e9", "#7b8794"  # a draft head; a selector that chooses; code that is not ours
# Of a verification rule, none of them blue or grey. Rules that are one function under two names share a colour.
RULES = {
    "Naive": "#d55e00",
    "NaiveTree": "#d55e00",
    "BV": "#009e73",
    "Traversal": "#009e73",
    "NSS": "#cc79a7",
    "SpecInfer": "#e69f00",
    "SpecTr": "#8b5cf6",
    "Khisti": "#c51b7d",
    "GBV": "#7ad151",
    "Any rule": "#8c6d31",
}
DASHES = {"Naive": "--", "BV": "--"}  # beside the other rule of their colour


def line(method: str) -> dict[str, object]:
    """Colour ("color") and dashes ("ls") of a method by its name, or of a solver by its key in TITLES."""
    title = TITLES.get(method, method)
    rule = max((own for own in RULES if title.startswith(own)), key=len, default="")
    if is_assisted(title):
        return {"color": OUTSIDE, "ls": "-"}
    if "head" in title:
        return {"color": LEARNED, "ls": "-"}
    if title.endswith("(NDE)"):
        return {"color": CHOOSES, "ls": {"Traversal": "-", "SpecInfer": "--"}.get(rule, ":")}
    if "τ" in title:
        dashes: object = (0, (3, 1, 1, 1, 1, 1))
    elif "selector: static" in title:
        dashes = (0, (5, 1, 1, 1))
    elif ", by entropy" in title or ", by domain" in title:
        dashes = ":" if "entropy" in title else "-."
    else:
        dashes = DASHES.get(rule, "-")
    return {"color": RULES.get(rule, OUTSIDE), "ls": dashes if rule else "--"}
