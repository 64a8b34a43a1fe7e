"""Drafted paths for the requests of a serving engine's batch.

No engine is needed: texts in, drafted tokens out.

At each step the engine lists the texts of its batch. It does not say in which row a text was in the
step before: rows move, and requests are preempted and resume. So a row takes the drafter that has
read the beginning of its text, and its cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from nde_talf.decoding.actions import Action
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.drafters.ngram import NgramDrafter
from nde_talf.decoding.policies.base import DecodingState
from nde_talf.decoding.policies.delayed import draft_delayed
from nde_talf.decoding.sampling.rng import Rng
from nde_talf.decoding.sampling.sampling_setting import SamplingSetting
from nde_talf.decoding.tree import Accepted, DraftTree

GREEDY = SamplingSetting(0.0)
"""Setting that paths are drawn with: always the draft's most probable token.

An engine that is not given q verifies a drafted token as one that the draft was certain of, at any
temperature of the target.
"""
NO_FEATURES = torch.empty(0)
"""Features of the target, which an engine does not hand out."""
IDLE = 8
"""Texts outside the batch whose caches are kept: a preempted request may come back."""


@dataclass
class Followed:
    """One text and its drafter, which has read all of it.

    Attributes:
        text: [n] committed tokens, the last one being the root.
        tree: the path that was drafted after it.
        steps: how many tokens were drafted at a time, and how many of them were accepted, step by
            step.
    """

    text: np.ndarray
    drafter: Drafter
    tree: DraftTree
    steps: list[tuple[int, int]] = field(default_factory=list)

    def begins(self, text: np.ndarray) -> bool:
        """Return True if `text` continues this one."""
        read = len(self.text)
        return (
            read < len(text)
            and bool(self.text[-1] == text[read - 1])  # which tells most texts apart
            and np.array_equal(self.text, text[:read])
        )

    def advance(self, text: np.ndarray) -> None:
        """Read on to the end of `text`.

        Drafted tokens that it continues with count as accepted; its last one never does, being the
        target's own.
        """
        tokens, tree, path = text[len(self.text) :].tolist(), self.tree, list[int]()
        for node, token in enumerate(tokens[:-1], 1):  # of a path, whose nodes are in order
            if tree.tokens[node : node + 1] != [token]:
                break
            path.append(node)
        self.steps.append((len(tree) - 1, len(path)))
        self.drafter.advance(Accepted(tree, path, tokens), NO_FEATURES)
        self.text = text.copy()


class Proposals:
    """Drafts for all requests of a batch, one request after the other.

    Args:
        drafter: of which every text gets a fork.
        max_tokens: drafted at a time.
    """

    def __init__(self, drafter: Drafter, max_tokens: int):
        self.drafter, self.max_tokens = drafter, max_tokens
        # By row of the last batch, then those that left it, the latest first.
        self.followed: list[Followed] = []
        self._rng = Rng.seeded(0)

    @torch.inference_mode()
    def propose(
        self, texts: Sequence[Sequence[int] | np.ndarray], max_length: int
    ) -> list[list[int]]:
        """The drafted tokens after each text, none where the text has no room for them.

        Args:
            texts: of every row its committed tokens; an empty one gets no draft and keeps no cache.
            max_length: of a text and its drafts.
        """
        limit = min(max_length, self.drafter.max_context)
        asked = {i: np.asarray(text) for i, text in enumerate(texts) if 2 <= len(text) < limit}
        now, sizes = self._found([*asked.values()]), [len(text) for text in asked.values()]
        drafted: list[list[int]] = [[] for _ in texts]
        for row, one, size in zip(asked, now, sizes, strict=True):
            one.tree = self._path(one, min(self.max_tokens, limit - size))
            drafted[row] = one.tree.tokens[1:]
        return drafted

    def _found(self, texts: list[np.ndarray]) -> list[Followed]:
        """Return the drafter of each text, which has read it."""
        free, now = dict(enumerate(self.followed)), list[Followed]()
        for row, text in enumerate(texts):
            order = [row, *free] if row in free else free
            at = next((at for at in order if free[at].begins(text)), None)
            if at is None:
                one = Followed(text.copy(), self.drafter.fork(), DraftTree.rooted(int(text[-1])))
                one.drafter.start(text[:-1].tolist(), int(text[-1]), NO_FEATURES, GREEDY)
            else:
                one = free.pop(at)
                one.advance(text)
            now.append(one)
        self.followed = now + [*free.values()][:IDLE]
        return now

    def _path(self, one: Followed, length: int) -> DraftTree:
        root, drafter = int(one.text[-1]), one.drafter
        if not isinstance(drafter, NgramDrafter):
            state = DecodingState(root, len(one.text), length, GREEDY, NO_FEATURES, NO_FEATURES)
            return draft_delayed(Action(1, 0, length), state, drafter, self._rng)
        tree = DraftTree.rooted(root)
        while len(tree) <= length and (
            found := drafter.index.continuations(drafter.match(tree, len(tree) - 1))
        ):
            tree.add(len(tree) - 1, found[0][0])
        return tree
