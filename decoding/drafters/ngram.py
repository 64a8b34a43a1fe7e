"""Drafting without a draft model: continue as earlier in prompt and text (prompt lookup).

Example: after "a b c d a b", the last two tokens occur at the beginning too, where "c d a b"
follows. So c is drafted, then d. With several earlier occurrences their continuations make a tree:
`nde_talf.decoding.policies.ngram.NgramTree` picks the most frequent ones. Its trees are for NSS and
greedy matching.

Source: A. Saxena, "Prompt Lookup Decoding" (2023), which drafts one continuation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from nde_talf.decoding.common.arguments import Positive, checked
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.drafters.base import Drafter, DraftPoint
from nde_talf.decoding.drafters.ngram_settings import NgramConfig
from nde_talf.decoding.sampling.rng import SamplingSetting
from nde_talf.decoding.tree import Accepted, DraftTree


class Match(NamedTuple):
    """Occurrences of a context in the text.

    Attributes:
        size: how many of its last tokens occur there; 0 where there are too few.
        after: for each occurrence the index in the text of the token after it, the latest first.
    """

    size: int
    after: list[int]


class NgramIndex:
    """A text, and where every n-gram of min_size to max_size tokens occurs in it.

    A new token costs one entry a size.
    """

    def __init__(self, config: NgramConfig):
        self.config = config
        self.text: list[int] = []
        sizes = range(config.max_size, config.min_size - 1, -1)
        # By size: of every n-gram the index of the token after its latest occurrence, and of every
        # such index the one before.
        self._latest: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}
        self._before: dict[int, list[int]] = {size: [] for size in sizes}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        text, largest = self.text, self.config.max_size
        for token in tokens:
            at, ending = len(text), tuple(text[-largest:])
            for size, latest in self._latest.items():
                key = ending[-size:]
                self._before[size].append(latest.get(key, 0))
                if size <= at:
                    latest[key] = at
            text.append(token)

    def match(self, path: list[int]) -> Match:
        """Find the longest ending of the text, followed by `path`, that occurs earlier in the text.

        An occurrence ends before the text's last token.
        """
        ending = (*self.text[-self.config.max_size :], *path)
        for size, latest in self._latest.items():
            if size <= len(ending) and (at := latest.get(ending[-size:], 0)):
                after = list[int]()
                while at and len(after) < self.config.matches:
                    after.append(at)
                    at = self._before[size][at]
                return Match(size, after)
        return Match(0, [])

    def follow(self, match: Match, token: int) -> Match | None:
        """Keep the occurrences that `token` and one more token follow; None if none do."""
        text = self.text
        after = [at + 1 for at in match.after if text[at] == token and at + 1 < len(text)]
        return Match(match.size + 1, after) if after else None

    def continuations(self, match: Match) -> list[tuple[int, float]]:
        """List the tokens that come next, each with its fraction of the occurrences.

        The most frequent comes first; of equals, the latest.
        """
        counts = Counter(self.text[at] for at in match.after)
        return [(token, count / len(match.after)) for token, count in counts.most_common()]


class Tested(NamedTuple):
    """Counts of the drafts at matches of one size.

    Attributes are the nodes that were verified with children, and those where a child was
    accepted.
    """

    nodes: int = 0
    accepted: int = 0


class NgramDrafter(Drafter):
    """A `Drafter` of continuations in the text so far.

    It needs no model.

    Attributes:
        tested: counts of this sequence, by size of the match.
    """

    _matches: dict[int, Match]

    @checked
    def __init__(self, vocab_size: Positive, config: NgramConfig | None = None):
        self.vocab_size, self.config = vocab_size, config or NgramConfig()

    def start(
        self, prompt: list[int], token: int, features: Tensor, setting: SamplingSetting
    ) -> None:
        """See `Drafter.start`."""
        self.setting, self.index = setting, NgramIndex(self.config)
        self.tested: dict[int, Tested] = {}
        self.previous = self.root = DraftPoint(lambda: features.new_empty(0), self.expand)
        self._append([*prompt, token])

    def rate(self, size: int) -> float:
        """Estimate the probability that a token drafted at a match of this size is accepted.

        It is the fraction in this sequence so far, with `size` acceptances and one rejection
        supposed before it. The longer a match, the more it is trusted.
        """
        tested = self.tested.get(size, Tested())
        return (tested.accepted + size) / (tested.nodes + size + 1)

    def match(self, tree: DraftTree, node: int) -> Match:
        """Return the match at a node; its parent has been asked for before."""
        if node not in self._matches:
            followed = self.index.follow(self._matches[tree.parents[node]], tree.tokens[node])
            self._matches[node] = followed or self.index.match(
                [tree.tokens[each] for each in tree.path(node)]
            )
        return self._matches[node]

    def expand(self, *_: Any) -> NoReturn:
        """Raise UserError: continuations are picked, and nothing is drawn from them."""
        raise UserError(
            "NgramDrafter: its tokens are picked, not drawn. Take the policy NgramTree."
        )

    def rerank(self, nodes: list[int]) -> None:
        """See `Drafter.rerank`."""
        self._matches = {
            i: self._matches[node] for i, node in enumerate(nodes) if node in self._matches
        }

    def advance(self, accepted: Accepted, features: Tensor) -> None:
        """See `Drafter.advance`."""
        self._learn(accepted)
        self._append(accepted.tokens)

    def _append(self, tokens: list[int]) -> None:
        """Go on to a new root."""
        self.index.extend(tokens)
        self._matches = {0: self.index.match([])}

    def _learn(self, accepted: Accepted) -> None:
        """Count the accepted nodes with children."""
        path = {0, *accepted.path}
        for node, match in self._matches.items():
            if match.size and node in path and (children := accepted.tree.children[node]):
                old, hit = self.tested.get(match.size, Tested()), not path.isdisjoint(children)
                self.tested[match.size] = Tested(old.nodes + 1, old.accepted + hit)
