"""Lossless speculative decoding that learns its draft trees: the names that a program needs.

    from nde_talf import CausalModel, LMDrafter, SpeculativeDecoder

A name is imported when it is first used, so that this package costs nothing by itself.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_HOMES = {
    "decoding.actions": ("Action",),
    "decoding.drafter": ("Drafter", "LMDrafter"),
    "decoding.common.errors": ("UserError",),
    "decoding.loop": ("Block", "SpeculativeDecoder", "Stream"),
    "decoding.model": ("CausalModel",),
    "decoding.policies.base": ("DecodingState", "TreePolicy"),
    "decoding.policies.beam": ("Beam",),
    "decoding.policies.delayed": ("Autoregressive", "Delayed", "FollowTau"),
    "decoding.policies.dynatree": ("DynaTree",),
    "decoding.policies.dyspec": ("DySpec", "DySpecThreshold"),
    "decoding.policies.salf": ("Optimal", "Salf"),
    "decoding.policies.fixed": ("Shaped", "fixed_shape", "sequoia_shape"),
    "decoding.sampling": ("Rng", "warp"),
    "decoding.setting": ("SamplingSetting",),
    "decoding.static": ("StaticShapes",),
    "decoding.stats": ("Generation", "Step"),
    "decoding.tree": ("DraftTree",),
    "decoding.verification": ("VERIFIERS", "Verifier", "verifier"),
    "draft_training.head_drafter": ("EagleDrafter",),
    "selector.latency": ("LatencyTable",),
    "selector.policy": ("NeuralPolicy",),
    "selector.selector": ("Selector",),
}
_HOME = {name: (home, name) for home, names in _HOMES.items() for name in names} | {"Coins": ("decoding.sampling", "Coins")}

__all__ = sorted(_HOME)

try:
    __version__ = version("nde-talf")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "unknown"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"nde_talf has no {name!r}; it has {', '.join(__all__)}.")
    home, own = _HOME[name]
    value = globals()[name] = getattr(import_module(home), own)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
