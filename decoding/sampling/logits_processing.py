"""Logits that depend on the text so far: penalties on repetition, forbidden words, grammars.

The target's law at a node of a tree is then a function of the text up to that node, not of its
logits alone. So every row is processed with its own text, before it is warped. For example, where
"a" was committed and the tree holds the path "b", "c", the three rows are processed after "a", "a
b" and "a b c". All else stays as it is: each verification rule is lossless for whatever p its rows
hold, and p is what plain decoding would sample from after the same text.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nde_talf.decoding.tree import DraftTree


class LogitsProcess:
    """A pure function: equal texts and logits give equal results, in any order of calls.

    One with textless = True looks at logits alone. It is called once for all rows, with no texts.
    """

    textless: bool = False

    def __call__(self, texts: list[list[int]], logits: Tensor) -> Tensor:
        """Return the logits [n, V] that count in the place of `logits`.

        Args:
            texts: n texts of one length, each a prompt and what follows.
            logits: [n, V], after each of them.
        """
        raise NotImplementedError


class Processed:
    """A `LogitsProcess` for one sequence, asked by its target or by its draft.

    A grammar may have no answer after a token that it forbids, or after a stop token. So two kinds
    of nodes are not asked about, and their rows stay as they were: those behind a token of
    processed logit -inf, whose p (or q) is 0, so that no rule accepts it; and those behind a stop
    token, with which the text ends.

    Attributes:
        text: the sequence's tokens, the root of the next tree last. Target and draft share the
            list, which the decoder extends.
        stops: tokens that end the text after its first `start` tokens, the prompt.
    """

    def __init__(self, process: LogitsProcess, text: list[int], stops: frozenset[int], start: int):
        self.process, self.text, self.stops, self.start = process, text, stops, start
        self._length = 0  # of the text that these rows follow
        self._rows: dict[
            tuple[int, ...], Tensor | None
        ] = {}  # by text; None where it was not asked

    def for_draft(self) -> "Processed":
        """Return the same process and text for the draft's own rows."""
        return Processed(self.process, self.text, self.stops, self.start)

    def texts(self, tree: DraftTree, nodes: Iterable[int]) -> list[list[int]]:
        """Return the text up to and with each of `nodes`."""
        if self.process.textless:
            return []
        return [[*self.text, *(tree.tokens[each] for each in tree.path(node))] for node in nodes]

    def __call__(self, texts: Sequence[list[int]], logits: Tensor) -> Tensor:
        """Process `logits` [n, V] after `texts`, which may differ in length."""
        if self.process.textless:
            return self.process([], logits.clone())  # which it may change in place
        if self._length != len(self.text):
            self._length, self._rows = len(self.text), {}
        results = list(logits.float())
        for length in sorted({len(text) for text in texts}):
            at = [row for row, text in enumerate(texts) if len(text) == length]
            self._rows |= dict.fromkeys((tuple(texts[row]) for row in at), None)
            if asked := [row for row in at if self._possible(texts[row])]:
                for row, processed in zip(
                    asked, self.process([texts[row] for row in asked], logits[asked]), strict=True
                ):
                    self._rows[tuple(texts[row])] = results[row] = processed
        return torch.stack(results)

    def _possible(self, text: list[int]) -> bool:
        """Return False if the last token may not follow the others, as far as these were asked.

        Committed tokens may.
        """
        if not self.stops.isdisjoint(text[self.start :]):
            return False
        before = tuple(text[:-1])
        if before not in self._rows or len(text) <= len(self.text):
            return True
        row = self._rows[before]
        return row is not None and float(row[text[-1]]) > torch.finfo(row.dtype).min
