"""Drafting a level and verifying a tree as functions of fixed shapes, which CUDA graphs can record
once and replay.

With static shapes the forward passes are graphs already (`nde_talf.decoding.static`). What lies
between them is some forty small operations a level, and more for verification, each of which the
host launches. Here they are two functions of tensors:

    level:         hidden states at the tips  ->  q there, the tokens drawn, the grown tree
    verification:  the target's logits, the tree, q  ->  the last accepted node, the token after it,
        the path

A replay repeats the operations of the recording on other numbers. So a function may not look at a
number, its shapes are those of the recording, and its random numbers are an input: they are drawn
outside, in the order in which an unrecorded step draws them. Trees are padded with nodes of parent
-2, which no rule visits (`nde_talf.decoding.rules.trees`).

A policy says which trees it may draft (`TreePolicy.shapes`). From these come at most eight sizes of
trees, one for each size of a pass, all recorded at the first prompt of a sampling setting. Other
trees are drafted and verified one operation at a time.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Lock
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from nde_talf.decoding.actions import Action
from nde_talf.decoding.device import integers, upload
from nde_talf.decoding.device_tree import DeviceAccepted, DeviceTree, path_of
from nde_talf.decoding.rules.trees import Trees
from nde_talf.decoding.sampling import RAW, SamplingSetting, inverse_cdf, warp
from nde_talf.decoding.setting import feature_setting
from nde_talf.decoding.static import Function, Record


class Recorded:
    """`function` on inputs of fixed shapes and addresses.

    An input that is smaller fills the first entries; what was in the others stays, so `function`
    may not let them matter.
    """

    def __init__(self, function: Function, inputs: Sequence[Tensor], record: Record):
        self.inputs, self._lock = list(inputs), Lock()
        self._replay = record(function, self.inputs)

    def __call__(self, *values: Tensor) -> Sequence[Tensor]:
        with self._lock:  # threads may share a decoder
            for own, value in zip(self.inputs, values, strict=True):
                own[tuple(slice(size) for size in value.shape)].copy_(value)
            return self._replay(*self.inputs)


class Supplied:
    """`Rng` for device rules, from `uniforms` [n] that were drawn before. used: how many of them
    were taken.
    """

    def __init__(self, uniforms: Tensor):
        self.uniforms, self.used = uniforms, 0

    def _next(self, count: int) -> Tensor:
        self.used += count
        return self.uniforms[self.used - count : self.used]

    def bernoulli(self, probability: Tensor) -> Tensor:
        return self._next(len(probability)) < probability

    def categorical(self, weights: Tensor) -> Tensor:
        return inverse_cdf(weights, self._next(len(weights))[:, None])[:, 0]


class Bucket(NamedTuple):
    """Trees of up to `size` nodes, the root included, whose nodes lie up to `depth` deep and have
    up to `draws` draws.
    """

    size: int
    depth: int
    draws: int


def buckets(shapes: Iterable[Action], size: Callable[[int], int]) -> list[Bucket]:
    """One for each size of a pass that trees of `shapes` need.

    For example (3, 0, 5) alone gives Bucket(16, 5, 3), where passes have 1, 2, 4, ... rows.
    """
    found: dict[int, Bucket] = {}
    for action in shapes:
        rows = size(action.nodes)
        known = found.get(rows, Bucket(rows, 0, 0))
        draws = action.k if action.l2 else min(1, action.l1)
        found[rows] = Bucket(rows, max(known.depth, action.depth), max(known.draws, draws))
    return [found[rows] for rows in sorted(found) if found[rows].depth]


def draft_level(
    distribution: Callable[[Tensor], Tensor],
    hidden: Tensor,
    info: Tensor,
    uniforms: Tensor,
    tokens: Tensor,
    parents: Tensor,
    first: Tensor,
    sees: Tensor,
) -> Sequence[Tensor]:
    """Draw a level of i.i.d. tokens and grow the tree by it; the same as `DeviceTree.draw`.

    Args:
        distribution: from hidden states to q.
        hidden: [M, H], at the tips.
        info: [3 + M]: the number of the first tip, the number of nodes so far, how many draws
            count, and of each draw the number of its tip among the tips.
        uniforms: [M], float64.
        tokens, parents, first: [C + 1] of the tree, see `DeviceTree`; the last entry takes what
            does not count.
        sees: [C + 1, C + 1].

    Returns:
        q [M, V] at the tips, and the last four as they are then.
    """
    start, end, count = info[:1], info[1:2], info[2:3]
    number = torch.arange(len(uniforms), device=hidden.device)
    q = distribution(hidden)
    above = first.index_select(0, info[3:] + start)
    # Tips that are the same node draw from the same row, so that its q is exactly what its children
    # were drawn from.
    drawn = inverse_cdf(q.index_select(0, above - start), uniforms[:, None])[:, 0]
    same = (above[:, None] == above) & (drawn[:, None] == drawn)
    slots = torch.where(number < count, number + end, len(tokens) - 1)
    own = slots[:, None] == torch.arange(len(tokens), device=hidden.device)
    return (
        q,
        tokens.index_copy(0, slots, drawn),
        parents.index_copy(0, slots, above),
        first.index_copy(0, slots, same.to(torch.uint8).argmax(1) + end),
        sees.index_copy(0, slots, sees.index_select(0, above) | own),
    )


def verify_tree(
    rule: Any,
    setting: SamplingSetting,
    bucket: Bucket,
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    sees: Tensor,
    q: Tensor,
    uniforms: Tensor,
) -> Sequence[Tensor]:
    """Warp the target's rows, apply `rule` and find the path that it accepts; as
    `DeviceTree.score`, the verifier and `DeviceTree.commit`.

    Args:
        rule: the verifier.
        logits, q: [size, V]; q at nodes with children.
        tokens, parents: [size], sees: [size, size].
        uniforms: as many as the rule takes, float64.

    Returns:
        end [1], token [1], and nodes, tokens and root as in `DeviceAccepted`; the target's row [1,
        V] at `end` as features look at it.
    """
    p = warp(logits, setting)
    rows = partial(torch.index_select, p, 0), partial(torch.index_select, q, 0)
    trees = Trees(tokens[None], parents[None], *rows, bucket.depth, bucket.draws)
    end, token = rule.on_device(trees, Supplied(uniforms))
    look = feature_setting(setting)
    row = (p if look == setting else logits).index_select(0, end)
    return (
        end,
        token,
        *path_of(tokens, sees, bucket.depth, end, token),
        row if look == setting else warp(row, RAW),
    )


class CapturedTree(DeviceTree):
    """A `DeviceTree` of i.i.d. draws that is grown by recorded levels.

    Attributes:
        padded: tokens, parents and first [C + 1], and sees [C + 1, C + 1], of which the nodes are
            the first entries.
    """

    captured: ClassVar[Literal[True]] = True

    def __init__(self, root: int, hidden: Tensor, captures: "Captures"):
        super().__init__(root, hidden)
        self.q, self._captures, self._hidden = [None], captures, hidden[None]
        size = captures.capacity + 1
        blank = torch.zeros(size, dtype=torch.long, device=hidden.device)
        is_root = torch.arange(size, device=hidden.device) == 0
        self.padded: Sequence[Tensor] = (
            blank + self.tokens * is_root,
            is_root.long() - 2,
            blank,
            is_root[:, None] & is_root,
        )

    def reached(self, hidden: Tensor) -> None:
        """The draft's hidden states [n, H] at the tips."""
        self._hidden = hidden

    def draw(self, counts: int | Sequence[int], rng: Any) -> None:
        """See `DeviceTree.draw`."""
        tips, end = self.tips, len(self)
        counts = [counts] * len(tips) if isinstance(counts, int) else counts
        at = [tip for tip, count in enumerate(counts) for _ in range(count)]
        level = self._captures.level(len(at))
        info = upload(
            integers([tips[0], end, len(at), *at, *[0] * (len(level.inputs[2]) - len(at))]),
            self._hidden.device,
        )
        q, *self.padded = level(
            self._hidden, info, rng.uniforms(len(at), self._hidden.device), *self.padded
        )
        for tip, row in zip(tips, q.unbind(), strict=False):
            self.q[tip] = row
        self.q += [None] * len(at)
        count, self.depth, self.max_draws = (
            len(self.q),
            self.depth + 1,
            max(self.max_draws, *counts),
        )
        self.tokens, self.parents, self.first = (padded[:count] for padded in self.padded[:3])
        self.sees = self.padded[3][:count, :count]
        self.starts.append(end)


