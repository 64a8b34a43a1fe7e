"""Tree policies that need no training, by name, each with a verifier that is lossless on its trees.

`gbv`, `salf`, `dynatree` and `dyspec` have the settings of their papers, as far as these print
them.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from inspect import isfunction
from math import isfinite
from typing import Any, get_type_hints

from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed, FollowTau
from nde_talf.decoding.policies.dynatree import DynaTree, DynaTreeConfig
from nde_talf.decoding.policies.dyspec import DySpec, DySpecThreshold
from nde_talf.decoding.policies.fixed import Shaped, fixed_shape, sequoia_shape
from nde_talf.decoding.policies.salf import Optimal, Salf
from nde_talf.decoding.policies.stopping import ConfidenceStop, FollowMean


def delayed(k: int = 1, l1: int = 0, l2: int = 4) -> Delayed:
    return Delayed(Action(k, l1, l2))


def gbv(k: int = 3, length: int = 8) -> Delayed:
    """Greedy multi-path block verification's draft: k i.i.d. paths from the root.

    The paper recommends three, of 8 tokens.
    """
    return Delayed(Action(k, 0, length))


def follow_tau(k: int = 2, l2: int = 2, l1_max: int = 8) -> FollowTau:
    return FollowTau(k, l2, l1_max)


def fixed(
    depth: int = 4, branching: int = 2, nodes: int = 16, children: str = "without_replacement"
) -> Shaped:
    return Shaped(fixed_shape(depth, branching, nodes), children)


def sequoia(
    rates: tuple[float, ...] = (0.7, 0.12, 0.05, 0.02), nodes: int = 16, depth: int = 8
) -> Shaped:
    return Shaped(sequoia_shape(rates, nodes, depth), "without_replacement")


def dynatree(**options: Any) -> DynaTree:
    return DynaTree(DynaTreeConfig(**options))


@dataclass(frozen=True)
class Named:
    """make(**options) builds the policy; verifier: the rule that goes with it; options_of: whose
    parameters the options are.
    """

    make: Callable[..., TreePolicy]
    verifier: str
    options_of: Callable[..., Any] | None = None

    @property
    def options(self) -> list[str]:
        return list(inspect.signature(self.options_of or self.make).parameters)


POLICIES = {
    "autoregressive": Named(Autoregressive, "naive"),
    "delayed": Named(delayed, "traversal"),
    "gbv": Named(gbv, "gbv_exact"),
    "follow_tau": Named(follow_tau, "traversal"),
    "follow_mean": Named(FollowMean, "traversal"),
    "confidence_stop": Named(ConfidenceStop, "traversal"),
    "fixed": Named(fixed, "without_replacement"),
    "sequoia": Named(sequoia, "without_replacement"),
    "beam": Named(Beam, "nss"),
    "optimal": Named(Optimal, "nss"),
    "salf": Named(Salf, "nss"),
    "dynatree": Named(dynatree, "nss", DynaTreeConfig),
    "dyspec": Named(DySpec, "without_replacement"),
    "dyspec_threshold": Named(DySpecThreshold, "without_replacement"),
}


TYPES: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,), str: (str,)}
"""The types that a value may have, by an option's annotation; others are checked by the policy."""


LARGEST = 10_000
"""Largest number that an option of a policy may have."""


def make_policy(name: str, options: dict[str, Any]) -> TreePolicy:
    """The policy `name` of POLICIES.

    Raises UserError for an option that it does not have, or a value of another type.
    """
    own = POLICIES[name]
    made_of = own.options_of or own.make
    annotations = get_type_hints(
        made_of if is_dataclass(made_of) or isfunction(made_of) else made_of.__init__
    )

    def of_another_type(given: dict[str, Any]) -> UserError:
        said = ", ".join(f"{key}={value}" for key, value in given.items())
        takes = str(inspect.signature(made_of)).split(" ->")[0]
        return UserError(f"options: {said} is of another type than policy={name} takes: {takes}.")

    for option, value in options.items():
        if option not in own.options:
            raise UserError(
                f"options.{option}: policy={name} has no such option; it has"
                f" {', '.join(own.options) or 'none'}."
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
        return own.make(
            **{
                key: tuple(value) if isinstance(value, list) else value
                for key, value in options.items()
            }
        )
    except TypeError as error:
        raise of_another_type(options) from error


def default_verifier(name: str, temperature: float) -> str:
    """The rule that goes with policy `name`: at temperature 0 greedy matching, which takes any
    tree.
    """
    return "greedy" if temperature == 0 else POLICIES[name].verifier
