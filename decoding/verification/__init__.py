"""Lossless verification of draft trees: pure functions of (tree, coins), by name, and which trees each takes."""

from collections.abc import Callable

from decoding.errors import UserError
from decoding.sampling import Coins
from decoding.tree import DraftTree, Verdict
from decoding.verification.naive import naivetree
from decoding.verification.specinfer import specinfer
from decoding.verification.traversal import traversal

Verifier = Callable[[DraftTree, Coins], Verdict]

VERIFIERS: dict[str, Verifier] = {
    "naive": naivetree,
    "bv": traversal,
    "specinfer": specinfer,
    "naivetree": naivetree,
    "traversal": traversal,
}
_SINGLE_PATH = {"naive", "bv"}
_TREES = {"none", "path", "iid"}


def verifier(name: str) -> Verifier:
    """The verifier called `name`. Raises UserError for an unknown one."""
    if name not in VERIFIERS:
        raise UserError(f"verifier={name}: there is none of that name; choose one of {', '.join(VERIFIERS)}.")
    return VERIFIERS[name]


def check_compatible(trees: str, name: str) -> None:
    """Raise UserError unless verifier `name` is lossless (and meant) for a policy's kind of `trees`.

    Trees of i.i.d. draws: every rule. A single path: Naive and block verification too, which know no branches.
    """
    verifier(name)
    if trees not in _TREES:
        raise UserError(f"policy draws {trees} trees, which no verifier here takes; known are {', '.join(_TREES)}.")
    if name in _SINGLE_PATH and trees == "iid":
        multi = {"naive": "naivetree", "bv": "traversal"}[name]
        raise UserError(
            f"verifier={name} verifies a single path, but the policy drafts branching trees: use {multi} instead, or "
            "an action with K = 1."
        )
