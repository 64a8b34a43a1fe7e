"""How a draft head is trained: every setting, its default, and which exclude each other."""

from dataclasses import dataclass

from decoding.common.errors import UserError

FAMILY, LLAMA = "family", "llama"
LAYERS = (FAMILY, LLAMA)
"""What `draft.layer` may be: the target's own family, or a Llama layer beside any target."""
ONLINE, TARGET_FEATURES, TOP_M = "online", "features", "top_m"
MODES = (ONLINE, TARGET_FEATURES, TOP_M)
"""What `draft.labels` may be."""
LOSSES = ("talf", "hass", "eagle")
FEATURES = ("final", "three")
FSDP = "fsdp"
STRATEGIES = ("auto", "ddp", "ddp_spawn", "ddp_fork", FSDP)


@dataclass(frozen=True)
class Terms:
    """Weights of the terms of a node's loss. top: how many of the target's most likely tokens distillation takes."""

    classification: float = 1.0
    distillation: float = 0.0
    regression: float = 0.0
    top: int = 10


@dataclass
class HeadConfig:
    """How a head is trained. Lengths are in tokens, batches in rows; the defaults suit a small target on a CPU."""

    loss: str = "talf"
    """`talf`: cross-entropy at every node of target-built trees (SALF & TALF paper). `hass`: along the text on the head's own
    features, detached, with regression, classification and top-10 distillation. `eagle`: regression and classification at
    depth 0."""
    layer: str = FAMILY
    """`family`: a decoder layer of the target's family; `llama`: a Llama layer beside any target, which vLLM can serve."""
    features: str = "final"
    """Of the target, for the head: `final`: behind its final norm (EAGLE); `three`: of a low, a middle and a high layer, with
    an lm_head of the head's own (EAGLE-3; TALF with labels=online)."""
    draft_vocab: int | None = None
    """With features=three, how many tokens the head can draft: those that are most frequent in what is trained on (EAGLE-3's
    code has 32,000). Its lm_head has as many rows. None: all."""
    warm_start: str | None = None
    """Folder of an exported head to begin with, in place of random weights."""
    k: int = 4
    """Nodes of a tree at each depth, and candidates of each node (TALF)."""
    depth: int = 3
    """Draft passes of a tree: the root, its children, ... ; each carries a loss (the paper's and HASS's 3 align
    steps)."""
    regression_weight: float = 1.0
    """Of HASS and EAGLE, per node. SALF & TALF paper has 1 for this and 10 for the two below; EAGLE's code 1 and 0.1."""
    classification_weight: float = 10.0
    distillation_weight: float = 10.0
    """Of HASS alone."""
    roots: int = 32
    """Roots of a row that get a tree in a step, drawn anew each time; 0: all of them, as in the paper. The loss at
    depth 0 takes all in any case, and the loss's expectation does not depend on this; its noise does, and 8 roots of
    256 were so noisy that trees made depth 0 worse (overlap 0.70 against 0.76 with 32)."""
    chain_fraction: float = 0.6
    """Share of the steps, at the start, that train depth 0 alone."""
    detach_features: bool = False
    """Stop gradients at fed-back features, instead of training through them; HASS always does."""
    labels: str = ONLINE
    """Where the target's part comes from: `online`: computed in the step; `features`: trees and the target's features at
    their nodes, on disk; `top_m`: trees and the `top_m` most likely tokens' probabilities, on disk (TALF)."""
    top_m: int = 64
    label_dtype: str = "float16"
    """Of features and probabilities on disk: float16, bfloat16 or float32."""
    steps: int = 200
    batch: int = 4
    """Rows in a pass; the length of a row is that of the tokens given."""
    accumulate: int = 1
    """Passes whose gradients make one optimiser step."""
    optimizer: str = "muon"
    """`muon`: Muon for the matrices and AdamW for the rest; `adamw`: AdamW for all, as in the paper."""
    lr_muon: float = 0.02
    """Peak learning rate of what Muon trains; linear warm-up, then a cosine to zero, as for AdamW."""
    lr_adam: float = 6e-3
    """Peak learning rate of what AdamW trains. The paper's, for the heads of 7B to 70B targets, is 3e-4."""
    warm_up: int = 10
    ema_decay: float = 0.0
    """Of an exponential moving average of the weights, which is then what training ends with, such as 0.999; 0: none."""
    precision: str = "auto"
    """Lightning's name, such as bf16-mixed or 32-true; auto: bf16-mixed where the machine has native bfloat16, else 32-true.
    Muon computes in bfloat16 under a precision whose name begins with bf16, else in float32."""
    strategy: str = "auto"
    """`ddp_spawn`, `ddp_fork`: a whole head on each of `devices`; `ddp`: likewise, starting the command anew for each; `fsdp`:
    a part of the head and of its optimiser's state on each. Rows of a step are `devices` times as many."""
    devices: int = 1
    nodes_in_pass: int = 128
    """Nodes of a row in one pass of the target, and 4 of them make rows of [V] held at once in the loss: a memory
    limit."""
    checkpoint_seconds: float = 10.0
    """A checkpoint is written at the first step that ends this long after the last one."""
    seed: int = 0
    """Of the initial weights, the order of the rows and the choice of roots."""

    def terms(self) -> Terms:
        """The weights of a node's terms."""
        if self.loss == "talf":
            return Terms()
        distilled = self.distillation_weight if self.loss == "hass" else 0.0
        return Terms(self.classification_weight, distilled, self.regression_weight)

    def passes(self) -> int:
        """Draft passes that carry a loss: EAGLE has one, whatever `depth`."""
        return 1 if self.loss == "eagle" else self.depth


