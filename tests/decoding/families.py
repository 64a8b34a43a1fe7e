"""A tiny model of each family, with random weights that are large enough for texts to differ, and
the family's peculiarities: windows of 16 tokens, read-outs, odd sizes of heads.
"""

import json
from pathlib import Path

import torch
from transformers import AutoConfig

from nde_talf import CausalModel
from nde_talf.decoding.models.loading import architecture

V, CONTEXT, WINDOW = 50, 96, 16
TABLE = json.loads(Path(__file__).with_name("families.json").read_text())
"""Sizes of models with rotary positions and of their images' part; by the form in which trees are
scored and by name the model type and what differs from these sizes. A family with "text_config" is
a model for images around a language model.
"""
ROTARY, EYES = TABLE["rotary"], TABLE["eyes"]
FORMS = {name: form for form in ("masks", "branches", "tokens") for name in TABLE[form]}
FAMILIES, BRANCHES = TABLE["masks"], TABLE["branches"]
EVERY = FAMILIES | BRANCHES | TABLE["tokens"]


def text(length, seed=1):
    """Return random tokens."""
    return torch.randint(V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def module(model_type, changes, seed=3):
    """A model with random weights, loaded as `load_module` would."""
    if "text_config" in changes:
        parts = {
            "text_config": ROTARY | changes["text_config"],
            "vision_config": EYES | changes["vision_config"],
        }
        parts["text_config"]["vocab_size"] = changes.get("vocab_size", V)
        config = AutoConfig.for_model(model_type, **changes | parts)
    else:
        config = AutoConfig.for_model(model_type, **ROTARY | changes)
    auto, attention = architecture(config)
    torch.manual_seed(seed)
    return auto.from_config(config, attn_implementation=attention)


def family(name, noise=0.0, rows=V):
    """The same weights at every call, plus `noise`; with other `rows` than V, those of the tokens
    in common.
    """
    kind, changes = EVERY[name]
    model = module(kind, changes)
    if rows != V:
        fewer = {"vocab_size": rows} | (
            {"vocab_size_per_layer_input": rows} if "vocab_size_per_layer_input" in changes else {}
        )
        whole, model = model, module(kind, changes | fewer)
        with torch.no_grad():
            for old, new in zip(whole.parameters(), model.parameters(), strict=True):
                new[: len(old)] = old[: len(new)]
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * torch.randn_like(weight))
    return CausalModel(model, name)
