"""Registries of losses and of draft heads' layers, by name. Imports no torch."""

from nde_talf.decoding.registry import Registry

LOSSES = Registry(
    "draft.loss",
    "nde_talf.draft_training",
    {"talf": "training.losses", "hass": "training.losses", "eagle": "training.losses"},
)
"""Losses of draft heads."""

HEADS = Registry(
    "draft.layer",
    "nde_talf.draft_training",
    dict.fromkeys(("llama", "qwen2", "qwen3", "gemma2", "gemma3_text"), "model.families"),
)
"""Families of a draft head's decoder layer, by transformers' `model_type` of the target."""

loss, head_layer = LOSSES.add, HEADS.add