def check_head_config(config: HeadConfig) -> None:
    """Raise UserError for settings that exclude each other or do not exist."""
    for key, value, known in (
        ("loss", config.loss, LOSSES),
        ("optimizer", config.optimizer, ("muon", "adamw")),
        ("labels", config.labels, MODES),
        ("features", config.features, FEATURES),
        ("strategy", config.strategy, STRATEGIES),
    ):
        if value not in known:
            raise UserError(f"draft.{key}={value}: choose one of {', '.join(known)}.")
    if config.labels == "top_m" and config.loss != "talf":
        raise UserError(
            f"draft.labels=top_m keeps probabilities and no features, which draft.loss={config.loss} regresses to: use "
            "draft.labels=features or online."
        )
    if config.features == "three" and (config.loss != "talf" or config.labels != ONLINE):
        raise UserError(
            f"draft.features=three with draft.loss={config.loss} and draft.labels={config.labels}: what such a head puts out "
            "is no feature of the target's to be regressed to, and labels on disk hold features of the final norm alone. Use "
            "draft.loss=talf and draft.labels=online."
        )
    if config.draft_vocab is not None and (config.features != "three" or config.draft_vocab < 1):
        raise UserError(
            f"draft.draft_vocab={config.draft_vocab} with draft.features={config.features}: it counts tokens, 1 or more, and "
            "goes with draft.features=three, whose head has an lm_head of its own."
        )
    if config.optimizer == "muon" and config.strategy == FSDP:
        raise UserError(
            "draft.strategy=fsdp shards matrices that Muon needs whole: use draft.optimizer=adamw or strategy=ddp_spawn."
        )
    if config.precision == "16-mixed" and config.strategy == FSDP:
        raise UserError("draft.strategy=fsdp cannot scale float16's gradients: use draft.precision=bf16-mixed.")
    if not 0 <= config.ema_decay < 1:
        raise UserError(f"draft.ema_decay={config.ema_decay}: it must lie in [0, 1); 0 keeps no average.")
    if config.ema_decay and config.strategy == FSDP:
        raise UserError(
            "draft.ema_decay averages whole weights, and draft.strategy=fsdp shards them: use ddp_spawn, or ema_decay=0."
        )
    if min(config.batch, config.accumulate, config.steps, config.depth, config.k, config.devices) < 1:
        raise UserError("draft: batch, accumulate, steps, depth, k and devices must be 1 or more.")
