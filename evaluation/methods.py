"""The methods that the benchmark compares.

To add a method, write a function that yields it and enter it in GROUPS.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from nde_talf.decoding.actions import Action
from nde_talf.decoding.drafter import Drafter, drafter_of
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.mixed import Mixed, MixedDrafter
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.ngram import NgramDrafter
from nde_talf.decoding.ngram_settings import NgramConfig
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.policies.dynatree import DynaTree, DynaTreeConfig
from nde_talf.decoding.policies.dyspec import DySpec
from nde_talf.decoding.policies.ngram import NgramTree
from nde_talf.decoding.policies.salf import Salf
from nde_talf.decoding.policies.stopping import CRITERIA, ConfidenceStop, FollowMean, FollowTau
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.decoding.setting import AUTO
from nde_talf.decoding.static import StaticShapes
from nde_talf.decoding.verifier import Verifier
from nde_talf.evaluation.benchmark import Generate
from nde_talf.evaluation.loops import (
    ASSISTED,
    DEFAULT,
    LOOKUP,
    LOOKUPS,
    PLAIN,
    SCHEDULES,
    TITLES,
    Speculative,
    assisted_title,
    lookup_title,
    transformers_assisted,
    transformers_lookup,
    transformers_loop,
)
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.static_trees import STATIC, StaticTrees
from nde_talf.evaluation.tuning import (
    HEAD,
    LM_DRAFT,
    Candidate,
    Configuration,
    Method,
    Tuner,
    configuration,
)
from nde_talf.selector.entropy import EntropyRule
from nde_talf.selector.latency import StepCosts
from nde_talf.selector.network import Selector, action_at
from nde_talf.selector.policy import NeuralPolicy

NGRAM = "n-gram"
BEST_STATIC = "best static"
UNLABELLED_TREES = tuple(
    Action(*tree)
    for tree in (*((1, 0, n) for n in range(1, 9)), (2, 0, 2), (4, 0, 1), (4, 0, 2), (4, 0, 3))
)
"""The grid of static trees for a drafter or a setting without labels."""
RERANKED = 3  # the best static trees by the labels that are timed, where everything is tuned
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)


@dataclass
class Bench:
    """The parts of the methods of one sampling setting.

    Attributes:
        target: the large model.
        draft: the small model, or the draft head in its place; None where there is neither.
        setting: what the target samples under.
        tune: chooses among the candidates of a method.
        labels: of training roots under the setting; None without a draft, or where it was not
            traced.
        draft_setting: what drafts are warped with, see `SpeculativeDecoder`; methods that labels
            choose need the one that the labels were made with.
        policy_setting: the same for `policies`.
        fixed: shapes of all passes; None: as they come.
        tuned: whether baselines with a parameter are tuned.
        rules: verification rules of the selectors, the main one first.
        selectors: by rule, or "across".
        policies: tree policies by title, each with its rule.
        ngram: settings of drafting from the text.
        head: the draft head, beside a draft model or alone.
        kinds: domain of each calibration prompt.
    """

    target: CausalModel
    draft: CausalModel | None
    setting: SamplingSetting
    tune: Tuner
    labels: StaticTrees | None = None
    draft_setting: SamplingSetting | str = AUTO
    policy_setting: SamplingSetting | str = AUTO
    fixed: StaticShapes | None = None
    tuned: bool = False
    rules: Sequence[str] = ("traversal",)
    selectors: dict[str, Selector] = field(default_factory=dict)
    policies: dict[str, tuple[TreePolicy, str]] = field(default_factory=dict)
    ngram: NgramConfig = field(default_factory=NgramConfig)
    head: Drafter | None = None
    kinds: Sequence[str] = ()

    @property
    def main(self) -> str:
        """The rule of methods that need one."""
        return self.rules[0]

    @property
    def greedy(self) -> bool:
        """True at temperature 0, where all rules accept the same tokens of the same draws."""
        return self.setting.temperature == 0

    @property
    def few_rules(self) -> Sequence[str]:
        """The rules that are compared: at temperature 0 the main one stands for all."""
        return self.rules[:1] if self.greedy else self.rules

    @property
    def assists(self) -> bool:
        """Whether transformers takes the pair: caches that it can cut, outputs of one size."""
        return (
            isinstance(self.draft, CausalModel)
            and self.target.form == self.draft.form == "masks"
            and self.target.config.vocab_size == self.draft.config.vocab_size
        )

    def ours(
        self,
        policy: TreePolicy,
        rule: Verifier | str,
        drafter: Drafter | None = None,
        alike: Configuration | None = None,
        draft_setting: SamplingSetting | str | None = None,
    ) -> Candidate:
        """A decoder of policy and rule. drafter: None for the pair's draft."""
        verifier = VERIFIERS[rule] if isinstance(rule, str) else rule
        warped = self.draft_setting if draft_setting is None else draft_setting

        def make(title: str, new_tokens: int) -> Generate:
            drafts = drafter
            if drafts is None and policy.trees != "none":
                drafts = drafter_of(self.draft, self.fixed)
            decoder = SpeculativeDecoder(self.target, drafts, policy, verifier, warped, self.fixed)
            return Speculative(title, decoder, self.setting, new_tokens)

        return Candidate(make, alike)

    def static(self, rule: str, tree: Action, drafter: Drafter | None = None) -> Candidate:
        """One tree at every step."""
        alike = configuration(rule, tree, HEAD if drafter else LM_DRAFT)
        return self.ours(Delayed(tree), rule, drafter, alike)

    def best_trees(self, rule: str) -> Sequence[Action]:
        """The grid of static trees of a rule."""
        if self.labels is None:
            return UNLABELLED_TREES
        return self.labels.ranked(rule, RERANKED if self.tuned else 1)

    def best_tree(self, rule: str) -> Action:
        """The static tree of a rule."""
        method = best_static(self, rule)
        titles = list(method.grid)
        return self.best_trees(rule)[titles.index(self.tune(method.role, method.grid))]


