"""Tree policies that need no training, by name, each with a verifier that is lossless on its trees.

`gbv`, `salf`, `dynatree` and `dyspec` have the settings of their papers, as far as these print them.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from decoding.actions import Action
from decoding.common.errors import UserError
from decoding.policies.base import TreePolicy
from decoding.policies.beam import Beam
from decoding.policies.delayed import Autoregressive, Delayed, FollowTau
from decoding.policies.dynatree import DynaTree, DynaTreeConfig
from decoding.policies.dyspec import DySpec, DySpecThreshold
from decoding.policies.fixed import Shaped, fixed_shape, sequoia_shape
from decoding.policies.salf import Optimal, Salf


def delayed(k: int = 1, l1: int = 0, l2: int = 4) -> Delayed:
    return Delayed(Action(k, l1, l2))


def gbv(k: int = 3, length: int = 8) -> Delayed:
    """Greedy multi-path block verification's draft: k i.i.d. paths from the root. The paper recommends three, of 8 tokens."""
    return Delayed(Action(k, 0, length))


def follow_tau(k: int = 2, l2: int = 2, l1_max: int = 8) -> FollowTau:
    return FollowTau(k, l2, l1_max)


def fixed(depth: int = 4, branching: int = 2, nodes: int = 16, children: str = "without_replacement") -> Shaped:
    return Shaped(fixed_shape(depth, branching, nodes), children)


def sequoia(rates: tuple[float, ...] = (0.7, 0.12, 0.05, 0.02), nodes: int = 16, depth: int = 8) -> Shaped:
    return Shaped(sequoia_shape(rates, nodes, depth), "without_replacement")


def dynatree(**options: Any) -> DynaTree:
    return DynaTree(DynaTreeConfig(**options))


@dataclass(frozen=True)
class Named:
    """make(**options) builds the policy; verifier: the rule that goes with it; options_of: whose parameters the options are."""

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
    "fixed": Named(fixed, "without_replacement"),
    "sequoia": Named(sequoia, "without_replacement"),
    "beam": Named(Beam, "nss"),
    "optimal": Named(Optimal, "nss"),
    "salf": Named(Salf, "nss"),
    "dynatree": Named(dynatree, "nss", DynaTreeConfig),
    "dyspec": Named(DySpec, "without_replacement"),
    "dyspec_threshold": Named(DySpecThreshold, "without_replacement"),
}


def make_policy(name: str, options: dict[str, Any]) -> TreePolicy:
    """The policy `name` of POLICIES. Raises UserError for an option that it does not have."""
    own = POLICIES[name]
    for option in options:
        if option not in own.options:
            raise UserError(f"options.{option}: policy={name} has no such option; it has {', '.join(own.options) or 'none'}.")
    try:
        return own.make(**{key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})
    except TypeError as error:
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        takes = str(inspect.signature(own.options_of or own.make)).split(" ->")[0]
        raise UserError(f"options: {given} is of another type than policy={name} takes: {takes}.") from error


def default_verifier(name: str, temperature: float) -> str:
    """The rule that goes with policy `name`: at temperature 0 greedy matching, which takes any tree."""
    return "greedy" if temperature == 0 else POLICIES[name].verifier