class Captures:
    """What is recorded for one decoder.

    Args:
        shapes: of the trees that its policy may draft.
        size: number of nodes -> rows of a pass that holds them (`StaticShapes.size`).
        rules: verifiers that may be asked for.
        record: how; see `Record`.
    """

    def __init__(
        self,
        shapes: Iterable[Action],
        size: Callable[[int], int],
        rules: Sequence[Any],
        record: Record,
    ):
        self.buckets, self.rules, self.record = buckets(shapes, size), list(rules), record
        self.capacity = self.buckets[-1].size if self.buckets else 0
        self._widths = sorted(
            {size(draws) for bucket in self.buckets for draws in (1, bucket.draws)}
        )
        self._levels: dict[Any, dict[int, Recorded]] = {}
        self._verifications: dict[Any, Recorded] = {}

    def tree(self, root: int, hidden: Tensor) -> CapturedTree:
        """The tree of the root alone, where the draft's hidden state is `hidden` [H]."""
        return CapturedTree(root, hidden, self)

    def begin(self, drafter: Any, setting: SamplingSetting, like: Tensor) -> None:
        """Record all for a sequence, where that is not done yet: levels for the setting of
        `drafter`, whose sequence has begun, verification for the target's `setting`. like: a row
        [V] of the target's logits.
        """
        hidden, key = drafter.root.hidden, (drafter.setting, drafter.root.hidden.dtype)
        if key not in self._levels:
            blank = self.tree(0, hidden)
            function = partial(draft_level, drafter.distribution())
            self._levels[key] = {
                width: Recorded(
                    function,
                    [*_level_inputs(width, hidden), *(x.clone() for x in blank.padded)],
                    self.record,
                )
                for width in self._widths
            }
        self._now, self._setting = self._levels[key], setting
        for rule in self.rules:
            for bucket in self.buckets:
                if (rule.name, setting, bucket) not in self._verifications:
                    self._verifications[rule.name, setting, bucket] = self._verification(
                        rule, setting, bucket, like
                    )

    def _verification(
        self, rule: Any, setting: SamplingSetting, bucket: Bucket, like: Tensor
    ) -> Recorded:
        rows = like.new_zeros(bucket.size, like.shape[-1])
        tokens = torch.zeros(bucket.size, dtype=torch.long, device=like.device)
        parents = (torch.arange(bucket.size, device=like.device) == 0).long() - 2
        inputs = [rows, tokens, parents, parents[:, None] + parents == -2, warp(rows, RAW)]
        # How many random numbers it takes, from a trial.
        row = partial(torch.index_select, inputs[4], 0)
        trial = Trees(tokens[None], parents[None], row, row, bucket.depth, bucket.draws)
        rng = Supplied(
            torch.zeros(
                8 * (bucket.depth + 2) * (bucket.draws + 1), dtype=torch.float64, device=like.device
            )
        )
        rule.on_device(trial, rng)
        return Recorded(
            partial(verify_tree, rule, setting, bucket),
            [*inputs, rng.uniforms[: rng.used].clone()],
            self.record,
        )

    def fits(self, nodes: int, depth: int, draws: int) -> Bucket | None:
        """The smallest bucket that holds such trees."""
        return next(
            (b for b in self.buckets if b.size >= nodes and b.depth >= depth and b.draws >= draws),
            None,
        )

    def level(self, draws: int) -> Recorded:
        """The recorded level of so many draws."""
        return next(self._now[width] for width in self._widths if width >= draws)

    def verified(
        self, tree: DeviceTree, logits: Tensor, rule: Any, rng: Any
    ) -> DeviceAccepted | None:
        """What `rule` accepts of a tree with the target's `logits` [N, V]; None where nothing is
        recorded for it.
        """
        bucket = self.fits(len(tree), tree.depth, tree.max_draws)
        if (
            not isinstance(tree, CapturedTree)
            or not tree.depth
            or bucket is None
            or rule not in self.rules
        ):
            return None
        recorded, size = self._verifications[rule.name, self._setting, bucket], bucket.size
        q = torch.stack([row for row in tree.q if row is not None])
        tokens, parents, _, sees = tree.padded
        uniforms = rng.uniforms(len(recorded.inputs[-1]), logits.device)
        end, token, nodes, drawn, root, row = recorded(
            logits, tokens[:size], parents[:size], sees[:size, :size], q, uniforms
        )
        longest = tree.depth + 1
        return DeviceAccepted(tree, end, token, nodes[:longest], drawn[:longest], root, row=row)


def _level_inputs(width: int, hidden: Tensor) -> list[Tensor]:
    """Of `draft_level` in front of the tree, for `width` draws."""
    info = torch.zeros(3 + width, dtype=torch.long, device=hidden.device)
    return [
        hidden.new_zeros(width, len(hidden)),
        info,
        torch.zeros(width, dtype=torch.float64, device=hidden.device),
    ]