def best_static(bench: Bench, rule: str) -> Method:
    """A rule under its best static tree, with the draft model."""
    grid = {
        f"{TITLES[rule]} {tuple(tree)}": bench.static(rule, tree) for tree in bench.best_trees(rule)
    }
    return Method(f"{TITLES[rule]}, {BEST_STATIC}", grid)


@dataclass
class Plan:
    """The methods of one sampling setting that are decoded, and what is known of them.

    Attributes:
        methods: by name, in the order of the table.
        same: methods that are not decoded, and what each is the same as.
        learned: names of those with something learned here.
        roles: the method of each role.
    """

    methods: dict[str, Generate] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    learned: set[str] = field(default_factory=set)
    roles: dict[str, str] = field(default_factory=dict)
    _named: dict[Configuration, str] = field(default_factory=dict)

    @property
    def exports(self) -> dict[str, str]:
        """For selectors that exported a static tree, its method by the selector's title."""
        return {r: title for r, title in self.roles.items() if r.endswith("(NDE)") and r != title}

    def add(self, method: Method, tune: Tuner) -> None:
        """Tune a method, and add it unless there is one of the same configuration."""
        title = tune(method.role, method.grid)
        make, alike = method.grid[title]
        self.roles.setdefault(method.role, title)
        if method.learned:
            self.learned.add(title)
        if title in self.methods:
            return
        if alike in self._named:
            self.same[title] = self._named[alike]
            return
        self.methods[title] = make(title, tune.new_tokens)
        if alike:
            self._named[alike] = title


def plan_methods(bench: Bench, groups: set[str]) -> Plan:
    """Plain decoding, the same again as the A/A control, and the methods of the groups."""
    plan = Plan()
    for name in (BASELINE, CONTROL):
        plan.add(Method(name, {name: bench.ours(Autoregressive(), "nss")}), bench.tune)
    for group, methods in GROUPS.items():
        if group in groups:
            for method in methods(bench):
                plan.add(method, bench.tune)
    return plan


