"""Make tree policies that need no training from options as a configuration holds them."""

import inspect
from typing import Any, get_type_hints

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.json_validation import typed
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.registry import POLICIES

LARGEST = 10_000
"""Largest number that an option of a policy may have."""


def make_policy(name: str, options: dict[str, Any]) -> TreePolicy:
    """Make the policy `name` of POLICIES.

    Raises UserError for an option that it does not have, or a value of another type.
    """
    made_of = POLICIES.entry(name).about["options_of"] or POLICIES[name]
    known = inspect.signature(made_of).parameters
    hints = get_type_hints(made_of.__init__ if inspect.isclass(made_of) else made_of)
    values = {}
    for option, value in options.items():
        if option not in known:
            raise UserError(
                f"options.{option}: policy={name} has no such option; it has"
                f" {', '.join(known) or 'none'}."
            )
        try:
            values[option] = typed(value, hints.get(option, Any))
        except ValueError as error:
            raise UserError(
                f"options.{option}={value}: {str(error).removeprefix('it: ')}."
            ) from error
        if isinstance(value, (int, float)) and abs(value) > LARGEST:
            raise UserError(
                f"options.{option}={value}: it must be at most {LARGEST}; a tree is drafted at"
                " every step."
            )
    return POLICIES[name](**values)


def default_verifier(name: str, temperature: float) -> str:
    """Name the rule that goes with policy `name`.

    At temperature 0 it is greedy matching, which takes any tree.
    """
    return "greedy" if temperature == 0 else POLICIES.entry(name).about["verifier"]
