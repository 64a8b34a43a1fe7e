"""Methods of the benchmark, in groups.

To add a method, write a function that yields it and enter it in GROUPS.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict

from nde_talf.decoding.actions import TREES, Action
from nde_talf.decoding.drafters.ngram import NgramDrafter
from nde_talf.decoding.policies.delayed import Autoregressive
from nde_talf.decoding.policies.ngram import NgramTree
from nde_talf.evaluation.bench import BEST_STATIC, NGRAM, RERANKED, Bench
from nde_talf.evaluation.benchmark import Generate, Record, Task
from nde_talf.evaluation.loops import ASSISTED, SCHEDULES, TITLES, assisted_title
from nde_talf.evaluation.plan import Plan
from nde_talf.evaluation.protocol import BASELINE, BY_DOMAIN, CONTROL, SELECTOR
from nde_talf.evaluation.static_trees import STATIC, StaticTrees
from nde_talf.evaluation.tuning import Candidate, Method
from nde_talf.selector.policy import NeuralPolicy


def plan_methods(bench: Bench, groups: set[str]) -> Plan:
    """Plan plain decoding, its A/A control, and the methods of the groups."""
    plan = Plan()
    for name in (BASELINE, CONTROL):
        plain = bench.ours(name, Autoregressive(), "nss", {})
        plan.add(Method(name, name, [plain]), bench.tune)
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
            yield Method(key, role, [own], learned=True, rule=name)
            continue
        title = f"{TITLES[name]} + selector: static {tuple(TREES[action])}"
        static = bench.static(name, TREES[action], title=title)
        yield Method(key, role, [static], exported=True)


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

    one = {*trees.values()} <= {static}
    name, alike = f"{title}, by domain", bench.static(rule, static).alike if one else None
    yield Method(BY_DOMAIN, name, [Candidate(name, by_domain, {}, alike)])


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
        yield Method(title, title, [bench.ours(title, policy, rule, {})])


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