def selector_title(name: str) -> str:
    """The method of the selector `name`, of a verifier or "across", where it learned to choose."""
    return f"{TITLES[name]} + selector (NDE)"


def exported(
    labels: StaticTrees, setting: SamplingSetting, selector: Selector
) -> tuple[str, Action] | None:
    """The rule and static tree that a selector exported for a setting in place of choosing."""
    verifiers = selector.schema.verifiers
    costs = StepCosts(labels.table, verifiers, 0, selector.schema.pricing)
    action = selector.static_action(setting.temperature, setting.top_p, costs)
    return None if action is None else action_at(action, verifiers)


def export_title(name: str, rule: str, tree: Action) -> str:
    """The method of the selector `name` where it exported one static tree."""
    prefix = f"{TITLES[rule]} " if rule != name else ""
    return f"{TITLES[name]} + selector: static {prefix}{tuple(tree)}"


def theirs(bench: Bench, loop: Callable[..., Generate], *options: Any) -> Candidate:
    """One of transformers' loops."""
    return Candidate(lambda title, n: loop(title, bench.target, bench.setting, n, *options))


def assisted(bench: Bench) -> Iterator[Method]:
    """Transformers' assisted generation, with the fastest schedule."""
    if bench.assists:
        grid = {
            assisted_title(schedule): theirs(bench, transformers_assisted, bench.draft, schedule)
            for schedule in SCHEDULES
        }
        yield Method(ASSISTED, grid)


def outside(bench: Bench) -> Iterator[Method]:
    """Transformers' plain decoding, prompt lookup, and assisted generation as it comes.

    None for a target with a state: transformers drafts for none.
    """
    if bench.target.form != "masks":
        return
    yield Method(PLAIN, {PLAIN: theirs(bench, transformers_loop)})
    grid = {lookup_title(sizes): theirs(bench, transformers_lookup, sizes) for sizes in LOOKUPS}
    yield Method(LOOKUP, grid)
    if bench.assists and not bench.tuned:
        title = assisted_title(DEFAULT)
        yield Method(title, {title: theirs(bench, transformers_assisted, bench.draft)})


def selectors(bench: Bench) -> Iterator[Method]:
    """The best static trees of the selectors' rules, and the selectors.

    Without labels there is the main rule's tree alone.
    """
    labels = bench.labels
    if labels is None:
        yield best_static(bench, bench.main)
        return
    for rule in bench.few_rules:
        yield best_static(bench, rule)
    for name, selector in bench.selectors.items():
        role = selector_title(name)
        if export := exported(labels, bench.setting, selector):
            yield Method(role, {export_title(name, *export): bench.static(*export)})
        else:
            policy = NeuralPolicy(selector, labels.table)
            yield Method(role, {role: bench.ours(policy, policy.verifier)}, learned=True)


def traced_rules(bench: Bench) -> Iterator[Method]:
    """Every rule with labels under its best static tree."""
    for rule, (labels, _) in STATIC.items():
        if bench.labels and labels in bench.labels.roots.samples:
            yield best_static(bench, rule)


def baselines(bench: Bench) -> Iterator[Method]:
    """Cheap rules that choose trees: L1 by the last acceptance length, by entropy, by domain.

    One that always chooses the same tree is that static method.
    """
    labels = bench.labels
    if labels is None:
        return
    rule, title, static = bench.main, TITLES[bench.main], bench.best_tree(bench.main)
    shapes = {(static.k, max(1, static.l2))}
    if bench.tuned:
        shapes |= {*product((1, 2, 3, 4), (1, 2, 4))}
    lengths = {
        f"{title} ({k}, τ−1, {n})": bench.ours(FollowTau(k, n, 8), rule) for k, n in sorted(shapes)
    }
    yield Method(f"{title}, last acceptance", lengths)
    entropy = EntropyRule.fit(labels.priced(rule), 0, labels.index)
    name, alike = f"{title}, by entropy", _one_tree(rule, entropy.chosen_trees)
    yield Method(name, {name: bench.ours(entropy, rule, None, alike)})
    name, trees = f"{title}, by domain", _domain_trees(bench, labels)
    alike = _one_tree(rule, [static, *trees.values()])
    yield Method(name, {name: Candidate(_by_domain(bench, static, trees), alike)})


