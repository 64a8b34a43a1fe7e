"""Settings of `selector.*`: rules, network, objective, optimiser. Imports no torch."""

from dataclasses import field
from typing import Annotated

from pydantic import Field

from nde_talf.data.traces.settings import Rules
from nde_talf.decoding.common.arguments import Proper
from nde_talf.decoding.common.settings import (
    Amount,
    Count,
    Number,
    Place,
    Rate,
    Seed,
    Share,
    Width,
    one_of,
    settings,
)


@settings("selector")
class SelectorConfig:
    """Selectors to train, and the network, objective and optimiser of each."""

    verifiers: Rules = field(default_factory=lambda: ["traversal", "specinfer"])
    """A selector is trained for each of these verification rules, on its labels."""
    table: Place = "measured"
    """Latency table to train on and evaluate under: "measured" (stage=latency), a name of
    configs/latency, or a file.
    """
    pricing: Annotated[str, one_of(("table", "eq11"))] = "table"
    """Price of a step: "table", with the number of nodes and the width of levels, or "eq11",
    Eq. 11 of the NDE paper.
    """
    width: Width | None = None
    """Width to which the three hidden states are projected (Eq. 10). null: a quarter of the draft's
    hidden size, 32 to 128, which is the NDE paper's.
    """
    hidden: Annotated[list[Width], Field(min_length=2, max_length=2)] | None = None
    """Widths of the two hidden layers (Eq. 10). null: four times `width`, and 32; the NDE paper has
    512 and 32.
    """
    dropout: Proper = 0.1
    """Dropout after each hidden layer, in training."""
    initialisation: Annotated[str, one_of(("static", "random"))] = "static"
    """Policy that training starts from: "static", the trees that are best over all training roots,
    or "random", torch's own initial weights, as in the NDE paper.
    """
    sharpness: Amount = 20.0
    """Logits are sharpness x (network - log seconds).

    With 0 they are the network's own, as in the NDE paper, and regression_weight has no effect.
    """
    tail_weight: Amount = 1.0
    """lambda of Eq. 12: weight of the roots where the policy loses most against the best static
    tree. 0 drops the term.
    """
    tail_fraction: Share = 0.05
    """alpha of Eq. 12: the fraction of a batch's roots in that term."""
    regression_weight: Amount = 4.0
    """Weight of the deviance of the predicted expected tokens. 0 drops the term."""
    entropy_weight: Amount = 0.003
    """Weight of the policy's entropy, which keeps it from settling on one tree too early."""
    weighting: Annotated[str, one_of(("visits", "roots"))] = "visits"
    """Weight of a root in Eq. 12 and the deviance: "visits", as often as a decoder with the best
    static tree starts a step there, or "roots", all the same, as in the NDE paper.
    """
    lr: Rate = 1e-3
    """Peak learning rate; it falls to zero along a cosine."""
    batch: Count = 128
    """Roots in a step."""
    epochs: Number = 10
    """Passes over the training roots, at most."""
    folds: Annotated[int, Field(ge=2, le=1000)] = 4
    """Parts of the training prompts; each is held out once, to find the number of epochs and the
    settings under which choosing wins.
    """
    fallback: bool = True
    """Export the best static tree for a sampling setting where choosing does not win by min_gain.
    false: always the network, as in the NDE paper.
    """
    min_gain: Annotated[float, Field(ge=-1, le=10)] = 0.02
    """Least gain of choosing under a sampling setting, a fraction of tokens/s; below it the best
    static tree is exported for that setting. Choosing costs 1.8 ms per step on a slow EPYC.
    """
    seed: Seed = 0
    """Seed of the initial weights, the order of the roots and dropout."""

    def widths(self, draft_hidden: int) -> tuple[int, tuple[int, int]]:
        """Return `width` and `hidden` for a draft of this hidden size.

        For example 32 and (128, 32) for 128, and the paper's 128 and (512, 32) from 512 on. The
        paper's models are thousands of units wide; beside a small pair its network is slow.
        """
        width = self.width or max(32, min(128, draft_hidden // 4))
        first, second = self.hidden or (4 * width, 32)
        return width, (first, second)
