"""Every entry of transformers' registry of causal language models, tiny and with random weights.

Its greedy text through trees is that of plain passes, or it is refused in words.
`python -m tests.decoding.test_causal_registry [NAME ...]` lists them.
"""

import json
import sys
from collections import Counter
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nde_talf import (
    Action,
    CausalModel,
    Delayed,
    LMDrafter,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
    UserError,
)
from nde_talf.decoding.common.errors import first_line
from nde_talf.decoding.common.progress import track
from nde_talf.decoding.models.loading import architecture

SMALL = json.loads(Path(__file__).with_name("small_sizes.json").read_text())
"""Sizes by key, for all families; and what a family needs besides (null: not that key)."""
SAMPLE = ("arcee", "bamba", "bart", "deepseek_v3", "falcon_mamba", "granitemoehybrid", "helium")
SAMPLE += ("kimi_linear", "mpt", "qwen3_5_text", "nanochat", "zaya")
EQUAL, NOT_BUILT = 95, 30
PROMPT = list(range(1, 21))


def tiny(model_type):
    """A small configuration, with a layer of each kind that the default one has."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**_changes(kind(), model_type))


def _changes(default, model_type):
    changes = {name: size for name, size in SMALL["sizes"].items() if _is_set(default, name)}
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if len(kinds) > 1 and _is_set(default, "layer_types"):
        changes |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    for name in type(default).sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            changes[name] = _changes(part, part.model_type)
    changes |= SMALL["families"].get(model_type, {})
    return {name: size for name, size in changes.items() if size is not None}


def _is_set(config, name):
    held = getattr(type(config), config.attribute_map.get(name, name), None)
    if isinstance(held, property) and held.fset is None:
        return False
    try:
        return getattr(config, name, None) is not None
    except AttributeError:
        raise
    except Exception:  # transformers refuses keys that differ from layer to layer
        return False


def outcome(name):
    """Return equal, different, refused or not built, and the form or the reason."""
    try:
        config = tiny(name)
        torch.manual_seed(3)
        auto, attention = architecture(config)
        module = auto.from_config(config, attn_implementation=attention)
    except Exception as error:  # transformers raises whatever a configuration leads to
        return "not built", f"{type(error).__name__}: {first_line(error)}"
    other = deepcopy(module)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.01 * torch.randn(weight.shape))
    try:
        target, drafter = CausalModel(module, name), LMDrafter(CausalModel(other, name))
    except UserError as error:
        return "refused", str(error)
    decoder = SpeculativeDecoder(target, drafter, Delayed(Action(2, 1, 3)), "specinfer")
    tokens = decoder.generate(PROMPT, 16, SamplingSetting(0.0), Rng.seeded(0)).tokens
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([[*PROMPT, *tokens]]), use_cache=False).logits[0]
    plain = logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    return ("equal" if plain == tokens else "different"), target.form


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_registry_decodes_the_text_of_plain_passes(name):
    assert outcome(name)[0] == "equal"


@pytest.mark.nightly
def test_the_registry_decodes_the_text_of_plain_passes_or_is_refused():
    outcomes = {name: outcome(name) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    counts = Counter(kind for kind, _ in outcomes.values())
    assert not counts["different"], outcomes
    assert counts["equal"] >= EQUAL and counts["not built"] <= NOT_BUILT, outcomes


if __name__ == "__main__":
    names = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found = {name: outcome(name) for name in track(names, "models", len(names), "model")}
    for form in sorted({why for kind, why in found.values() if kind == "equal"}):
        equal = (name for name, own in found.items() if own == ("equal", form))
        print(f"Equal, by {form}: {', '.join(equal)}.\n")
    print("| entry | outcome | why |\n|---|---|---|")
    for name, (kind, why) in found.items():
        if kind != "equal":
            print(f"| {name} | {kind} | {why} |")
