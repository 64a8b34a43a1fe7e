"""Make tree policies that need no training from options as a configuration holds them."""

import inspect
from dataclasses import is_dataclass
from inspect import isfunction
from math import isfinite
from typing import Any, get_type_hints

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.registry import POLICIES

TYPES: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,), str: (str,)}
"""The types that a value may have, by an option's annotation; others are checked by the policy."""


LARGEST = 10_000
"""Largest number that an option of a policy may have."""


def make_policy(name: str, options: dict[str, Any]) -> TreePolicy:
    """Make the policy `name` of POLICIES.

    Raises UserError for an option that it does not have, or a value of another type.
    """
    made_of = POLICIES.entry(name).about["options_of"] or POLICIES[name]
    known = list(inspect.signature(made_of).parameters)
    annotations = get_type_hints(
        made_of if is_dataclass(made_of) or isfunction(made_of) else made_of.__init__
    )

    def of_another_type(given: dict[str, Any]) -> UserError:
        listed = ", ".join(f"{key}={value}" for key, value in given.items())
        takes = str(inspect.signature(made_of)).split(" ->")[0]
        return UserError(f"options: {listed} is of another type than policy={name} takes: {takes}.")

    for option, value in options.items():
        if option not in known:
            raise UserError(
                f"options.{option}: policy={name} has no such option; it has"
                f" {', '.join(known) or 'none'}."
            )
        types = TYPES.get(annotations.get(option))
        if types and (
            type(value) not in types or (isinstance(value, float) and not isfinite(value))
        ):
            raise of_another_type({option: value})
        if isinstance(value, (int, float)) and abs(value) > LARGEST:
            raise UserError(
                f"options.{option}={value}: it must be at most {LARGEST}; a tree is drafted at"
                " every step."
            )
    try:
        return POLICIES[name](
            **{
                key: tuple(value) if isinstance(value, list) else value
                for key, value in options.items()
            }
        )
    except TypeError as error:
        raise of_another_type(options) from error


def default_verifier(name: str, temperature: float) -> str:
    """Name the rule that goes with policy `name`.

    At temperature 0 it is greedy matching, which takes any tree.
    """
    return "greedy" if temperature == 0 else POLICIES.entry(name).about["verifier"]
