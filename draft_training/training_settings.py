"""Settings of trainings, of small language models and of draft heads, with their contradictions.

Imports no torch.

Settings that mean something for one loss alone are in a small dataclass of that loss. On the
command line the name chooses the dataclass, and its other keys follow:
`draft.loss.name=hass draft.loss.distillation=5`.
"""

from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidatorFunctionWrapHandler, WrapValidator

from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.settings import (
    MANY,
    Amount,
    Batch,
    Count,
    Fraction,
    Natural,
    Number,
    Place,
    Rate,
    Seed,
    one_of,
    settings,
)

FAMILY, LLAMA = LAYERS = ("family", "llama")
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Options of a head on three layers beyond EAGLE-3's, as vLLM and speculators name them."""
PRECISIONS = ("auto", "32-true", "bf16-mixed")
"""Lightning's names of precisions; auto asks the machine."""

OPERATIONAL = ("checkpoint_seconds",)
"""Keys of a training that may differ where it is resumed."""


@settings("draft.loss")
class TalfLoss:
    """Cross-entropy at every node of trees that the target builds (SALF & TALF, Algorithm 1)."""

    name: Literal["talf"] = "talf"
    """Chooses this loss."""
    k: Annotated[int, Field(ge=1, le=1000)] = 4
    """Nodes of a tree at each depth, and candidates of each node."""
    depth: Annotated[int, Field(ge=1, le=64)] = 3
    """Draft passes of a tree: the root, its children and so on. Each has a loss."""
    detach_features: bool = False
    """Stop gradients at features that the head is fed back, instead of training through them."""

    # Fixed, not settings. target_trees: trains on trees that the target builds, not on chains along
    # the text.
    target_trees, regression = True, 0.0
    classification, distillation, top = 1.0, 0.0, 0


@settings("draft.loss")
class EagleLoss:
    """Regression and classification at every token of the text, on the target's features alone."""

    name: Literal["eagle"] = "eagle"
    """Chooses this loss."""
    regression: Amount = 1.0
    """Weight of the smooth L1 distance between the head's and the target's feature.

    EAGLE's code has 1. 0 for a head on three layers.
    """
    classification: Amount = 10.0
    """Weight of the cross-entropy with the target's distribution.

    The SALF & TALF paper has 10, EAGLE's code 0.1.
    """
    regression_norm: Annotated[str, one_of(("smooth_l1", "l1"))] = "smooth_l1"
    """`smooth_l1` of the features' difference, as in EAGLE's code, or `l1`, as the papers write it;
    a mean over its numbers.
    """

    # Fixed: see `TalfLoss`.
    target_trees = False
    k, depth, detach_features, distillation, top = 4, 1, True, 0.0, 0


@settings("draft.loss")
class HassLoss(EagleLoss):
    """EAGLE's loss and top-K distillation, along the text on the head's own features."""

    name: Literal["hass"] = "hass"  # type: ignore[assignment]
    """Chooses this loss."""
    depth: Annotated[int, Field(ge=1, le=64)] = 3
    """Draft passes along the text (HASS's align steps). Each has a loss."""
    detach_features: bool = True
    """Stop gradients at features that the head is fed back. false lets them flow, as in TALF and as
    HASS is printed.
    """
    distillation: Amount = 10.0
    """Weight of the cross-entropy with the target's `top` most likely tokens alone."""
    top: Number = 10
    """Number of tokens in the distillation term (HASS's K)."""


