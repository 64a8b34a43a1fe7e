"""Names of what can be chosen: rules, policies, losses, families of models and of heads.

A table says where each thing is defined, so that names can be listed without importing torch. The
module itself describes the thing with a decorator:

    @rule("mine", trees=IID, title="My rule")
    class Mine(Rule): ...

A thing that stands in no table is known once its module has been imported.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
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


class Listed(NamedTuple):
    """A line of a table: `at`, where the thing is defined ("module:attribute"), and its title."""

    at: str
    title: str


@dataclass(frozen=True)
class Entry:
    """A registered thing.

    Attributes:
        name: how configurations call it.
        title: how tables and plots call it.
        thing: the class or function that was decorated.
        about: what else its decorator says.
    """

    name: str
    title: str
    thing: Any
    about: dict[str, Any] = field(default_factory=dict)


class Registry(Mapping[str, Any]):
    """Things by name; a module is imported when one of its things is looked up.

    Args:
        key: what messages call a name, for example "verifier".
        table: what can be looked up before anything was imported.
    """

    def __init__(self, key: str, table: dict[str, Listed]):
        self.key, self.table = key, table
        self._entries: dict[str, Entry] = {}

    def add(self, name: str, title: str = "", **about: Any) -> Callable[[T], T]:
        """Return the decorator that registers a class or function as `name`.

        title: needed only where the table has no line for `name`.
        """

        def decorate(thing: T) -> T:
            listed = self.table.get(name)
            self._entries[name] = Entry(name, listed.title if listed else title, thing, about)
            return thing

        return decorate

    def title(self, name: str) -> str:
        """The title of `name`, without importing its module."""
        listed = self.table.get(name)
        return listed.title if listed else self.entry(name).title

    def __getitem__(self, name: str) -> Any:
        """The thing called `name`. Raises UserError, with a near match, where there is none."""
        return self.entry(name).thing

    def entry(self, name: str) -> Entry:
        """Look up `name` with its title and what its decorator says; see `__getitem__`."""
        if name not in self._entries and name in self.table:
            import_module(self.table[name].at.partition(":")[0])
        if name not in self._entries:
            near = difflib.get_close_matches(str(name), list(self), 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UserError(
                f"{self.key}={name}: there is none of that name; choose one of"
                f" {', '.join(self)}.{hint}"
            )
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self.table or name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter({**self.table, **self._entries})

    def __len__(self) -> int:
        return len({**self.table, **self._entries})


def _table(module: str, **lines: tuple[str, str]) -> dict[str, Listed]:
    """Lines of things in `module`, from (attribute, title)."""
    return {
        name: Listed(f"nde_talf.{module}:{attribute}", title)
        for name, (attribute, title) in lines.items()
    }


VERIFIERS = Registry(
    "verifier",
    {
        **_table("decoding.rules.nss", nss=("NSS", "NSS")),
        **_table(
            "decoding.rules.naive", naive=("Naive", "Naive"), naivetree=("Naive", "NaiveTree")
        ),
        **_table("decoding.rules.spectr", spectr=("SpecTr", "SpecTr")),
        **_table("decoding.rules.specinfer", specinfer=("SpecInfer", "SpecInfer")),
        **_table(
            "decoding.rules.khisti",
            khisti=("Khisti", "Khisti"),
            khisti_lp=("KhistiProgram", "Khisti LP"),
        ),
        **_table(
            "decoding.rules.traversal",
            tv=("traversal", "Tree verification"),
            bv=("traversal", "BV"),
            traversal=("traversal", "Traversal"),
        ),
        **_table("decoding.rules.gbv", gbv=("gbv", "GBV"), gbv_exact=("gbv", "GBV, exact")),
        **_table(
            "decoding.rules.specinfer",
            without_replacement=("SpecInfer", "SpecInfer, no replacement"),
        ),
        **_table(
            "decoding.rules.traversal",
            traversal_without_replacement=("traversal", "Traversal, no replacement"),
        ),
        **_table("decoding.rules.nss", greedy=("Greedy", "Greedy")),
    },
)
"""Verification rules, each a `nde_talf.decoding.verifier.Verifier`."""

POLICIES = Registry(
    "policy",
    {
        **_table(
            "decoding.policies.delayed",
            autoregressive=("Autoregressive", "No draft"),
            delayed=("delayed", "Delayed tree"),
            gbv=("gbv", "Paths from the root"),
            follow_tau=("follow_tau", "Delayed, following tau"),
        ),
        **_table(
            "decoding.policies.stopping",
            follow_mean=("FollowMean", "Path, following the mean"),
            confidence_stop=("ConfidenceStop", "Path, stopped by confidence"),
        ),
        **_table(
            "decoding.policies.fixed",
            fixed=("fixed", "Fixed tree"),
            sequoia=("sequoia", "Sequoia"),
        ),
        **_table("decoding.policies.beam", beam=("Beam", "Beam (EAGLE-2)")),
        **_table(
            "decoding.policies.salf",
            optimal=("Optimal", "Optimal (SpecExec)"),
            salf=("Salf", "SALF"),
        ),
        **_table("decoding.policies.dynatree", dynatree=("dynatree", "DynaTree")),
        **_table(
            "decoding.policies.dyspec",
            dyspec=("DySpec", "DySpec"),
            dyspec_threshold=("DySpecThreshold", "DySpec, threshold"),
        ),
    },
)
"""Tree policies that need no training."""

LOSSES = Registry(
    "draft.loss",
    _table(
        "draft_training.losses",
        talf=("talf_loss", "TALF"),
        hass=("hass_loss", "HASS"),
        eagle=("eagle_loss", "EAGLE"),
    ),
)
"""Losses of draft heads."""

FAMILIES = Registry(
    "family",
    _table(
        "decoding.forward.native",
        llama=("NativeForward", "Llama"),
        mistral=("NativeForward", "Mistral"),
        qwen2=("NativeForward", "Qwen 2"),
        qwen3=("NativeForward", "Qwen 3"),
        gemma2=("Gemma2Forward", "Gemma 2"),
        gemma3_text=("Gemma3Forward", "Gemma 3"),
    ),
)
"""Families of models with a native forward pass, by transformers' `model_type`."""

