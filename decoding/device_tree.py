"""Draft tree whose tokens stay on the device, so that a step needs one device-to-host copy.

The host knows the number of nodes and how deep they may lie. Every draw is a node of its own,
since only the device knows if a token was drawn again: `first` marks it there.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nde_talf.decoding.device import upload
from nde_talf.decoding.sampling import Rng, SamplingSetting, warp
from nde_talf.decoding.setting import RAW, feature_setting
from nde_talf.decoding.tree import DraftTree, Read


class DeviceTree:
    """N draws in order of depth, the root first.

    The host never looks at the tensors before `read`.

    Attributes:
        tokens: [N], long.
        parents: [N], long. The first draw that is the node's parent; -1 for the root.
        first: [N], long. The first draw of the same token under the same parent; a node that was
            drawn once is its own.
        sees: [N, N], bool. Row n is True at the nodes from the root to n, n included.
        q: of every node the distribution [V] that its children were drawn from, or None.
        p: [N, V]. The target's distributions, after its pass.
        logits: at temperature 0, where features look at unwarped rows, [N, V]; else None.
        depth: the largest depth that a node can have.
        max_draws: the largest number of draws that one node can have.
        tips: the nodes of the last level.
        rule: the verifier that goes with this tree, where its policy chose one.
    """

    on_device: ClassVar[Literal[True]] = True

    def __init__(self, root: int, q: Tensor):
        self.tokens = upload(torch.tensor([root]), q.device)
        self.first = torch.zeros(1, dtype=torch.long, device=q.device)
        self.parents, self.sees = self.first - 1, (self.first == 0)[None]
        self.q: list[Tensor | None] = [q]
        self.p = q.new_empty(0)
        self.logits: Tensor | None = None
        self.depth = self.max_draws = 0
        self.tips = [0]
        self.rule: Any = None

    def __len__(self) -> int:
        return len(self.q)

    def q_at(self, nodes: list[int]) -> Tensor:
        """Q [n, V] at nodes that have been expanded."""
        return torch.stack([row for row in (self.q[node] for node in nodes) if row is not None])

    def draw(self, count: int, rng: Rng) -> None:
        """Let every path go on with `count` i.i.d. draws; the q of the tips have to be there."""
        start, tips = len(self), self.tips
        drawn_at = torch.tensor([tip for tip in tips for _ in range(count)])
        parents = self.first.index_select(0, upload(drawn_at, self.first.device))
        # Tips that are the same node draw from the same row, so that its q is exactly what its
        # children were drawn from.
        tokens = rng.categorical(self.q_at(tips).index_select(0, parents - tips[0]))
        same = (parents[:, None] == parents) & (tokens[:, None] == tokens)
        first = same.to(torch.uint8).argmax(1) + start
        self.tokens = torch.cat([self.tokens, tokens])
        self.parents = torch.cat([self.parents, parents])
        self.first, count = torch.cat([self.first, first]), len(drawn_at)
        itself = torch.eye(count, dtype=torch.bool, device=first.device)
        fresh = torch.cat([self.sees.index_select(0, parents), itself], 1)
        self.sees = torch.cat([F.pad(self.sees, (0, count)), fresh])
        self.depth, self.max_draws = self.depth + 1, max(self.max_draws, count)
        self.q += [None] * count
        self.tips = list(range(start, len(self)))

    @property
    def topology(self) -> Tensor:
        """Return which rows of this tree each row sees, as a session asks for it."""
        return self.sees

    def rows(self, nodes: list[int], known: dict[int, int]) -> tuple[Tensor, Tensor]:
        """Return the tokens [n] of `nodes`, and the rows [n, m] that they see, the n included.

        The session holds all nodes between the root and these, in order.
        """
        at = slice(nodes[0], nodes[-1] + 1)
        return self.tokens[at], self.sees[at, 1 : at.stop]

    def at_parents(self, nodes: list[int], known: dict[int, int], states: Tensor) -> Tensor:
        """See `DraftTree.at_parents`."""
        return states.index_select(0, self.parents[nodes[0] : nodes[-1] + 1])

    def score(self, logits: Tensor, setting: SamplingSetting) -> None:
        """Set `p` from the target's `logits` [N, V]."""
        self.p = warp(logits, setting)
        self.logits = None if feature_setting(setting) == setting else logits

    def commit(self, end: Tensor, token: Tensor) -> "DeviceAccepted":
        """Return what a verdict commits: the path to the last accepted node, and a token after it.

        Args:
            end: [1], the last accepted node.
            token: [1], the token after it.
        """
        path = self.sees.index_select(0, end)
        order = path.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        nodes, root = order[0, : self.depth + 1], path.sum(1) - 1
        drawn = torch.cat([self.tokens.index_select(0, nodes[1:]), token])
        at = torch.arange(len(nodes), device=nodes.device)
        # No model takes a token that says that there is none.
        tokens = torch.where(at < root, drawn, token.clamp(min=0))
        return DeviceAccepted(self, end, token, nodes, tokens, root)

    def to_host(self) -> DraftTree:
        """Copy the tree to the host, with repeated draws merged. Waits for the device."""
        tokens, parents = self.tokens.tolist(), self.parents.tolist()
        tree, merged, nodes = DraftTree.rooted(tokens[0], self.q[0]), [0], [0]
        for node in range(1, len(tokens)):
            merged.append(tree.add(merged[parents[node]], tokens[node]))
            if merged[-1] == len(nodes):
                nodes.append(node)
                tree.q[-1] = self.q[node]
        tree.p = [self.p[node] for node in nodes] if len(self.p) else ()
        return tree


class DeviceAccepted(NamedTuple):
    """Nodes and tokens of a `DeviceTree` that a verdict commits, on the device.

    Entries after the end of a shorter path are meaningless.

    Attributes:
        end: [1]. The last accepted node.
        token: [1]. The target's token after it; negative where a distribution had no mass.
        nodes: [D + 1]. From the root to the last accepted node.
        tokens: [D + 1]. Those of nodes[1:], and the target's token at index `root`.
        root: [1]. Index of the next root in `tokens`, which is the number of accepted nodes.
    """

    tree: DeviceTree
    end: Tensor
    token: Tensor
    nodes: Tensor
    tokens: Tensor
    root: Tensor
    path: Sequence[int] = ()  # the host knows none of the accepted nodes yet

    def of(self, states: Tensor) -> Tensor:
        """See `Accepted.of`: [D + 1, ...]."""
        return states.index_select(0, self.nodes)

    def last(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `Accepted.last`."""
        unwarped = self.tree.logits
        row = (self.tree.p if unwarped is None else unwarped).index_select(0, self.end)[0]
        return row if unwarped is None else warp(row, RAW), hidden.index_select(0, self.end)[0]

    def within(self, room: int) -> "DeviceAccepted | None":
        """The first `room` of the tokens; None where there is no room.

        Where it cuts, the next root has no position left.
        """
        if room >= len(self.tokens):
            return self
        cut = self._replace(
            nodes=self.nodes[:room], tokens=self.tokens[:room], root=self.root.clamp(max=room - 1)
        )
        return cut if room else None

    def read(self) -> Read:
        """Wait for the device, once."""
        tree = self.tree
        nodes = (tree.first == torch.arange(len(tree), device=tree.first.device)).sum(
            0, keepdim=True
        )
        numbers = torch.cat([self.nodes, self.tokens, self.root, self.token, nodes]).tolist()
        deep = len(self.nodes)
        tau, token, count = numbers[2 * deep :]
        return Read(numbers[: tau + 1], [*numbers[deep : deep + tau], token], count)
