"""Calls of the public API that work, and values with which they cannot.

A case replaces arguments of one call by JSON values; a text such as "$nan" stands for a value.
"""

import math
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nde_talf
from nde_talf.decoding.policies.delayed import delayed

Call = tuple[Callable[..., object], dict[str, Any]]


@cache
def prepared(run: Path) -> tuple[dict[str, Any], dict[str, Call]]:
    """Values by name, and calls that work, on the models of a finished run."""
    pair = run / "pair"
    target = nde_talf.CausalModel.load(pair / "target")
    drafter = nde_talf.LMDrafter(nde_talf.CausalModel.load(pair / "draft"))
    decoder = nde_talf.SpeculativeDecoder(target, drafter, delayed(), "traversal")
    selector = nde_talf.Selector.from_pretrained(run / "selector/export/traversal")
    values = {
        "nan": math.nan,
        "inf": math.inf,
        "model": target,
        "module": target.module,
        "selector": selector,
        "drafter": drafter,
        "policy": delayed(),
        "setting": nde_talf.SamplingSetting(0.6),
        "generator": torch.Generator(),
        "floats": torch.tensor([1.0, 2.0]),
        "batch": torch.ones(2, 3, dtype=torch.long),
        "array": np.array([0.5]),
        "empty": torch.empty(0, dtype=torch.long),
        "object": object(),
        "config": run / "pair/target/config.json",
        "ngram": nde_talf.NgramDrafter(target.vocab_size + 1),
        "class": nde_talf.Salf,
        "run": run,
    }
    sampled = {
        "prompt": [1, 2, 3],
        "max_new_tokens": 4,
        "setting": values["setting"],
        "rng": nde_talf.Rng.seeded(0),
    }
    ids = torch.tensor([[1, 2, 3]])
    selected, drafted = run / "selector/export/traversal", {"target": target, "drafter": drafter}
    named: dict[str, dict[str, Any]] = {
        **{name: {} for name in ("Salf", "Beam", "DySpec", "DynaTree", "NgramConfig")},
        "SpeculativeDecoder": drafted | {"policy": delayed(), "verifier": "traversal"},
        "LMDrafter": {"model": drafter.model},
        "CausalModel": {"model": target.module},
        "CausalModel.load": {"folder": pair / "target"},
        "SamplingSetting": {"temperature": 0.6},
        "warp": {"logits": torch.zeros(8), "setting": values["setting"]},
        "Rng": {"generator": torch.Generator()},
        "Rng.seeded": {"seed": 0},
        "Delayed": {"action": nde_talf.Action(1, 0, 4)},
        "NgramDrafter": {"vocab_size": 300},
        "StaticShapes": {"context": 64},
        "Selector.from_pretrained": {"folder": selected},
        "LatencyTable.load": {"path": run / "latency/table.json"},
        "NeuralPolicy": {"selector": selector},
        "EagleDrafter.from_pretrained": {"folder": run / "draft/export", "target": target},
        "verifier": {"name": "nss"},
    }
    calls: dict[str, Call] = {name: (attrgetter(name)(nde_talf), named[name]) for name in named}
    calls |= {
        "generate": (decoder.generate, sampled),
        "blocks": (decoder.blocks, sampled),
        "stream": (
            lambda **named: next(decoder.stream(**named)),
            {key: sampled[key] for key in ("prompt", "setting", "rng")},
        ),
        "speculate": (
            lambda **named: target.module.generate(
                ids, custom_generate=nde_talf.speculate(**named), max_new_tokens=2
            ),
            {"draft": str(pair / "draft")},
        ),
    }
    return values, calls


def call(name: str, given: dict[str, Any], run: Path) -> object:
    """Make the call `name` with some arguments replaced."""
    values, calls = prepared(run)
    function, arguments = calls[name]
    replaced = {
        key: values[value[1:]] if isinstance(value, str) and value.startswith("$") else value
        for key, value in given.items()
    }
    return function(**arguments | replaced)
