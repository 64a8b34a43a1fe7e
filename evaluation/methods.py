"""Methods of the benchmark, in groups.

To add a method, write a function that yields it and enter it in GROUPS.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.drafters.base import Drafter
from nde_talf.decoding.drafters.ngram import NgramDrafter
from nde_talf.decoding.drafters.ngram_settings import NgramConfig
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.static_shapes import StaticShapes
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.policies.ngram import NgramTree
from nde_talf.decoding.sampling.rng import SamplingSetting
from nde_talf.decoding.sampling.sampling_setting import AUTO
from nde_talf.decoding.verifier import Verifier
from nde_talf.draft_training.head_draft import HeadDraft
from nde_talf.evaluation.benchmark import Generate, Record, Task
from nde_talf.evaluation.loops import (
    ASSISTED,
    SCHEDULES,
    TITLES,
    Speculative,
    assisted_title,
    transformers_loop,
)
from nde_talf.evaluation.protocol import (
    BASELINE,
    BY_DOMAIN,
    CONTROL,
    GREEDY_TREE,
    HEAD_TREE,
    SELECTOR,
    STATIC_TREE,
)
from nde_talf.evaluation.static_trees import PICKED, STATIC, StaticTrees
from nde_talf.evaluation.tuning import Candidate, Method, Options, Tuner
from nde_talf.selector.network import Selector
from nde_talf.selector.policy import NeuralPolicy
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
        key = self._static_key(rule, head)
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

    def _static_key(self, rule: str, head: Drafter | None) -> str:
        if head or (self.headed and rule == self.main):
            return HEAD_TREE
        return GREEDY_TREE if self.greedy else STATIC_TREE.format(rule)

    def fastest(self, method: Method, prompts: list[list[int]] | None = None) -> Action:
        """Return the tree of the fastest candidate of a method of static trees."""
        return Action(*self.tune(method, prompts).options["tree"])


class Role(NamedTuple):
    """The title that a method has under every setting, its title under this one, and its rule."""

    title: str
    method: str
    rule: str


@dataclass
class Titles:
    """The methods of one sampling setting by their titles in tables.

    Attributes:
        same: methods that are not decoded, and the equal one that is.
        learned: methods with a part that was learned here.
        roles: by the methods' keys.
        exports: by role of a selector that exported a static tree, its method.
    """

    same: dict[str, str] = field(default_factory=dict)
    learned: list[str] = field(default_factory=list)
    roles: dict[str, Role] = field(default_factory=dict)
    exports: dict[str, str] = field(default_factory=dict)

    @property
    def statics(self) -> dict[str, str]:
        """The best static tree of each learned method's rule, drafted by the pair's draft."""
        found = {}
        for role in self.roles.values():
            keys = STATIC_TREE.format(role.rule), GREEDY_TREE, HEAD_TREE
            static = next((self.roles[key].method for key in keys if key in self.roles), None)
            if static and static != role.method and role.method in self.learned:
                found[role.method] = self.same.get(static, static)
        return found


@dataclass
class Plan:
    """The methods of one sampling setting.

    Attributes:
        methods: the decoded ones by their titles, in the order of the table.
        titles: of all.
    """

    methods: dict[str, Generate] = field(default_factory=dict)
    titles: Titles = field(default_factory=Titles)

    def add(self, method: Method, tune: Tuner) -> None:
        """Tune a method, and add it unless there is one of the same configuration."""
        candidate, titles = tune(method), self.titles
        title, alike = candidate.title, candidate.alike or ""
        titles.roles.setdefault(method.key, Role(method.role, title, method.rule))
        if method.learned:
            titles.learned.append(title)
        if method.exported:
            titles.exports[method.role] = title
        if title not in self.methods and alike in self.methods:
            titles.same[title] = alike
        elif title not in self.methods:
            self.methods[title] = candidate.generator(tune.new_tokens)


def plan_methods(bench: Bench, groups: set[str]) -> Plan:
    """Plan plain decoding, its A/A control, and the methods of the groups."""
    plan = Plan()
    for name in (BASELINE, CONTROL):
        plan.add(_only(name, name, bench.ours(name, Autoregressive(), "nss", {})), bench.tune)
    for group, methods in GROUPS.items():
        if group in groups:
            for method in methods(bench):
                plan.add(method, bench.tune)
    return plan


def selector_title(name: str) -> str:
    """Return the title of a rule's selector where it learned to choose."""
    return f"{TITLES[name]} + selector (NDE)"


