"""Lengths of single paths, chosen by a selector for all requests of an engine's batch.

An engine that verifies paths exposes no features of the target. So the selector must have been
trained with selector.features=draft, or have exported the best static tree, in whose place the best
static path is taken.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from nde_talf.decoding.actions import L1_MAX, L2_MAX, TREES, Action, tree_index
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.features import scalar_features
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.sampling.rng import warp
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting, feature_setting
from nde_talf.selector.network import Selector
from nde_talf.selector.prices import LONGEST, StepCosts

LONGEST_PATH = L1_MAX + L2_MAX
"""Tokens of a selector's longest path."""
PART = 32
"""Requests whose distributions are in memory at once: 0.2 GB for 150,000 tokens."""


class PathLengths:
    """Choose how many tokens to draft for each request of a batch, as vLLM's `Lengths`.

    The lengths are the argmax of the selector's logits over its paths, (1, 0, L). Steps are priced
    by the number of nodes, not by Eq. 11, and as steps of one sequence.

    Args:
        selector: without target features, or with the best static tree for `setting`.
        model: the draft, which gives logits.
        max_tokens: the largest length.
        setting: of the target's sampling.
        overhead: seconds of a step outside the models' passes.

    Raises:
        UserError: the selector needs target features; there is no table; or the draft has another
            hidden size.
    """

    def __init__(
        self,
        selector: Selector,
        model: CausalModel,
        max_tokens: int,
        setting: SamplingSetting,
        overhead: float = 0.0,
    ):
        schema, table = selector.schema, selector.prices(None)
        if schema.draft_hidden != model.hidden_size:
            raise UserError(
                f"selector: it was trained for a draft of hidden size {schema.draft_hidden}, and"
                f" {model.name} has {model.hidden_size}. Load the selector of this pair."
            )
        if not 1 <= max_tokens <= LONGEST_PATH:
            raise UserError(
                f"max_tokens={max_tokens}: selectors choose among paths of 1 to {LONGEST_PATH}."
            )
        self.selector, self.model, self.setting = selector.eval(), model, setting
        self.paths = [tree_index(Action(1, 0, length)) for length in range(max_tokens + 1)]
        # The network looks at passes as in training, without the overhead.
        self._passes = StepCosts(table, schema.verifier, LONGEST, trees=self.paths).passes
        late = replace(table, target=(overhead + np.array(table.target)).tolist())
        self._costs = StepCosts(late, schema.verifier, LONGEST, trees=self.paths)
        self._static = selector.static_action(setting.temperature, setting.top_p, self._costs)
        if schema.target_hidden and self._static is None:
            raise UserError(
                "selector: it looks at features of the target, which this engine does not hand out."
                " Train one on the draft's alone: nde run stage=selector"
                " selector.features=draft, with the settings of its run."
            )

    def choose(self, drafters: Sequence[Drafter], contexts: Sequence[int]) -> list[int]:
        """Return the length for each request.

        Args:
            drafters: [B]; `previous` and `root` are read.
            contexts: [B], committed tokens.
        """
        costs = self._costs
        if self._static is not None:
            return [TREES[self._static].depth] * len(drafters)
        previous = torch.stack([drafter.previous.hidden for drafter in drafters])
        root = torch.stack([drafter.root.hidden for drafter in drafters])
        seen, scalars = feature_setting(self.setting), []
        for some in zip(previous.split(PART), root.split(PART), strict=True):
            q_previous, q_root = warp(self.model.logits(torch.cat(some)), seen).chunk(2)
            # Features that need the target's p count as 0.
            scalars.append(scalar_features(q_previous, q_previous, q_root).float().cpu())
        context = torch.tensor(contexts)
        setting = torch.tensor([self.setting.temperature, self.setting.top_p])
        row, settings = costs.row(context), setting.expand(len(contexts), 2)
        inputs = torch.cat(
            [torch.cat(scalars), context[:, None].float(), settings, self._passes[row]], -1
        )
        previous, root = previous.float().cpu(), root.float().cpu()
        logits = self.selector(previous[:, :0], previous, root, inputs, costs.seconds[row])
        return logits[:, self.paths].argmax(-1).tolist()
