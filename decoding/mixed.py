"""N-grams where the text repeats itself, and another draft elsewhere.

At every root the committed text alone decides which of the two drafts the tree, before anything is
drawn. So each step is lossless by the proof of its own rule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nde_talf.decoding.common.arguments import checked
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.drafter import Drafter
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.ngram import NgramDrafter
from nde_talf.decoding.policies.base import DecodingState, TreePolicy
from nde_talf.decoding.policies.ngram import NgramTree
from nde_talf.decoding.registry import DELAYED, VERIFIERS
from nde_talf.decoding.rules.check import check_policys_tree
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.decoding.setting import AUTO
from nde_talf.decoding.tree import Accepted, DraftTree, Verdict
from nde_talf.decoding.verifier import Verifier, check_compatible

_BEHIND = 32
"""Tokens that the other draft may not have seen before it has to catch up."""


class MixedDrafter(Drafter):
    """Drafter that asks `ngram` where the text's ending occurs earlier, and `draft` elsewhere.

    `draft` is a language model or a head. It does not run while n-grams draft. It catches up in one
    pass at the next root that it drafts from. n-grams draft where their estimated rate of
    acceptance at the root is at least `NgramConfig.min_rate`.

    Raises:
        UserError: the two have vocabularies of different sizes.
    """

    @checked
    def __init__(self, ngram: NgramDrafter, draft: Drafter):
        if ngram.vocab_size != draft.vocab_size:
            raise UserError(
                f"MixedDrafter: ngram has {ngram.vocab_size} tokens and draft {draft.vocab_size};"
                " they need the same."
            )
        self.ngram, self.draft = ngram, draft
        self.vocab_size, self.max_context = draft.vocab_size, draft.max_context
        self.feature_layers: tuple[int, ...] = draft.feature_layers

    def fork(self) -> MixedDrafter:
        """See `Drafter.fork`."""
        return MixedDrafter(self.ngram.fork(), self.draft.fork())

    def start(
        self, prompt: list[int], token: int, features: Tensor, setting: SamplingSetting
    ) -> None:
        """See `Drafter.start`. Both read the prompt, as the prefill of a draft does."""
        self.setting, self.draft.processed = setting, self.processed
        self.ngram.start(prompt, token, features, setting)
        self.draft.start(prompt, token, features, setting)
        self._late: list[tuple[Accepted, Tensor]] = []  # what the draft has not been given yet
        self._choose()

    def expand(self, tree: DraftTree, nodes: list[int]) -> None:
        """See `Drafter.expand`."""
        self._drafting.expand(tree, nodes)

    def rerank(self, nodes: list[int]) -> None:
        """See `Drafter.rerank`."""
        self._drafting.rerank(nodes)

    def advance(self, accepted: Accepted, features: Tensor) -> None:
        """See `Drafter.advance`."""
        if self.matched:
            self.ngram.advance(accepted, features)
        else:
            self.ngram.append(accepted.tokens)  # it learns nothing from what another has drafted
        self._late.append((accepted, features))
        self._choose()

    @property
    def _drafting(self) -> Drafter:
        return self.ngram if self.matched else self.draft

    def _choose(self) -> None:
        """Choose who drafts at the new root.

        The draft catches up if it is chosen, or if it is far behind.
        """
        ngram = self.ngram
        self.matched = ngram.size > 0 and ngram.rate(ngram.size) >= ngram.config.min_rate
        if self._late and not (
            self.matched and sum(len(late.tokens) for late, _ in self._late) < _BEHIND
        ):
            self._catch_up()
        self.root, self.previous = self._drafting.root, self._drafting.previous

    def _catch_up(self) -> None:
        """Give the draft all that was committed since it last ran, as one path.

        Its first nodes may be the draft's own, whose rows it still has; the others were never
        drafted by it.
        """
        first, tokens = self._late[0][0], [token for late, _ in self._late for token in late.tokens]
        if len(self._late) > 1:
            tree, path = first.tree, list(first.path)
            for token in tokens[len(path) : -1]:
                path.append(tree.add(path[-1] if path else 0, token))
            first = Accepted(tree, path, tokens)
        self.draft.advance(first, torch.cat([features for _, features in self._late]))
        self._late.clear()


class Mixed(TreePolicy):
    """Policy for a `MixedDrafter`: an `NgramTree` where n-grams draft, the `elsewhere` trees else.

    `verifier` is for the decoder: NSS on trees of n-grams, and `rule` on those of `elsewhere`. NSS
    and greedy matching do for both as well.

    Raises:
        UserError: `rule` is not lossless on the trees of `elsewhere`, or these are neither picked
            nor delayed.
    """

    trees = "top_k"  # the one kind of which nothing is supposed

    @checked
    def __init__(self, elsewhere: TreePolicy, rule: Verifier, ngram: NgramTree | None = None):
        if elsewhere.trees not in {*DELAYED, "top_k"}:
            raise UserError(
                "Mixed: it takes policies whose trees are delayed, or of picked tokens, and"
                f" {type(elsewhere).__name__} drafts trees of kind '{elsewhere.trees}'. Take"
                " another policy, or this one without n-grams."
            )
        check_compatible(elsewhere.trees, rule)
        self.elsewhere, self.rule, self.ngram = elsewhere, rule, ngram or NgramTree()
        self.verifier: Verifier = RuleOfTree("mixed", VERIFIERS["nss"].rule, frozenset({"top_k"}))
        self.seconds = 0.0  # of `elsewhere`, where it takes time to choose

    @property
    def draft_setting(self) -> Any:  # type: ignore[override]
        """Return the draft's setting for "auto": the one that fits `elsewhere`."""
        setting = self.elsewhere.draft_setting
        return None if setting == AUTO and self.elsewhere.trees != "top_k" else setting

    def check_decoder(
        self, target: CausalModel, drafter: Drafter | None, draft_setting: SamplingSetting | None
    ) -> None:
        """Raise UserError for another drafter than a mixed one, and what `elsewhere` checks."""
        if not isinstance(drafter, MixedDrafter):
            raise UserError(
                "policy Mixed asks n-grams or another draft: give the decoder a MixedDrafter of"
                " both."
            )
        self.elsewhere.check_decoder(target, drafter.draft, draft_setting)

    def draft(self, state: DecodingState, drafter: MixedDrafter, rng: Rng) -> DraftTree:
        """Draft with the n-grams if they match, else with the policy `elsewhere`."""
        # A policy such as DynaTree learns from what was accepted of its own last tree.
        own, tau = state.memory.get(self, (False, None))
        tau, self.seconds = state.tau if own else tau, 0.0
        if drafter.matched:
            state.memory[self] = False, tau
            return self.ngram.draft(state, drafter.ngram, rng)
        state.memory[self] = True, None
        state = replace(state, tau=tau)
        tree = self.elsewhere.draft(state, drafter.draft, rng)
        check_policys_tree(self.elsewhere, tree, state, drafter.vocab_size)
        tree.rule = self.rule
        self.seconds = self.elsewhere.seconds
        return tree


class RuleOfTree(Verifier):
    """Applies the verifier that a tree came with, or else its own rule."""

    def __call__(self, tree: DraftTree, rng: Rng) -> Verdict:
        """Verify with the tree's rule; a tree without one goes to the default rule."""
        return tree.rule(tree, rng) if tree.rule else super().__call__(tree, rng)