def assisted(bench: Bench) -> Iterator[Method]:
    """Yield transformers' assisted generation, with the fastest schedule."""
    if bench.assists:
        grid = [
            bench.theirs(assisted_title(schedule), bench.draft, schedule=schedule)
            for schedule in SCHEDULES
        ]
        yield Method("assisted", ASSISTED, grid)


def selectors(bench: Bench) -> Iterator[Method]:
    """Yield the best static trees of the selectors' rules, and the selectors.

    Without labels, and at temperature 0, where all rules are equal, only the main rule's tree.
    """
    for rule in bench.rules if bench.labels and not bench.greedy else bench.rules[:1]:
        yield bench.best_static(rule)
    for name, selector in bench.selectors.items():
        table = bench.labels.table if bench.labels else None
        key, role = SELECTOR.format(name), selector_title(name)
        policy = NeuralPolicy(selector, table)
        action = policy.static(bench.setting)
        if action is None:
            own = bench.ours(role, policy, policy.verifier, {})
            yield _only(key, role, own, learned=True, rule=name)
            continue
        title = f"{TITLES[name]} + selector: static {tuple(TREES[action])}"
        yield _only(key, role, bench.static(name, TREES[action], title=title), exported=True)


def traced_rules(bench: Bench) -> Iterator[Method]:
    """Yield every rule with labels under its best static tree; at temperature 0 one for all."""
    for rule, (labels, _) in [*STATIC.items()][: 1 if bench.greedy else None]:
        if bench.labels and labels in bench.labels.roots.samples:
            yield bench.best_static(rule)


def baselines(bench: Bench) -> Iterator[Method]:
    """Yield the cheap rule that chooses trees by domain.

    If it always chooses one tree, it equals that tree's static method.
    """
    labels = bench.labels
    if labels is None:
        return
    rule, title = bench.main, TITLES[bench.main]
    static = labels.ranked(rule, 1)[0] if bench.greedy else bench.fastest(bench.best_static(rule))
    trees = _domain_trees(bench, labels)

    def by_domain(title: str, new_tokens: int) -> Generate:
        methods = {
            tree: bench.static(rule, tree, title=title).generator(new_tokens)
            for tree in {static, *trees.values()}
        }

        def generate(task: Task) -> Record:
            return methods[trees.get(task.kind, static)](task)

        return generate

    name, alike = f"{title}, by domain", _one_tree(bench, [static, *trees.values()])
    yield _only(BY_DOMAIN, name, Candidate(name, by_domain, {}, alike))


def _only(key: str, role: str, candidate: Candidate, **about: Any) -> Method:
    """Make a method of one candidate."""
    return Method(key, role, [candidate], **about)


def _one_tree(bench: Bench, trees: Sequence[Action]) -> str | None:
    return bench.static(bench.main, trees[0]).alike if len(set(trees)) == 1 else None


def _domain_trees(bench: Bench, labels: StaticTrees) -> dict[str, Action]:
    """Find the best tree of every domain with enough roots; a head's by timing a few."""
    best_trees = {}
    for kind in sorted({*labels.roots.kind}):
        trees = labels.ranked(bench.main, RERANKED if bench.headed else 1, kind)
        if grid := [bench.static(bench.main, tree) for tree in trees]:
            texts = [p for p, k in zip(bench.tune.prompts, bench.kinds, strict=True) if k == kind]
            method = Method(f"static tree in the domain {kind}", f"{BEST_STATIC}, {kind}", grid)
            best_trees[kind] = bench.fastest(method, texts)
    return best_trees


def given_policies(bench: Bench) -> Iterator[Method]:
    """Yield the given policies, each with a rule that is lossless on its trees."""
    for title, (policy, rule) in bench.policies.items():
        yield _only(title, title, bench.ours(title, policy, rule, {}))


def head(bench: Bench) -> Iterator[Method]:
    """Yield the draft head under its static tree."""
    if bench.head or bench.headed:
        yield bench.best_static(bench.main, bench.head)


def ngrams(bench: Bench) -> Iterator[Method]:
    """Yield drafting from the text alone."""
    vocabulary = bench.target.vocab_size
    candidates = [
        bench.ours(title, NgramTree(c), "nss", asdict(c), NgramDrafter(vocabulary, c))
        for title, c in bench.ngrams.items()
    ]
    yield Method("n-gram", NGRAM, candidates)


GROUPS: dict[str, Callable[[Bench], Iterator[Method]]] = {
    "assisted": assisted,
    "selector": selectors,
    "rules": traced_rules,
    "baselines": baselines,
    "policies": given_policies,
    "head": head,
    "ngram": ngrams,
}
"""Groups by their names in evaluation.methods, in the order of the table."""