def _one_tree(rule: str, trees: Sequence[Action]) -> Configuration | None:
    return configuration(rule, trees[0]) if len(set(trees)) == 1 else None


def _domain_trees(bench: Bench, labels: StaticTrees) -> dict[str, Action]:
    """The best tree of every domain with enough roots, by timing a few where all is tuned."""
    best_trees = {}
    for kind in sorted({*labels.roots.kind}):
        trees = labels.ranked(bench.main, RERANKED if bench.tuned else 1, kind)
        grid = {str(tuple(tree)): bench.static(bench.main, tree) for tree in trees}
        if grid:
            texts = [p for p, k in zip(bench.tune.prompts, bench.kinds, strict=True) if k == kind]
            best = bench.tune(f"{BEST_STATIC}, {kind}", grid, texts)
            best_trees[kind] = trees[list(grid).index(best)]
    return best_trees


def _by_domain(
    bench: Bench, static: Action, trees: dict[str, Action]
) -> Callable[[str, int], Generate]:
    """Makes a method that takes the tree of a prompt's domain."""

    def make(title: str, new_tokens: int) -> Generate:
        methods = {
            tree: bench.static(bench.main, tree).make(title, new_tokens)
            for tree in {static, *trees.values()}
        }
        return lambda prompt, seed, kind: methods[trees.get(kind, static)](prompt, seed, kind)

    return make


def parametrised(bench: Bench) -> Iterator[Method]:
    """Families of policies that need a draft model and no labels, each at its fastest setting."""
    if bench.draft is None:
        return
    title, rule = TITLES[bench.main], "greedy" if bench.greedy else bench.main
    policies: dict[str, dict[str, TreePolicy]] = {
        "confidence": {
            f"confidence ({by} < {at:g}, ≤ {n})": ConfidenceStop(at, n, by, bench.greedy)
            for by, at, n in product(CRITERIA, THRESHOLDS, (4, 8, 16))
        },
        "mean acceptance": {
            f"mean of {window} steps + {plus}, ≤ {n}": FollowMean(window, plus, n)
            for window, plus, n in product((2, 4, 8), (0, 1, 2), (8, 16))
        },
    }
    for family, tried in policies.items():
        grid = {f"{title}, {name}": bench.ours(policy, rule) for name, policy in tried.items()}
        yield Method(f"{title}, {family}", grid)
    yield Method("draft trees", draft_trees(bench))


def draft_trees(bench: Bench) -> dict[str, Candidate]:
    """The policies of other papers, which draft the tokens that the draft holds most probable."""
    picked, drawn = ("greedy" if bench.greedy else rule for rule in ("nss", "without_replacement"))
    grid: dict[str, Candidate] = {}
    for nodes in (4, 8, 16):
        grid |= {
            f"Beam (3 wide, 4 deep, {nodes} nodes)": bench.ours(Beam(3, 4, nodes), picked),
            f"SALF ({nodes} nodes)": bench.ours(Salf(nodes, batch=4), picked),
            f"DynaTree ({nodes} nodes)": bench.ours(DynaTree(DynaTreeConfig(nodes=nodes)), picked),
            f"DySpec ({nodes} nodes)": bench.ours(DySpec(nodes), drawn),
        }
    return grid


def given_policies(bench: Bench) -> Iterator[Method]:
    """Policies with their settings as given, each with a rule that is lossless on its trees."""
    for title, (policy, rule) in bench.policies.items():
        candidate = bench.ours(policy, rule, draft_setting=bench.policy_setting)
        yield Method(title, {title: candidate})


