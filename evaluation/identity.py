"""What verification rules are called, and which methods are the same: one rule on one tree with one drafter, under any name.

Two rules are the same on a single path where they take the same decisions from the same random numbers, so that with one seed
they write the same text: Naive, NaiveTree and SpecInfer at K = 1 all accept with min(1, p / q) and otherwise draw from the
residual; block verification is Traversal on a path, and so is GBV where there is one branch. Rules that only share their law
there, such as SpecTr and Khisti at K = 1, do other work and are compared.
"""

from typing import NamedTuple

from decoding.actions import Action, canonical

TITLES = {
    "naive": "Naive",
    "bv": "BV",
    "nss": "NSS",
    "naivetree": "NaiveTree",
    "specinfer": "SpecInfer",
    "spectr": "SpecTr",
    "khisti": "Khisti",
    "traversal": "Traversal",
    "gbv": "GBV",
    "across": "Any rule",
}
LM_DRAFT, HEAD = "LM draft", "draft head"
SAME_RULE = {"naive": "naivetree", "bv": "traversal"}  # one function under two names
SAME_ON_PATHS = {"specinfer": "naivetree", "gbv": "traversal"}


class Configuration(NamedTuple):
    """What decides what a static method does under a sampling setting. rule, tree: in normal form, see `configuration`."""

    rule: str
    tree: Action
    drafter: str = LM_DRAFT


def configuration(rule: str, tree: Action, drafter: str = LM_DRAFT) -> Configuration:
    """Equal for equal methods."""
    tree, rule = canonical(tree), SAME_RULE.get(rule, rule)
    return Configuration(SAME_ON_PATHS.get(rule, rule) if tree.k == 1 else rule, tree, drafter)
