"""Names of what can be chosen: rules, policies and families of models.

A table says which module defines each thing, so that names can be listed without importing torch.
The module itself describes the thing with a decorator:

    @policy("mine", verifier="traversal")
    class Mine(TreePolicy): ...

Importing a module registers names missing from the table.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from nde_talf.decoding.common.errors import UserError

T = TypeVar("T")

# Kinds of tree, by how children come about: none are drafted; one path; a trunk and K paths of one
# length from its end (delayed); any tree of i.i.d. draws; draws without replacement; the most
# probable tokens, picked, not drawn (top_k).
PATHS = frozenset({"none", "path"})
DELAYED = PATHS | {"delayed"}
IID = DELAYED | {"iid"}
DISTINCT = PATHS | {"without_replacement"}
EVERY = IID | DISTINCT | {"top_k"}


FORWARDS = ("auto", "native", "transformers")
"""Whose forward passes a `nde_talf.decoding.models.causal_model.CausalModel` runs."""


class Entry(NamedTuple):
    """A class or function that was decorated, and what else its decorator says."""

    thing: Any
    about: dict[str, Any]


class Registry(Mapping[str, Any]):
    """Things by name; a module is imported when one of its things is looked up.

    Args:
        key: what messages call a name, for example "verifier".
        package: of the modules in `table`.
        table: by name the module that defines the thing.
    """

    def __init__(self, key: str, package: str, table: dict[str, str]):
        self.key, self.package, self.table = key, package, table
        self._entries: dict[str, Entry] = {}

    def add(self, name: str, **about: Any) -> Callable[[T], T]:
        """Return the decorator that registers a class or function as `name`."""

        def decorate(thing: T) -> T:
            self._entries[name] = Entry(thing, about)
            return thing

        return decorate

    def __getitem__(self, name: str) -> Any:
        """The thing called `name`. Raises UserError, with a near match, where there is none."""
        return self.entry(name).thing

    def entry(self, name: str) -> Entry:
        """Look up `name` with what its decorator says; see `__getitem__`."""
        if name not in self._entries and name in self.table:
            import_module(f"{self.package}.{self.table[name]}")
        if name not in self._entries:
            near = difflib.get_close_matches(str(name), list(self), 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UserError(
                f"{self.key}={name}: there is none of that name; choose one of"
                f" {', '.join(self)}.{hint}"
            )
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.table, **self._entries})

    def __contains__(self, name: object) -> bool:
        return name in self.table or name in self._entries

    def __len__(self) -> int:
        return sum(1 for _ in self)


VERIFIERS = Registry(
    "verifier",
    "nde_talf.decoding.rules",
    {
        "nss": "nss",
        "naive": "naive",
        "naivetree": "naive",
        "spectr": "spectr",
        "specinfer": "specinfer",
        "khisti": "khisti",
        "khisti_lp": "khisti",
        "tv": "traversal",
        "bv": "traversal",
        "traversal": "traversal",
        "gbv": "gbv",
        "gbv_exact": "gbv",
        "without_replacement": "specinfer",
        "traversal_without_replacement": "traversal",
        "greedy": "nss",
    },
)
"""Verification rules, each a `nde_talf.decoding.verifier.Verifier`."""

POLICIES = Registry(
    "policy",
    "nde_talf.decoding.policies",
    {
        "autoregressive": "delayed",
        "delayed": "delayed",
        "gbv": "delayed",
        "follow_mean": "stopping",
        "confidence_stop": "stopping",
        "fixed": "fixed",
        "sequoia": "fixed",
        "beam": "beam",
        "optimal": "salf",
        "salf": "salf",
        "dynatree": "dynatree",
        "dyspec": "dyspec",
        "dyspec_threshold": "dyspec",
    },
)
"""Tree policies that need no training."""

FAMILIES = Registry(
    "family",
    "nde_talf.decoding.models.forward",
    dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"), "native"),
)
"""Families of models with a native forward pass, by transformers' `model_type`."""

family = FAMILIES.add


def policy(name: str, verifier: str, options_of: Any = None) -> Callable[[T], T]:
    """Register a tree policy: a class, or a function that makes one from plain options.

    Args:
        name: by which a configuration selects it.
        verifier: the rule that goes with its trees above temperature 0.
        options_of: whose parameters the options are; None: the decorated thing's.
    """
    return POLICIES.add(name, verifier=verifier, options_of=options_of)
