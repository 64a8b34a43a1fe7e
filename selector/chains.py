"""A selector's choice among single paths, for all requests of a batch at once: for engines that
verify paths only.

Such an engine hands out no features of the target. So the selector has to be one that was trained
with selector.features=draft, or one that exported the best static tree, for which the best static
path is taken.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.actions import L1_MAX, L2_MAX, TREES, Action, tree_index
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.features import scalar_features
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.sampling import warp
from nde_talf.decoding.setting import SamplingSetting, feature_setting
from nde_talf.selector.latency import LONGEST, LatencyTable, StepCosts
from nde_talf.selector.network import Selector

LONGEST_PATH = L1_MAX + L2_MAX
"""Tokens of the longest path that a selector knows."""


class PathLengths:
    """Chooses how many tokens to draft for each request of a batch: `nde_talf.proposals.Lengths`.

    The lengths are the argmax of the selector's logits over its paths, (1, 0, L). Steps are priced
    by the number of nodes, not by Eq. 11, as if all requests of the batch drafted the same number
    of tokens: see `at_batch`. Of several verifiers the first one's labels and prices count.

    Args:
        selector: without target features, or with the best static tree for `setting`.
        model: the draft, whose logits are looked at.
        max_tokens: the largest length.
        setting: that the target samples under.
        table: prices the steps; None: the one that the selector was exported with.
        overhead: seconds that the engine takes in a step beside the models' passes.

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
        table: LatencyTable | None = None,
        overhead: float = 0.0,
    ):
        schema, table = selector.schema, table or selector.table
        if table is None:
            raise UserError(
                "selector: it has no latency table. Give one, or train it again with stage=selector"
                " force=true."
            )
        if schema.draft_hidden != model.hidden_size:
            raise UserError(
                f"selector: it was trained for a draft of hidden size {schema.draft_hidden}, and"
                f" {model.name} has {model.hidden_size}. Load the selector of this pair."
            )
        if not 1 <= max_tokens <= LONGEST_PATH:
            raise UserError(
                f"max_tokens={max_tokens}: a selector chooses among paths of 1 to {LONGEST_PATH}"
                " tokens."
            )
        self.selector, self.model, self.setting, self.table = selector.eval(), model, setting, table
        self.max_tokens, self.overhead = max_tokens, overhead
        self._passes = PathCosts(
            table, schema.verifiers, max_tokens
        ).passes  # an input of the network: as in training
        self._prices: dict[int, tuple[PathCosts, int | None]] = {}
        if schema.target_hidden and self._priced(1)[1] is None:
            raise UserError(
                "selector: it looks at features of the target, which this engine does not hand out."
                " Train one on the draft's alone: python -m pipelines.run stage=selector"
                " selector.features=draft, with the settings of its run."
            )

    def choose(self, drafters: Sequence[Any], contexts: Sequence[int]) -> list[int]:
        """The length for each request.

        Args:
            drafters: [B], of which `previous` and `root` are read.
            contexts: [B], committed tokens.
        """
        costs, static = self._priced(len(drafters))
        if static is not None:
            return [static] * len(drafters)
        states = [
            torch.stack([getattr(drafter, at).hidden for drafter in drafters])
            for at in ("previous", "root")
        ]
        q_previous, q_root = warp(
            self.model.logits(torch.cat(states)), feature_setting(self.setting)
        ).chunk(2)
        context = torch.tensor(contexts)
        row = costs.row(context)
        local = torch.tensor([self.setting.temperature, self.setting.top_p]).expand(
            len(contexts), 2
        )
        scalars = (
            scalar_features(q_previous, q_previous, q_root).float().cpu()
        )  # those that need the target's p count as 0
        inputs = torch.cat([scalars, context[:, None].float(), local, self._passes[row]], -1)
        previous, root = (state.float().cpu() for state in states)
        logits = self.selector(previous[:, :0], previous, root, inputs, costs.seconds[row])
        return logits[:, costs.paths].argmax(-1).tolist()

    def _priced(self, sequences: int) -> tuple["PathCosts", int | None]:
        """The prices of a batch of so many, and the one length that is taken where the selector
        does not choose.
        """
        known = self.table.sequences
        sequences = min(sequences, known[-1]) if known else 1
        if sequences not in self._prices:
            costs = PathCosts(
                at_batch(self.table, sequences, self.overhead),
                self.selector.schema.verifiers,
                self.max_tokens,
            )
            static = self.selector.static_action(
                self.setting.temperature, self.setting.top_p, costs
            )
            self._prices[sequences] = (
                costs,
                None if static is None else TREES[static % len(TREES)].depth,
            )
        return self._prices[sequences]


class PathCosts(StepCosts):
    """Prices of the paths of up to `max_tokens` tokens under the first of `verifiers`; no other
    action has one (infinity).
    """

    def __init__(self, table: LatencyTable, verifiers: Sequence[str], max_tokens: int):
        self.paths = [tree_index(Action(1, 0, length)) for length in range(max_tokens + 1)]
        super().__init__(table, verifiers, LONGEST)

    def _price(self, contexts: Tensor) -> Tensor:
        seconds = torch.full(
            (len(contexts), len(self.verifiers) * len(TREES)), torch.inf, dtype=torch.float64
        )
        seconds[:, self.paths] = self.table.paths(contexts, len(self.paths) - 1, self.verifiers[0])
        return seconds


def at_batch(table: LatencyTable, sequences: int, overhead: float = 0.0) -> LatencyTable:
    """The prices of a step of so many sequences, see `LatencyTable.batched`, but with the drafts'
    passes one sequence after the other, and `overhead` seconds once.

    A table without the axis of sequences prices a step of one sequence.
    """
    drafts = sequences if table.sequences else 1

    def several(seconds: list[float]) -> list[float]:
        return [drafts * one for one in seconds]

    together = table.batched(drafts)
    return replace(
        together,
        target=[[overhead + one for one in row] for row in together.target],
        draft=[several(row) for row in table.draft],
        first=several(table.first),
        second=several(table.second),
    )
