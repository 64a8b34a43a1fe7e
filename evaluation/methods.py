"""The methods that the benchmark compares, what they are called, and the best static action of
each.

Static actions come from the labels (best tokens per second on the traces' training roots, priced by
the latency table), so every rule is compared with its own best tree. A method that equals one
already there, under another name (the same rule, tree and drafter), is listed and not decoded a
second time. Two rules are the same on a single path where they take the same decisions from the
same random numbers, so that with one seed they write the same text: Naive, NaiveTree and SpecInfer
at K = 1 all accept with min(1, p / q) and otherwise draw from the residual; block verification is
Traversal on a path, and so is GBV where there is one branch. Rules that have the same law there but
do other work, such as SpecTr and Khisti at K = 1, are compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from nde_talf.decoding.actions import TREES, Action, canonical, tree_index
from nde_talf.decoding.drafter import Drafter, drafter_of
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.mixed import Mixed, MixedDrafter
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.ngram import NgramDrafter
from nde_talf.decoding.ngram_settings import NgramConfig
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed, FollowTau
from nde_talf.decoding.policies.ngram import NgramTree
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.decoding.setting import AUTO
from nde_talf.decoding.static import StaticShapes
from nde_talf.decoding.verifier import Verifier
from nde_talf.evaluation.assisted import (
    ASSISTED,
    LOOKUP,
    LOOKUPS,
    PLAIN,
    SCHEDULES,
    Lookup,
    Schedule,
    assisted_title,
    lookup_title,
    transformers_assisted,
    transformers_lookup,
    transformers_loop,
)
from nde_talf.evaluation.benchmark import Generate
from nde_talf.evaluation.predictions import STATIC, Predictions
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.speculative import TITLES, Speculative, action_title
from nde_talf.evaluation.trials import fastest
from nde_talf.selector.baselines import ENTROPY, EntropyRule, best_by_domain
from nde_talf.selector.evaluate import probabilities
from nde_talf.selector.latency import LatencyTable, StepCosts
from nde_talf.selector.objective import mean_step, taken
from nde_talf.selector.policy import NeuralPolicy
from nde_talf.selector.roots import PricedRoots, Roots
from nde_talf.selector.selector import Selector, action_at

LM_DRAFT, HEAD, NGRAM = "LM draft", "draft head", "n-gram"
BEST_STATIC = "best static"
SAME_RULE = {"naive": "naivetree", "bv": "traversal"}  # one function under two names
SAME_ON_PATHS = {"specinfer": "naivetree", "gbv": "traversal"}


class Configuration(NamedTuple):
    """What a static method is, under a sampling setting. rule, tree: in normal form, see
    `configuration`.
    """

    rule: str
    tree: Action
    drafter: str = LM_DRAFT


def configuration(rule: str, tree: Action, drafter: str = LM_DRAFT) -> Configuration:
    """Equal for equal methods."""
    tree, rule = canonical(tree), SAME_RULE.get(rule, rule)
    return Configuration(SAME_ON_PATHS.get(rule, rule) if tree.k == 1 else rule, tree, drafter)


# Tried on a few prompts to give a draft head, which has no labels of its own, its static action; so
# too at a setting without labels.
TIMED_ACTIONS = tuple(
    Action(*a)
    for a in (*((1, 0, n) for n in range(1, 9)), (2, 0, 2), (4, 0, 1), (4, 0, 2), (4, 0, 3))
)


def selector_title(name: str) -> str:
    """The method of the selector `name`, of a verifier or "across", where it learned to choose."""
    return f"{TITLES[name]} + selector (NDE)"


def export_title(name: str, rule: str, tree: Action) -> str:
    """The method of the selector `name` where it exported one static tree in place of choosing."""
    of = f"{TITLES[rule]} " if rule != name else ""
    return f"{TITLES[name]} + selector: static {of}{tuple(tree)}"


@dataclass
class Plan:
    """The methods of one sampling setting, and what is known of them before they run.

    Attributes:
        methods: by name, in the order of the table.
        same: methods that are not decoded, and what each is the same as.
        learned: names of those with something learned here.
        exports: for selectors that exported a static tree, its method by the selector's title.
        predicted: tokens and seconds a step by the labels and the latency table.
        static: the best static action, as the selector names its own, by the title of a selector
            that chooses.
        roles: the method of each role. A role has one name under every setting, where a method's
            name holds what was tuned: "Traversal, best static" is "Traversal (1, 0, 4)" under one
            and "Traversal (2, 0, 3)" under another.
    """

    methods: dict[str, Generate] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    learned: set[str] = field(default_factory=set)
    exports: dict[str, str] = field(default_factory=dict)
    predicted: dict[str, tuple[float, float]] = field(default_factory=dict)
    static: dict[str, str] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    _named: dict[Configuration, str] = field(default_factory=dict)

    def add(
        self,
        name: str,
        make: Callable[[], Generate],
        of: Configuration | None = None,
        role: str | None = None,
    ) -> None:
        """Add a method, made unless there is one of the same configuration.

        Args:
            of: None for a method that changes from step to step.
            role: see `roles`; None: its name.
        """
        self.roles.setdefault(role or name, name)
        if name in self.methods:
            return
        if of in self._named:
            self.same[name] = self._named[of]
            return
        self.methods[name] = make()
        if of:
            self._named[of] = name


@dataclass
class Bench:
    """What methods are made of.

    Attributes:
        target: the large model.
        draft: the small model; None where there is none, and with it neither labels nor prices.
        roots: training roots with the labels of all rules.
        table: prices their trees.
        new_tokens: of every generation.
        draft_setting: what drafts are warped with, see `SpeculativeDecoder`; of methods that labels
            choose it has to be what the labels were made with.
        fixed: shapes of all passes; None: as they come.
    """

    target: CausalModel
    draft: CausalModel | None
    roots: Roots | None
    table: LatencyTable | None
    new_tokens: int
    draft_setting: SamplingSetting | str = AUTO
    fixed: StaticShapes | None = None

    def __post_init__(self) -> None:
        self.predictions = Predictions(self.roots, self.table)
        self.neural: dict[
            str, NeuralPolicy
        ] = {}  # of the selectors that choose under the setting that was planned last
        self.online_weights: dict[
            SamplingSetting, list[float]
        ] = {}  # that an online estimate of acceptance begins with

    def method(
        self,
        name: str,
        policy: TreePolicy,
        verifier: Verifier,
        setting: SamplingSetting,
        drafter: Drafter | None = None,
        new_tokens: int | None = None,
    ) -> Generate:
        """A decoder of policy and verifier; drafter defaults to the LM draft, new_tokens to the
        bench's.
        """
        if drafter is None and policy.trees != "none":
            drafter = drafter_of(self.draft, self.fixed)
        decoder = SpeculativeDecoder(
            self.target, drafter, policy, verifier, self.draft_setting, self.fixed
        )
        return Speculative(name, decoder, setting, new_tokens or self.new_tokens)

    def plan(self, setting: SamplingSetting) -> Plan:
        """What every table begins with: plain decoding, and the same again as the A/A control."""
        plan = Plan()
        self.neural = {}
        for name in (BASELINE, CONTROL):
            plan.add(
                name,
                lambda name=name: self.method(name, Autoregressive(), VERIFIERS["nss"], setting),
            )
            if predicted := self.predictions.plain():
                plan.predicted[name] = predicted
        return plan

    def add_rules(self, plan: Plan, setting: SamplingSetting) -> None:
        """Every rule with labels under its best static tree, named with its (K, L1, L2)."""
        self.add_statics(
            plan,
            [name for name, (labels, _) in STATIC.items() if labels in self.roots.samples],
            setting,
        )

    def add_statics(self, plan: Plan, verifiers: Sequence[str], setting: SamplingSetting) -> None:
        """Some rules under their best static trees."""
        for name in verifiers:
            action = self.predictions.static(name, setting)
            title = f"{TITLES[name]} {tuple(action)}"
            self._add_static(plan, title, name, action, setting, f"{TITLES[name]}, {BEST_STATIC}")

    def add_selector(
        self, plan: Plan, name: str, selector: Selector, setting: SamplingSetting
    ) -> None:
        """A trained selector; where it exported a static tree for `setting`, that tree under a name
        that says so.
        """
        verifiers, title = selector.schema.verifiers, selector_title(name)
        costs = StepCosts(self.table, verifiers, 0, selector.schema.pricing)
        exported = selector.static_action(setting.temperature, setting.top_p, costs)
        if exported is not None:
            rule, tree = action_at(exported, verifiers)
            plan.exports[title] = export_title(name, rule, tree)
            self._add_static(plan, plan.exports[title], rule, tree, setting, title)
            return
        policy = self.neural[name] = NeuralPolicy(selector, self.table)
        plan.add(title, lambda: self.method(title, policy, policy.verifier, setting))
        plan.learned.add(title)
        roots = PricedRoots.of(self.roots, verifiers, [self.table])
        plan.static[title] = action_title(
            int(roots.static()[0, self.predictions.index(setting)]), verifiers
        )
        seen = PricedRoots.of(self.roots, verifiers, [self.table], selector.schema.pricing)
        own = self.predictions.under(setting)
        action = probabilities(selector, seen.where(own), 0).argmax(-1)
        plan.predicted[title] = mean_step(
            taken(roots.efficiency[own], action), taken(roots.priced(0, own)[1], action)
        )

    def add_baselines(
        self,
        plan: Plan,
        main: str,
        setting: SamplingSetting,
        by_domain: dict[str, Action] | None = None,
    ) -> None:
        """Cheap rules that choose trees for `main`: L1 by the last acceptance length, by the
        draft's entropy, by the domain.

        One that always chooses the same tree is that static method. by_domain: the trees of the
        domains; None: the best ones by the labels. With it, L1 by the last acceptance length is
        left to `nde_talf.evaluation.tuned`.
        """
        labels, index = self.predictions.priced(main), self.predictions.index(setting)
        static, title, rule = self.predictions.static(main, setting), TITLES[main], VERIFIERS[main]
        branches = max(1, static.l2)
        follow, entropy = FollowTau(static.k, branches, 8), EntropyRule.fit(labels, 0, index)
        tuned = by_domain is not None
        by_domain = by_domain or {
            kind: TREES[i] for kind, i in best_by_domain(labels, 0, index).items()
        }

        def of_domain(name: str) -> Generate:
            own = {
                tree: self.method(name, Delayed(tree), rule, setting)
                for tree in {static, *by_domain.values()}
            }
            return lambda prompt, seed, kind: own[by_domain.get(kind, static)](prompt, seed, kind)

        for name, trees, make in (
            (
                f"{title} ({static.k}, τ−1, {branches})",
                [],
                lambda name: self.method(name, follow, rule, setting),
            ),
            (
                f"{title}, by entropy",
                entropy.chosen_trees,
                lambda name: self.method(name, entropy, rule, setting),
            ),
            (f"{title}, by domain", [static, *by_domain.values()], of_domain),
        ):
            if tuned and name.startswith(f"{title} ("):
                continue
            alike = configuration(main, trees[0]) if len(set(trees)) == 1 else None
            plan.add(name, lambda name=name, make=make: make(name), alike)
        by_entropy = entropy.choose(labels.roots.scalars[:, ENTROPY])
        trees = torch.tensor([tree_index(by_domain.get(kind, static)) for kind in self.roots.kind])
        plan.predicted[f"{title}, by entropy"] = self.predictions.step(main, by_entropy, setting)
        plan.predicted[f"{title}, by domain"] = self.predictions.step(main, trees, setting)

    def add_policy(
        self,
        plan: Plan,
        title: str,
        policy: TreePolicy,
        rule: str,
        setting: SamplingSetting,
        draft: SamplingSetting | str = AUTO,
    ) -> None:
        """A policy that needs no labels, with a rule that is lossless on its trees. draft: see
        `SpeculativeDecoder`.
        """
        parts = (
            self.target,
            drafter_of(self.draft, self.fixed),
            policy,
            VERIFIERS[rule],
            draft,
            self.fixed,
        )
        plan.add(
            title, lambda: Speculative(title, SpeculativeDecoder(*parts), setting, self.new_tokens)
        )

    def add_head(
        self, plan: Plan, head: Drafter, action: Action, main: str, setting: SamplingSetting
    ) -> None:
        """The TALF head under its static action."""
        title, alike = (
            f"{TITLES[main]}, TALF head {tuple(action)}",
            configuration(main, action, HEAD),
        )
        role = f"{TITLES[main]}, TALF head, {BEST_STATIC}"
        plan.add(
            title,
            lambda: self.method(title, Delayed(action), VERIFIERS[main], setting, head),
            alike,
            role,
        )
        plan.learned.add(title)

    def add_head_selector(
        self, plan: Plan, head: Drafter, selector: Selector, main: str, setting: SamplingSetting
    ) -> None:
        """The TALF head under a selector that was trained for it; where that exported a static
        tree, that tree.
        """
        costs = StepCosts(selector.table, selector.schema.verifiers, 0, selector.schema.pricing)
        exported, title = (
            selector.static_action(setting.temperature, setting.top_p, costs),
            f"{TITLES[main]}, TALF head",
        )
        if exported is None:
            policy, name, alike = NeuralPolicy(selector), f"{title} + selector (NDE)", None
        else:
            tree = action_at(exported, selector.schema.verifiers)[1]
            policy, name = Delayed(tree), f"{title} + selector: static {tuple(tree)}"
            alike = configuration(main, tree, HEAD)
            plan.exports[f"{title} + selector (NDE)"] = name
        plan.add(
            name,
            lambda: self.method(name, policy, VERIFIERS[main], setting, head),
            alike,
            f"{title} + selector (NDE)",
        )
        plan.learned.add(name)

    def add_ngram(self, plan: Plan, config: NgramConfig, setting: SamplingSetting) -> None:
        """Drafting from the text alone."""
        drafter, policy = NgramDrafter(self.target.vocab_size, config), NgramTree(config)
        plan.add(NGRAM, lambda: self.method(NGRAM, policy, VERIFIERS["nss"], setting, drafter))

    def add_mixed(
        self,
        plan: Plan,
        config: NgramConfig,
        draft: Drafter | None,
        action: Action,
        main: str,
        setting: SamplingSetting,
    ) -> None:
        """Drafting from the text where it repeats itself, and elsewhere by `draft` (None: the LM
        draft) under a static tree.
        """
        title = f"{NGRAM} + {TITLES[main]}{', TALF head' if draft else ''} {tuple(action)}"
        policy, drafter = self.mixed(config, draft, Delayed(action), VERIFIERS[main])
        role = None if draft else f"{NGRAM} + {TITLES[main]}, {BEST_STATIC}"
        plan.add(
            title, lambda: self.method(title, policy, policy.verifier, setting, drafter), role=role
        )

    def mixed(
        self, config: NgramConfig, draft: Drafter | None, elsewhere: TreePolicy, rule: Verifier
    ) -> tuple[Mixed, MixedDrafter]:
        """N-grams where the text repeats itself, and `elsewhere` with its rule at other roots.
        draft: None: the LM draft.
        """
        drafter = MixedDrafter(
            NgramDrafter(self.target.vocab_size, config),
            draft or drafter_of(self.draft, self.fixed),
        )
        return Mixed(elsewhere, rule, NgramTree(config)), drafter

    def add_assisted(self, plan: Plan, schedule: Schedule | None, setting: SamplingSetting) -> None:
        """Transformers' own assisted generation with a schedule."""
        title = assisted_title(schedule)
        parts = self.target, self.draft, setting, self.new_tokens, schedule
        plan.add(title, lambda: transformers_assisted(title, *parts), role=ASSISTED)

    def add_lookup(self, plan: Plan, lookup: Lookup, setting: SamplingSetting) -> None:
        """Transformers' own prompt lookup."""
        title = lookup_title(lookup)
        plan.add(
            title,
            lambda: transformers_lookup(title, self.target, setting, self.new_tokens, lookup),
            role=LOOKUP,
        )

    def add_plain(self, plan: Plan, setting: SamplingSetting) -> None:
        """Transformers' own plain decoding."""
        plan.add(PLAIN, lambda: transformers_loop(PLAIN, self.target, setting, self.new_tokens))

    def add_timed(self, plan: Plan, main: str, action: Action, setting: SamplingSetting) -> None:
        """`main` under a static tree that was chosen by timing."""
        title = f"{TITLES[main]} {tuple(action)}"
        self._add_static(plan, title, main, action, setting, f"{TITLES[main]}, {BEST_STATIC}")

    def _add_static(
        self,
        plan: Plan,
        name: str,
        verifier: str,
        action: Action,
        setting: SamplingSetting,
        role: str | None = None,
    ) -> None:
        of = configuration(verifier, action)
        plan.add(
            name, lambda: self.method(name, Delayed(action), VERIFIERS[verifier], setting), of, role
        )
        if labels := self.predictions.labelled(verifier, setting):
            plan.predicted[name] = self.predictions.step(
                labels, torch.full((len(self.roots),), tree_index(action)), setting
            )

    def timed_action(
        self,
        drafter: Drafter,
        main: str,
        setting: SamplingSetting,
        prompts: list[list[int]],
        tried: Sequence[Action] = TIMED_ACTIONS,
    ) -> Action:
        """The static action with the most tokens per second for a drafter under `main`: the
        `fastest` of those tried.

        A drafter without labels has no others to try than TIMED_ACTIONS.
        """

        def make(tree: Action, tokens: int) -> Generate:
            parts = drafter, Delayed(tree), VERIFIERS[main], self.draft_setting, self.fixed
            return Speculative(str(tree), SpeculativeDecoder(self.target, *parts), setting, tokens)

        return fastest(tried, make, self.new_tokens, prompts)

    def assisted_schedule(
        self,
        setting: SamplingSetting,
        prompts: list[list[int]],
        tried: Sequence[Schedule | None] = SCHEDULES,
    ) -> Schedule | None:
        """The schedule with the most tokens per second for transformers' own loop: the `fastest` of
        those tried.
        """

        def make(schedule: Schedule | None, tokens: int) -> Generate:
            return transformers_assisted(
                assisted_title(schedule), self.target, self.draft, setting, tokens, schedule
            )

        return fastest(tried, make, self.new_tokens, prompts)

    def lookup(self, setting: SamplingSetting, prompts: list[list[int]]) -> Lookup:
        """The sizes with the most tokens per second for transformers' prompt lookup: the `fastest`
        of LOOKUPS.
        """

        def make(lookup: Lookup, tokens: int) -> Generate:
            return transformers_lookup(lookup_title(lookup), self.target, setting, tokens, lookup)

        return fastest(LOOKUPS, make, self.new_tokens, prompts)