def _as_made(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Take a loss that was made in Python, one of a class of your own too, as it is."""
    return value if isinstance(value, TalfLoss | EagleLoss) else check(value)


Loss = Annotated[
    TalfLoss | HassLoss | EagleLoss, Field(discriminator="name"), WrapValidator(_as_made)
]


@settings(kw_only=True)
class TrainingConfig:
    """The settings of every training on rows of tokens."""

    steps: Count = 200
    """Optimiser steps."""
    batch: Batch = 4
    """Rows in a pass of the model, each as long as the packed rows."""
    lr_muon: Rate = 0.02
    """Peak learning rate of the matrices that Muon trains."""
    lr_adam: Rate = 0.006
    """Peak learning rate of the parameters that AdamW trains.

    The SALF & TALF paper's, for heads of 7B to 70B targets, is 3e-4.
    """
    warm_up: Natural = 10
    """Steps over which the learning rates rise linearly; at most half of all steps.

    A head's rates rise a second time at the step where trees begin.
    """
    gradient_clip: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Largest norm of the gradients in a step, for each optimiser on its own.

    None does not clip.
    """
    precision: Annotated[str, one_of(PRECISIONS)] = "auto"
    """Lightning's name, bf16-mixed or 32-true. auto: bf16-mixed where the machine has native
    bfloat16, else 32-true.

    Muon computes in bfloat16 under bf16-mixed, else in float32.
    """
    checkpoint_seconds: Annotated[float, Field(ge=0, le=MANY)] = 10.0
    """Seconds between checkpoints; more where writing them would take over 2 % of the time.

    0: after every step.
    """
    seed: Seed = 0
    """Seed of the initial weights, the order of the rows and the choice of roots."""

    evaluate_every: ClassVar[int] = 0  # a setting of heads alone


@settings("model.(target_lm|draft_lm)", kw_only=True)
class LanguageModelConfig(TrainingConfig):
    """A Llama and the recipe that trains it. Lengths are in tokens, batches in rows."""

    hidden: Annotated[int, Field(ge=2, le=65_536)] = 192
    """Size of a hidden state."""
    layers: Annotated[int, Field(ge=1, le=1000)] = 12
    """Decoder layers."""
    heads: Annotated[int, Field(ge=1, le=1024)] = 3
    """Attention heads of a layer, which divide `hidden` into even parts."""
    intermediate: Number = 512
    """Size of the hidden layer of an MLP."""
    max_length: Annotated[int, Field(ge=2, le=10_000_000)] = 2048
    """Longest context (max_position_embeddings)."""
    batch: Batch = 16
    """Rows in a step, each as long as the packed rows."""
    warm_up: Natural = 20
    """Steps over which the learning rates rise linearly."""

    tied: ClassVar[bool] = False
    """Use the embeddings as the output layer too."""

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise UserError(
                f"model.(target_lm|draft_lm): hidden={self.hidden} does not make {self.heads} heads"
                " of an even size; change one."
            )


def _some_tokens(asked: Any) -> Any:
    """Check `HeadConfig.draft_vocab`."""
    count = asked if isinstance(asked, int) else isinstance(asked, float) and 0 < asked < 1
    if asked in (None, "auto") or count > 0:
        return asked
    raise ValueError("give a number of tokens, a share of the text such as 0.98, null or auto")


@settings("draft", kw_only=True)
class HeadConfig(TrainingConfig):
    """Settings of a head's training.

    Lengths are in tokens, batches in rows; the defaults suit a small target on a CPU.
    """

    loss: Loss = field(default_factory=TalfLoss)
    """Loss, by `draft.loss.name`: `talf`, `hass` or `eagle`.

    See `TalfLoss`, `HassLoss` and `EagleLoss`.
    """
    layer: Annotated[str, one_of(LAYERS)] = FAMILY
    """`family`: a decoder layer of the target's family.

    `llama`: a Llama layer beside any target, which vLLM can serve.
    """
    features: Annotated[str, one_of(("final", "three"))] = "final"
    """Features of the target, for the head.

    `final`: after its final norm (EAGLE). `three`: of a low, a middle and a high layer, with an
    lm_head of the head's own (EAGLE-3; no loss may compare its features with the target's).
    """
    norms: list[Annotated[str, one_of(NORMS)]] = field(default_factory=list)
    """With features=three, norms beside EAGLE-3's (EAGLE 3.1 has fc_norm and norm_output).

    `norm_before_fc`: one over the three concatenated features. `fc_norm`: one over each of them.
    `norm_output`: the output after the final norm is fed back after drafted tokens.
    `norm_before_residual`: the residual that attention is added to is normed too.
    """
    draft_vocab: Annotated[str | int | float | None, AfterValidator(_some_tokens)] = "auto"
    """Tokens that the head can draft, the most frequent of the training rows: their number
    (EAGLE-3's code has 32,000), or the share of the text that they cover. None: all.

    auto: 0.98, and all of targets with less than 8,192 tokens. A warm start keeps the vocabulary
    that it has.
    """
    warm_start: Place | None = None
    """Folder of an exported head: the training starts from its weights, not from random ones."""
    roots: Annotated[int, Field(ge=0, le=1_000_000)] = 32
    """Roots of a row that get a tree in a step, drawn anew each time; 0: all of them, as in the
    paper.

    The loss at depth 0 takes all roots in any case, and the expected loss does not depend on this;
    its noise does. With 8 roots of 256 the noise was so large that trees made depth 0 worse
    (overlap 0.70 against 0.76 with 32).
    """
    chain_fraction: Fraction = 0.6
    """Fraction of the steps, at the start, that train depth 0 alone.

    With TALF's loss a fresh head on final features learns it by EAGLE's, as the paper begins.
    """
    accumulate: Number = 1
    """Passes whose gradients make one optimiser step."""
    optimizer: Annotated[str, one_of(("muon", "adamw"))] = "muon"
    """`muon`: Muon for the matrices and AdamW for the rest.

    `adamw`: AdamW for all, as in the paper.
    """
    devices: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that train together, each with a full head on a device of its own.

    A step then has `devices` times as many rows.
    """
    gradient_clip: Annotated[float, Field(gt=0, le=1e9)] | None = 1.0
    """Largest norm of the gradients in a step, for each optimiser on its own.

    None does not clip: then the loss may rise a thousandfold where trees begin.
    """
    held_out_rows: Natural = 0
    """Rows for the figures of the trained head, and as many others for `evaluate_every`.

    0: 12, or fewer, so that the figures take a tenth of the training's time.
    """
    evaluate_every: Natural = 0  # type: ignore[misc]
    """Steps from one evaluation on held-out rows to the next.

    The weights with the lowest held-out loss are exported. 0: none, and the last weights are.
    """

    def rows_along(self) -> int:
        """Count the rows of all steps along the text, without trees, of one device."""
        steps = self.steps * (self.chain_fraction if self.loss.target_trees else 1)
        return int(steps) * self.batch * self.accumulate

    def __post_init__(self) -> None:
        if self.features == "three" and self.loss.regression:
            raise UserError(
                f"draft.features=three with draft.loss.name={self.loss.name}: such a head's output"
                " is no feature of the target's to be regressed to. Use draft.loss.regression=0 or"
                " draft.loss.name=talf."
            )
        if self.norms and self.features != "three":
            raise UserError(
                f"draft.norms={','.join(self.norms)} with draft.features={self.features}: only a"
                " head with draft.features=three has these norms."
            )
        if {"norm_before_fc", "fc_norm"} <= {*self.norms}:
            raise UserError(
                "draft.norms: norm_before_fc and fc_norm are two norms of one thing. Use one of"
                " them."
            )
