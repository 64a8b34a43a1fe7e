"""Trees of continuations found in the text itself.

Several matches of its ending are merged at the tokens that they share.
"""

import heapq
from typing import Any

from nde_talf.decoding.common.arguments import checked
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.drafters.ngram import Match, NgramDrafter
from nde_talf.decoding.drafters.ngram_settings import NgramConfig
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.tree import DraftTree


class NgramTree(TreePolicy):
    """The tokens most likely to be accepted, best first, until there are `nodes` of them.

    A child's value is its parent's, times the fraction of the matches that continue with it, times
    how often a token drafted at a match of that size was accepted in this sequence. None of a value
    below `threshold` is drafted, nor where nothing matches.

    Example: "a b c, a b d, a b" gives the children c and d, each with half of the matches.
    """

    trees = "top_k"

    @checked
    def __init__(self, config: NgramConfig | None = None):
        self.config = config or NgramConfig()

    def check_decoder(self, target: Any, drafter: Drafter | None, draft_setting: Any) -> None:
        """Raise UserError for a drafter that looks up nothing."""
        if not isinstance(drafter, NgramDrafter):
            raise UserError(
                "policy NgramTree drafts from the text itself: give the decoder an NgramDrafter."
            )

    def draft(self, state: DecodingState, drafter: NgramDrafter, rng: Rng) -> DraftTree:
        """Draft a tree of the continuations with the largest values; `rng` is not used."""
        config, tree = self.config, DraftTree.rooted(state.root)
        heap: list[tuple[float, int, int, int]] = []  # minus the value, order, parent, token
        depth, order = min(config.depth, state.room), 0

        def consider(node: int, value: float, match: Match) -> None:
            nonlocal order
            value *= drafter.rate(match.size)
            for token, fraction in drafter.index.continuations(match):
                if value * fraction < config.threshold:
                    break
                heapq.heappush(heap, (-value * fraction, order := order + 1, node, token))

        if depth:
            consider(0, 1.0, drafter.match(tree, 0))
        while heap and len(tree) <= config.nodes:
            negative, _, parent, token = heapq.heappop(heap)
            node = tree.add(parent, token)
            if tree.depth[node] < depth and len(tree) <= config.nodes:
                consider(node, -negative, drafter.match(tree, node))
        return tree
