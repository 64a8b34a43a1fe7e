"""DynaTree: breadth by the draft's confidence, depth by the path's probability.

Both adapt to what was accepted (section 3.3 and Algorithm 1, DynaTree paper).
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nde_talf.decoding.common.arguments import Natural, Positive, Proper, checked
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.policies.beam import top_tokens
from nde_talf.decoding.registry import policy
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.tree import DraftTree


def require_rising(**settings: float) -> None:
    """Raise UserError unless the settings rise in the order given."""
    for (low, a), (high, b) in pairwise(settings.items()):
        if not a < b:
            raise UserError(f"{low}={a} and {high}={b}: {low} must be smaller than {high}.")


@checked
@dataclass(frozen=True)
class DynaTreeConfig:
    """DynaTree's parameters.

    The paper prints the defaults of `branches` (1 and 3), `confident_low`, `confident_high`,
    `depth` and `max_depth` (Appendix A). It does not print the others: it tunes them on held-out
    text.

    Attributes:
        branches: B_min, B_mid, B_max. How many children a node of confidence c has, where c is its
            largest draft probability: the first for c >= confident_high, the last for c <
            confident_low, otherwise the second.
        confident_low, confident_high: tau_l, tau_h.
        depth, max_depth: D_0, D_max. Depth is counted from u_0, the first drafted token.
        stop: rho_stop. A node of lower path probability is not expanded.
        deep: rho_deep. From `depth` on, a node of lower path probability is not expanded.
        prune: tau. A node of lower path probability is not expanded.
        nodes: N_max, the largest number of drafted tokens.
        window: W, over how many steps the acceptance is averaged; 0 switches the adaptation off.
        low, high: the mean acceptance below (above) which drafting becomes more conservative
            (aggressive).
        step: by how much tau_l and tau_h then move; D_0 moves by 1.
    """

    branches: tuple[int, int, int] = (1, 2, 3)
    confident_low: Proper = 0.4
    confident_high: float = 0.9
    depth: Positive = 5
    max_depth: int = 8
    stop: Proper = 0.02
    deep: float = 0.2
    prune: Proper = 0.01
    nodes: Positive = 64
    window: Natural = 8
    low: float = 0.1
    high: float = 0.3
    step: float = 0.05

    def __post_init__(self) -> None:
        if (
            len(self.branches) != 3
            or not 1 <= self.branches[0] <= self.branches[1] <= self.branches[2]
        ):
            raise UserError(
                f"branches={list(self.branches)}: give three numbers of at least 1, none below the"
                " one before it."
            )
        require_rising(confident_low=self.confident_low, confident_high=self.confident_high)
        require_rising(stop=self.stop, deep=self.deep)
        require_rising(low=self.low, high=self.high)
        require_rising(depth=self.depth, max_depth=self.max_depth)


class History:
    """Adapted thresholds of one sequence.

    Attributes:
        depth, confident_low, confident_high: the adapted D_0, tau_l and tau_h.
        drafted: tokens of the last tree; what a step commits is divided by it.
    """

    def __init__(self, config: DynaTreeConfig):
        self.config, self.depth, self.drafted = config, config.depth, 0
        self.confident_low, self.confident_high = config.confident_low, config.confident_high
        self._accepted: deque[float] = deque(maxlen=max(1, config.window))

    def learn(self, accepted: float) -> None:
        """ADJUST of Algorithm 1, from the fraction of the last draft that was accepted.

        At most one step a draft: deeper and narrower trees while the mean is high, shallower and
        wider ones while it is low.

        Section 3.3 names these directions and leaves the schedule open. tau_l and tau_h keep their
        distance, within (0, 1]; D_0 stays in 1 .. D_max - 1.
        """
        config = self.config
        self._accepted.append(accepted)
        mean = sum(self._accepted) / len(self._accepted)
        move = (mean > config.high) - (mean < config.low)
        self.depth = min(max(self.depth + move, 1), config.max_depth - 1)
        shift = -move * config.step
        if self.confident_low + shift > 0 and self.confident_high + shift <= 1:
            self.confident_low += shift
            self.confident_high += shift


class DynaTree(TreePolicy):
    """Algorithm 1: u_0 is the draft's most probable token after the root.

    From there on a node's most probable tokens are added breadth first, as many as its confidence
    says, until there are `nodes` of them.

    All nodes of a level are expanded in one draft pass; the algorithm as printed runs one after
    another, with the same tree. The trees suit greedy decoding, as in the paper, and NSS for
    sampling. Each sequence has a history (`DecodingState.memory`).
    """

    trees = "top_k"

    @checked
    def __init__(self, config: DynaTreeConfig = DynaTreeConfig()):
        self.config = config

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        """Draft one tree by Algorithm 1, after learning from the last step; `rng` is not used."""
        config, history = self.config, state.memory.setdefault(self, History(self.config))
        if state.tau is not None and history.drafted and config.window:
            history.learn(state.tau / history.drafted)
        tree, probability = DraftTree.rooted(state.root, drafter.root.q), {0: 1.0}
        level = [0] if state.room else []
        while level:
            grown = self._grown(tree, level, probability, history)
            if len(tree) > config.nodes:
                break
            level = [
                node
                for node in grown
                if self._expandable(tree.depth[node], probability[node], state.room, history)
            ]
            if level:
                drafter.expand(tree, level)
        history.drafted = len(tree) - 1
        return tree

    def _grown(
        self, tree: DraftTree, level: list[int], probability: dict[int, float], history: History
    ) -> list[int]:
        """Add the children of a level, until the tree is full; return them."""
        grown = []
        rows = top_tokens(tree, level, self.config.branches[-1])
        for node, best in zip(level, rows, strict=True):
            count = self._branches(best[0][0], history) if node else 1
            for value, token in best[:count]:
                reach = probability[node] * value
                if value > 0 and len(tree) <= self.config.nodes:
                    grown.append(tree.add(node, token))
                    probability[grown[-1]] = reach
        return grown

    def _branches(self, confidence: float, history: History) -> int:
        few, some, many = self.config.branches
        if confidence >= history.confident_high:
            return few
        return many if confidence < history.confident_low else some

    def _expandable(self, depth: int, probability: float, room: int, history: History) -> bool:
        """Evaluate lines 14 to 25 for a node `depth` below the root, so depth - 1 below u_0."""
        config = self.config
        if depth > config.max_depth or depth >= room:
            return False
        deep = depth > history.depth
        return probability >= max(config.prune, config.stop, config.deep if deep else 0.0)


@policy("dynatree", verifier="nss", options_of=DynaTreeConfig)
def dynatree(**options: Any) -> DynaTree:
    """Make DynaTree from the fields of `DynaTreeConfig`."""
    return DynaTree(DynaTreeConfig(**options))
