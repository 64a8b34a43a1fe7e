"""Lossless speculative decoding that learns its draft trees: the names that a program needs.

    from nde_talf import CausalModel, LMDrafter, SpeculativeDecoder

A name is imported when it is first used, so that this package costs nothing by itself.
`__init__.pyi` lists the names once, for type checkers and for this module.
"""

import ast
import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Before torch is imported, whose OpenMP reads it once: threads that spin for long while they wait
# slow a small model down tenfold as soon as anything else runs on the machine; threads that do not
# spin at all waste a core. This is GNU OpenMP's count; others ignore it.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

_HOME = {
    name.name: node.module or ""
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom)
    for name in node.names
}

__all__ = sorted(_HOME)

try:
    __version__ = version("nde-talf")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "unknown"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"nde_talf has no {name!r}; it has {', '.join(__all__)}.")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
