"""The parts of one sampling setting's methods, and the candidates that are made of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nde_talf.decoding.actions import Action
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.drafters.ngram_settings import NgramConfig
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.static_shapes import StaticShapes
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.sampling.rng import SamplingSetting
from nde_talf.decoding.sampling.sampling_setting import AUTO
from nde_talf.decoding.verifier import Verifier
from nde_talf.draft_training.head_draft import HeadDraft
from nde_talf.evaluation.benchmark import Generate
from nde_talf.evaluation.loops import TITLES, Speculative, transformers_loop
from nde_talf.evaluation.protocol import GREEDY_TREE, HEAD_TREE, STATIC_TREE
from nde_talf.evaluation.static_trees import PICKED, StaticTrees
from nde_talf.evaluation.tuning import Candidate, Method, Options, Tuner
from nde_talf.selector.network import Selector
from nde_talf.selector.profiling import drafter_of

NGRAM = "n-gram"
BEST_STATIC, HEAD_TITLE = "best static", ", TALF head"
UNLABELLED_TREES = tuple(
    Action(*tree)
    for tree in (*((1, 0, n) for n in range(1, 9)), (2, 0, 2), (4, 0, 1), (4, 0, 2), (4, 0, 3))
)
"""Static trees to time for a drafter or a setting without labels."""
RERANKED = 3  # best static trees of a head by the labels, to time


@dataclass(kw_only=True)
class Bench:
    """Parts of one sampling setting's methods.

    Attributes:
        target: the large model.
        draft: the small model, or the draft head in its place; None where nothing drafts.
        setting: of the target's sampling.
        tune: chooses among the candidates of a method.
        labels: of training roots under the setting; None without a draft or traces of it.
        draft_setting: of drafts, see `SpeculativeDecoder`.
        fixed: shapes of all passes; None: dynamic.
        rules: verification rules of the selectors, the main one first.
        selectors: by rule.
        policies: tree policies by title, each with its rule.
        ngrams: settings of drafting from the text, by title; the fastest are decoded.
        head: the draft head beside a draft model, or where nothing is traced.
        kinds: domain of each calibration prompt.
    """

    target: CausalModel
    draft: CausalModel | None
    setting: SamplingSetting
    tune: Tuner
    labels: StaticTrees | None = None
    draft_setting: SamplingSetting | str = AUTO
    fixed: StaticShapes | None = None
    rules: Sequence[str] = ("traversal",)
    selectors: dict[str, Selector] = field(default_factory=dict)
    policies: dict[str, tuple[TreePolicy, str]] = field(default_factory=dict)
    ngrams: dict[str, NgramConfig] = field(default_factory=lambda: {NGRAM: NgramConfig()})
    head: Drafter | None = None
    kinds: Sequence[str] = ()

    @property
    def main(self) -> str:
        """The selectors' main rule."""
        return self.rules[0]

    @property
    def greedy(self) -> bool:
        """True at temperature 0, where all rules accept the same tokens."""
        return self.setting.temperature == 0

    @property
    def assists(self) -> bool:
        """True if transformers takes the pair: caches that can be cut, equal output sizes."""
        return (
            isinstance(self.draft, CausalModel)
            and self.target.form == self.draft.form == "masks"
            and self.target.config.vocab_size == self.draft.config.vocab_size
        )

    @property
    def headed(self) -> bool:
        """True if the draft head drafts in a draft model's place."""
        return isinstance(self.draft, HeadDraft)

    def ours(
        self,
        title: str,
        policy: TreePolicy,
        rule: Verifier | str,
        options: Options,
        drafter: Drafter | None = None,
        alike: str | None = None,
    ) -> Candidate:
        """Make a candidate of our loop. drafter: None for the pair's draft."""

        def make(title: str, new_tokens: int) -> Generate:
            drafts = drafter
            if drafts is None and policy.trees != "none":
                drafts = drafter_of(self.draft, self.fixed)
            decoder = SpeculativeDecoder(
                self.target, drafts, policy, rule, self.draft_setting, self.fixed
            )
            return Speculative(title, decoder, self.setting, new_tokens)

        return Candidate(title, make, options, alike)

    def theirs(self, title: str, draft: CausalModel | None = None, **options: Any) -> Candidate:
        """Make a candidate of transformers' loop: see `transformers_loop`."""
        return Candidate(
            title,
            lambda title, n: transformers_loop(
                title, self.target, self.setting, n, draft, **options
            ),
            options,
        )

    def static(
        self, rule: str, tree: Action, drafter: Drafter | None = None, title: str = ""
    ) -> Candidate:
        """Make a candidate with one tree at every step. title: "" for the rule's and the tree's."""
        suffix = HEAD_TITLE * (self.headed or drafter is not None)
        alike = f"{TITLES[rule]}{suffix} {tuple(tree)}"
        return self.ours(title or alike, Delayed(tree), rule, {"tree": [*tree]}, drafter, alike)

    def best_static(self, rule: str, head: Drafter | None = None) -> Method:
        """Make the method of a rule's best static tree, with the draft model or the head.

        At temperature 0 one of PICKED, by timing.
        """
        learned = self.headed or head is not None
        suffix, own = HEAD_TITLE * learned, HEAD_TITLE * bool(head)
        role = f"{TITLES[rule]}{own}, {BEST_STATIC}"
        key = GREEDY_TREE if self.greedy else STATIC_TREE.format(rule)
        if head or (self.headed and rule == self.main):
            key = HEAD_TREE
        if self.greedy:
            grid = [
                self.ours(p.title + suffix, p.policy, "greedy", p.options, head) for p in PICKED
            ]
            return Method(key, role, grid, learned=learned, rule=rule)
        trees: Sequence[Action] = UNLABELLED_TREES
        if self.labels and not head:
            trees = self.labels.ranked(rule, RERANKED if self.headed else 1)
        grid = [self.static(rule, tree, head) for tree in trees]
        return Method(key, role, grid, learned=learned, rule=rule)

    def fastest(self, method: Method, prompts: list[list[int]] | None = None) -> Action:
        """Return the tree of the fastest candidate of a method of static trees."""
        return Action(*self.tune(method, prompts).options["tree"])