def head(bench: Bench) -> Iterator[Method]:
    """The draft head under its static tree."""
    if bench.head:
        yield Method(_head_role(bench), _head_trees(bench), learned=True)


def _head_role(bench: Bench) -> str:
    return f"{TITLES[bench.main]}, TALF head, {BEST_STATIC}"


def _head_trees(bench: Bench) -> dict[str, Candidate]:
    return {
        f"{TITLES[bench.main]}, TALF head {tuple(tree)}": bench.static(bench.main, tree, bench.head)
        for tree in UNLABELLED_TREES
    }


def ngrams(bench: Bench) -> Iterator[Method]:
    """Drafting from the text alone."""
    configs = {NGRAM: bench.ngram}
    if bench.tuned:
        tried = [
            replace(bench.ngram, min_size=size, nodes=nodes, threshold=threshold)
            for size, nodes, threshold in product((1, 2), (4, 8, 16), (0.1, 0.3))
        ]
        configs = {f"{NGRAM} ({_sizes(c)}, threshold {c.threshold:g})": c for c in tried}
    vocabulary = bench.target.vocab_size
    grid = {
        title: bench.ours(NgramTree(config), "nss", NgramDrafter(vocabulary, config))
        for title, config in configs.items()
    }
    yield Method(NGRAM, grid)


def mixed(bench: Bench) -> Iterator[Method]:
    """N-grams where the text repeats itself, and elsewhere another draft.

    That is a static tree of the draft model, the selector, or the head's static tree.
    """
    rule, title = bench.main, TITLES[bench.main]
    if bench.draft is not None:
        tree = bench.best_tree(rule)
        yield _mixed(bench, f"{title} {tuple(tree)}", f"{title}, {BEST_STATIC}", Delayed(tree))
    selector, labels = bench.selectors.get(rule), bench.labels
    if bench.tuned and selector and labels and not exported(labels, bench.setting, selector):
        name = selector_title(rule)
        yield _mixed(bench, name, name, NeuralPolicy(selector, labels.table), learned=True)
    if bench.head:
        grid = _head_trees(bench)
        name = bench.tune(_head_role(bench), grid)
        tree = UNLABELLED_TREES[list(grid).index(name)]
        yield _mixed(bench, name, name, Delayed(tree), bench.head)


def _mixed(
    bench: Bench,
    title: str,
    role: str,
    elsewhere: TreePolicy,
    drafter: Drafter | None = None,
    learned: bool = False,
) -> Method:
    configs = {f"{NGRAM} + {title}": bench.ngram}
    if bench.tuned and drafter is None:
        tried = [
            replace(bench.ngram, min_size=size, nodes=nodes, min_rate=rate)
            for size, nodes, rate in product((1, 2), (4, 8), (0.0, 0.4, 0.7))
        ]
        configs = {f"{NGRAM} ({_sizes(c)}, rate ≥ {c.min_rate:g}) + {title}": c for c in tried}
    grid = {}
    for name, config in configs.items():
        policy = Mixed(elsewhere, VERIFIERS[bench.main], NgramTree(config))
        both = MixedDrafter(
            NgramDrafter(bench.target.vocab_size, config),
            drafter or drafter_of(bench.draft, bench.fixed),
        )
        grid[name] = bench.ours(policy, policy.verifier, both)
    return Method(f"{NGRAM} + {role}", grid, learned)


def _sizes(config: NgramConfig) -> str:
    return f"{config.min_size} to {config.max_size} tokens, {config.nodes} nodes"


GROUPS: dict[str, Callable[[Bench], Iterator[Method]]] = {
    "assisted": assisted,
    "transformers": outside,
    "selector": selectors,
    "rules": traced_rules,
    "baselines": baselines,
    "tuned": parametrised,
    "policies": given_policies,
    "head": head,
    "ngram": ngrams,
    "mixed": mixed,
}
"""Groups of methods by the names of evaluation.methods, in the order of the table."""
