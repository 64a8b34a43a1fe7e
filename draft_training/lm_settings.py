"""How a small language model is built and trained: the settings of `model.target_lm` and `model.draft_lm`."""

from dataclasses import dataclass


@dataclass
class LanguageModelConfig:
    """A Llama and the recipe that trains it. Lengths and batches are in tokens and rows, rates are per step."""

    hidden: int = 192
    layers: int = 12
    heads: int = 3
    intermediate: int = 512
    max_length: int = 2048
    """Longest context (max_position_embeddings)."""
    steps: int = 200
    batch: int = 16
    """Rows in a step; the length of a row is that of the packed tokens."""
    lr_muon: float = 0.02
    """Peak learning rate of the matrices inside the layers (Muon)."""
    lr_adam: float = 0.006
    """Peak learning rate of the embeddings, the head and the norms (AdamW)."""
    warm_up: int = 20
    """Steps over which the learning rates rise linearly."""
    cool_down: float = 0.6
    """Fraction of the steps, at the end, over which the learning rates fall linearly to zero."""
    total_variation: float = 0.0
    """Weight of the total variation distance in the distillation loss; the rest is the KL divergence."""
    checkpoint_seconds: float = 10.0
    """A checkpoint is written at the first step that ends this long after the last one."""
    seed: int = 0
    """Of the initial weights and of the order of the rows."""
