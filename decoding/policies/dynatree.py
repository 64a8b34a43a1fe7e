"""DynaTree: breadth by the draft's confidence, depth by the path's probability, both adapted to what was accepted
(section 3.3 and Algorithm 1, DynaTree paper)."""

from collections import deque
from dataclasses import InitVar, dataclass

from decoding.common.renamed import notice
from decoding.drafter import Drafter
from decoding.policies.base import DecodingState, require_positive, require_rising
from decoding.policies.beam import top_tokens
from decoding.sampling import Rng
from decoding.tree import DraftTree


@dataclass(frozen=True)
class DynaTreeConfig:
    """Defaults as in Appendix B of the DynaTree paper, which leaves rho, prune and the history's schedule open.

    branches: children of a node of confidence (largest q) at least confident_high, between the two, below confident_low. depth,
    max_depth: D_0 and D_max. stop, deep: rho_stop and rho_deep, path probabilities that end a branch, or let it grow beyond
    depth. prune: tau, below which a leaf is dropped. nodes: budget. window: steps that the history looks back on, 0 for none;
    low, high: mean fraction of the drafted depth accepted below (above) which depth falls (rises) by one and confident_high
    moves by `step`, within bounds.
    """

    branches: tuple[int, int, int] = (1, 2, 3)
    confident_low: float = 0.4
    confident_high: float = 0.9
    depth: int = 5
    max_depth: int = 8
    stop: float = 0.02
    deep: float = 0.2
    prune: float = 0.01
    nodes: int = 64
    window: int = 8
    low: float = 0.3
    high: float = 0.6
    step: float = 0.05
    most_depth: InitVar[int | None] = None  # the old name of max_depth

    def __post_init__(self, most_depth: int | None) -> None:
        if most_depth is not None:
            notice("most_depth", "max_depth")
            object.__setattr__(self, "max_depth", most_depth)
        require_positive(depth=self.depth, nodes=self.nodes, branches=min(self.branches))
        require_rising(confident_low=self.confident_low, confident_high=self.confident_high)
        require_rising(stop=self.stop, deep=self.deep)
        require_rising(low=self.low, high=self.high)
        require_rising(depth=self.depth - 0.5, max_depth=self.max_depth)


class History:
    """What was learned from one sequence. depth, confident_high: the adapted values; drafted: the depth of the last tree."""

    def __init__(self, config: DynaTreeConfig):
        self.config, self.depth, self.confident_high, self.drafted = config, config.depth, config.confident_high, 0
        self._accepted: deque[float] = deque(maxlen=max(1, config.window))

    def learn(self, accepted: float) -> None:
        """Draft deeper and narrower while much is accepted, shallower and wider while little is: at most one step a draft.
        accepted: fraction of the last tree's depth."""
        config = self.config
        self._accepted.append(accepted)
        mean = sum(self._accepted) / len(self._accepted)
        if mean > config.high:
            self.depth = min(self.depth + 1, config.max_depth - 1) if config.max_depth > 1 else 1
            self.confident_high = max(self.confident_high - config.step, config.confident_low + config.step)
        elif mean < config.low:
            self.depth = max(self.depth - 1, 1)
            self.confident_high = min(self.confident_high + config.step, 1.0)


class DynaTree:
    """Picks tokens, breadth first, all nodes of a level in one draft pass. For greedy decoding as in the paper, and under
    NSS for sampling. Each sequence has a history (`DecodingState.memory`)."""

    trees = "top_k"

    def __init__(self, config: DynaTreeConfig = DynaTreeConfig()):
        self.config = config

    def draft(self, state: DecodingState, drafter: Drafter, rng: Rng) -> DraftTree:
        history = state.memory.setdefault(self, History(self.config))
        if state.tau is not None and history.drafted and self.config.window:
            history.learn(state.tau / history.drafted)
        config, tree = self.config, DraftTree.rooted(state.root, drafter.root.q)
        level, probability = [0] if state.room else [], {0: 1.0}
        while level and len(tree) <= config.nodes:
            grown = []
            for node, best in zip(level, top_tokens([tree.q_at(node) for node in level], max(config.branches)), strict=True):
                for value, token in best[: self._branches(best[0][0], history)]:
                    own = probability[node] * value
                    if len(tree) <= config.nodes and own >= config.prune:
                        child = tree.add(node, token)
                        probability[child] = own
                        grown.append(child)
            level = [node for node in grown if self._expandable(tree.depth[node], probability[node], state.room, history)]
            if level and len(tree) <= config.nodes:
                drafter.expand(tree, level)
        history.drafted = max(tree.depth)
        return tree

    def _branches(self, confidence: float, history: History) -> int:
        few, some, many = self.config.branches
        if confidence >= history.confident_high:
            return few
        return many if confidence < self.config.confident_low else some

    def _expandable(self, depth: int, probability: float, room: int, history: History) -> bool:
        config = self.config
        if depth >= min(config.max_depth, room) or probability < config.stop:
            return False
        return depth < history.depth or probability >= config.deep
