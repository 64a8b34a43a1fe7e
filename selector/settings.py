"""Which selectors are trained and how: the settings of `selector.*`. Imports no torch."""

from dataclasses import dataclass, field


@dataclass
class SelectorConfig:
    """What selectors are trained, and the network, objective and optimiser of each.

    verifiers: a selector of each is trained, on that rule's labels. across: one more, which also picks among these
    verifiers. tables: latency tables that it is trained on and judged under: "measured" (stage=latency), names of
    configs/latency, files. pricing: of steps, "table" or "eq11" (the NDE paper's Eq. 11). width, hidden, dropout: of the
    network (Eq. 10). sharpness: see `selector.selector.Selector`; 0 is the NDE paper's. tail_weight, tail_fraction: lambda and
    alpha of Eq. 12; policy_weight: of all of Eq. 12. regression_weight: of the deviance of what the network says the trees
    yield (needs sharpness; see `selector.objective.deviance`). entropy_weight: see `selector.objective.selector_loss`.
    epochs: at most; patience: epochs without better held-out throughput before it stops; folds: of the training prompts, each
    held out once to find how long to train (see `selector.crossfit`). least_gain: what choosing has to win under a sampling
    setting, else its best static option is exported for it; 0.02 is about what choosing costs. devices: processes that share
    the batches (DDP).
    """

    verifiers: list[str] = field(default_factory=lambda: ["traversal", "specinfer"])
    across: bool = False
    tables: list[str] = field(default_factory=lambda: ["measured"])
    pricing: str = "table"
    width: int = 128
    hidden: list[int] = field(default_factory=lambda: [512, 32])
    dropout: float = 0.1
    sharpness: float = 20.0
    policy_weight: float = 1.0
    tail_weight: float = 1.0
    tail_fraction: float = 0.05
    regression_weight: float = 4.0
    entropy_weight: float = 0.003
    lr: float = 1e-3
    weight_decay: float = 0.1
    batch: int = 128
    epochs: int = 10
    patience: int = 5
    folds: int = 4
    least_gain: float = 0.02
    devices: int = 1
    seed: int = 0