HEADS = Registry(
    "draft.layer",
    _table(
        "draft_training.families",
        llama=("LLAMA", "Llama"),
        qwen2=("QWEN2", "Qwen 2"),
        qwen3=("QWEN3", "Qwen 3"),
        gemma2=("GEMMA2", "Gemma 2"),
        gemma3_text=("GEMMA3", "Gemma 3"),
    ),
)
"""Families of a draft head's decoder layer."""


def rule(
    name: str,
    trees: Iterable[str],
    title: str = "",
    on_device: Callable[..., Any] | None = None,
    labels: Any = None,
    **options: Any,
) -> Callable[[T], T]:
    """Register a verification rule: a `Rule` class, or a function of (tree, rng).

    Args:
        name: by which a configuration selects it.
        title: one line for listings.
        trees: kinds of tree on which it is lossless and meant to be used: PATHS, DELAYED, IID,
            DISTINCT or EVERY.
        on_device: the function for trees on a device; a `Rule` class needs none.
        labels: what estimates E[tau + 1] of every tree for it: True for a `Rule` class, which says
            so itself, a function (levels, start) for others; None: it has no labels.
        options: arguments of the class, or of both functions.
    """

    def decorate(thing: T) -> T:
        from nde_talf.decoding.verifier import Verifier

        made: Any = thing
        if isinstance(thing, type):
            verifier = Verifier.of_rule(name, made(**options), frozenset(trees), labels)
        else:
            function = partial(made, **options) if options else made
            device = partial(on_device, **options) if on_device and options else on_device
            verifier = Verifier(name, function, frozenset(trees), device, labels)
        VERIFIERS.add(name, title)(verifier)
        return thing

    return decorate


def policy(name: str, verifier: str, title: str = "", options_of: Any = None) -> Callable[[T], T]:
    """Register a tree policy: a class, or a function that makes one from plain options.

    Args:
        name: by which a configuration selects it.
        title: one line for listings.
        verifier: the rule that goes with its trees above temperature 0.
        options_of: whose parameters the options are; None: those of what is decorated.
    """
    return POLICIES.add(name, title, verifier=verifier, options_of=options_of)


def loss(name: str, title: str = "", **about: Any) -> Callable[[T], T]:
    """Register a loss of draft heads."""
    return LOSSES.add(name, title, **about)


def family(name: str, title: str = "", **about: Any) -> Callable[[T], T]:
    """Register the native forward pass of a family of models, by transformers' `model_type`."""
    return FAMILIES.add(name, title, **about)


def head_layer(name: str, title: str = "", **about: Any) -> Callable[[T], T]:
    """Register the decoder layer of draft heads for targets of one family."""
    return HEADS.add(name, title, **about)
