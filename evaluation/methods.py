"""The methods that the benchmark compares, each with the static action it deserves.

Static actions come from the labels (best tokens per second on the traces' training roots, priced by the latency table), so
every rule is given its own best tree. A method that is the same as one already there, under whatever name, is listed and not
decoded a second time.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from decoding.actions import TREES, Action, tree_index
from decoding.common.errors import UserError
from decoding.drafter import Drafter, LMDrafter
from decoding.loop import SpeculativeDecoder
from decoding.model import CausalModel
from decoding.policies.base import TreePolicy
from decoding.policies.delayed import Autoregressive, Delayed, FollowTau
from decoding.sampling import Rng, SamplingSetting
from decoding.static import StaticShapes
from decoding.verification import VERIFIERS, Verifier
from evaluation.assisted import SCHEDULES, assisted_title, transformers_assisted
from evaluation.benchmark import Generate, option_title, speculative
from evaluation.identity import HEAD, TITLES, Configuration, configuration
from evaluation.protocol import BASELINE, CONTROL
from selector.baselines import EntropyRule, best_by_domain
from selector.latency import LatencyTable, StepCosts
from selector.policy import NeuralPolicy
from selector.roots import PricedRoots, Roots
from selector.selector import Selector, action_at

SINGLE_PATH = torch.tensor([tree.k == 1 for tree in TREES])
DRAFTING = torch.tensor([tree.depth > 0 for tree in TREES])
WARM_UP = 8  # tokens decoded before an action is timed
# Tried on a few prompts to give a draft head, which has no labels of its own, its static action.
HEAD_ACTIONS = tuple(Action(*a) for a in (*((1, 0, n) for n in range(1, 9)), (2, 0, 2), (4, 0, 1), (4, 0, 2), (4, 0, 3)))


def selector_title(name: str) -> str:
    """The method of the selector `name`, of a verifier or "across", where it learned to choose."""
    return f"{TITLES[name]} + selector (NDE)"


def export_title(name: str, rule: str, tree: Action) -> str:
    """The method of the selector `name` where it exported one static tree in place of choosing."""
    of = f"{TITLES[rule]} " if rule != name else ""
    return f"{TITLES[name]} + selector: static {of}{tuple(tree)}"


# Whose labels give a rule its static tree, and among which trees. Of equal single-path labels any will do. Rules on trees come
# first: of equal methods the first one is decoded.
STATIC = {
    **{name: (name, DRAFTING) for name in ("specinfer", "traversal", "naivetree", "nss", "spectr", "khisti", "gbv")},
    "naive": ("naivetree", SINGLE_PATH),
    "bv": ("traversal", SINGLE_PATH),
}


@dataclass
class Plan:
    """The methods of one sampling setting in the order of the table, and what is known of them before they run.

    same: methods that are not decoded, and what each is the same as. learned: names of those with something learned here.
    exports: selectors that exported a static tree: its method by the selector's title where it chooses. predicted: tokens and
    seconds a step by the labels and the latency table. static: the best static option, as the selector names its own, by the
    title of a selector that chooses.
    """

    methods: dict[str, Generate] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    learned: set[str] = field(default_factory=set)
    exports: dict[str, str] = field(default_factory=dict)
    predicted: dict[str, tuple[float, float]] = field(default_factory=dict)
    static: dict[str, str] = field(default_factory=dict)
    _named: dict[Configuration, str] = field(default_factory=dict)

    def add(self, name: str, make: Callable[[], Generate], of: Configuration | None = None) -> None:
        """A method, made unless there is one of the same configuration; `of`: None for one that changes from step to step."""
        if name in self.methods:
            return
        if of in self._named:
            self.same[name] = self._named[of]
            return
        self.methods[name] = make()
        if of:
            self._named[of] = name


Tried = TypeVar("Tried", bound=Hashable)
Trial = Callable[[list[int], int], tuple[int, float]]  # of a prompt and a seed; gives tokens and seconds


def fastest(trials: dict[Tried, Trial], prompts: list[list[int]]) -> Tried:
    """The one of `trials` with the most tokens per second. All are tried on the first of `prompts`; after each one the faster
    half goes on to the next (successive halving), and after the last the fastest is taken."""
    totals, left = {name: [0, 0.0] for name in trials}, list(trials)
    for seed, prompt in enumerate(prompts, start=1):
        for name in left:
            tokens, seconds = trials[name](prompt, seed)
            totals[name][0] += tokens
            totals[name][1] += seconds
        left.sort(key=lambda name: totals[name][1] / totals[name][0] if totals[name][0] else float("inf"))
        left = left[: -(-len(left) // 2)] if seed < len(prompts) else left[:1]
    return left[0]


@dataclass
class Bench:
    """What methods are made of. roots: training roots with the labels of all rules; table: prices their trees. draft_setting:
    what drafts are warped with, None: as the target is; it has to be what the labels were made with. fixed: shapes of all
    passes, None: as they come."""

    target: CausalModel
    draft: CausalModel
    roots: Roots
    table: LatencyTable
    new_tokens: int
    draft_setting: SamplingSetting | None = None
    fixed: StaticShapes | None = None
    _known: dict[str, PricedRoots] = field(default_factory=dict, repr=False)

    def method(
        self, name: str, policy: TreePolicy, verifier: Verifier, setting: SamplingSetting, drafter: Drafter | None = None
    ) -> Generate:
        """A decoder of policy and verifier; drafter defaults to the LM draft."""
        if drafter is None and policy.trees != "none":
            drafter = LMDrafter(self.draft, self.fixed)
        decoder = SpeculativeDecoder(self.target, drafter, policy, verifier, self.draft_setting, self.fixed)
        return speculative(name, decoder, setting, self.new_tokens)

    def plan(self, setting: SamplingSetting) -> Plan:
        """What every table begins with: plain decoding, and the same again as the A/A control."""
        plan = Plan()
        for name in (BASELINE, CONTROL):
            plan.add(name, lambda name=name: self.method(name, Autoregressive(), VERIFIERS["nss"], setting))
        return plan

    def static(self, verifier: str, setting: SamplingSetting) -> Action:
        """The tree with the most tokens per second on the roots traced under `setting`."""
        labels, allowed = STATIC[verifier]
        return TREES[int(self._choices(labels).static(allowed & DRAFTING)[0, self._index(setting)])]

    def add_rules(self, plan: Plan, setting: SamplingSetting) -> None:
        """Every rule with labels under its best static tree, named with its (K, L1, L2)."""
        self.add_statics(plan, [name for name, (labels, _) in STATIC.items() if labels in self.roots.samples], setting)

    def add_statics(self, plan: Plan, verifiers: Sequence[str], setting: SamplingSetting) -> None:
        """Some rules under their best static trees."""
        for name in verifiers:
            action = self.static(name, setting)
            self._add_static(plan, f"{TITLES[name]} {tuple(action)}", name, action, setting)

    def add_selector(self, plan: Plan, name: str, selector: Selector, setting: SamplingSetting) -> None:
        """A trained selector; where it exported a static tree for `setting`, that tree under a name that says so."""
        verifiers, title = selector.schema.verifiers, selector_title(name)
        costs = StepCosts(self.table, verifiers, int(selector.static_context.max()))
        exported = selector.static_action(setting.temperature, setting.top_p, costs)
        if exported is not None:
            rule, tree = action_at(exported, verifiers)
            plan.exports[title] = export_title(name, rule, tree)
            self._add_static(plan, plan.exports[title], rule, tree, setting)
            return
        policy = NeuralPolicy(selector, self.table)
        plan.add(title, lambda: self.method(title, policy, policy.verifier, setting))
        plan.learned.add(title)
        best = PricedRoots.of(self.roots, verifiers, [self.table]).static()[0, self._index(setting)]
        plan.static[title] = option_title(int(best), verifiers)

    def add_rivals(self, plan: Plan, main: str, setting: SamplingSetting) -> None:
        """Cheap rules that choose trees for `main`: L1 by the last acceptance length, by the draft's entropy, by the domain.
        One that always chooses the same tree is that static method."""
        static, title, rule = self.static(main, setting), TITLES[main], VERIFIERS[main]
        branches = max(1, static.l2)
        follow, entropy = FollowTau(static.k, branches, 8), EntropyRule.fit(self._choices(main), 0, self._index(setting))
        name = f"{title} ({static.k}, τ−1, {branches})"
        plan.add(name, lambda: self.method(name, follow, rule, setting))
        for name, trees, make in (
            (f"{title}, by entropy", entropy.chosen_trees, lambda name: self.method(name, entropy, rule, setting)),
            (f"{title}, by domain", self._domain_trees(main, setting), lambda name: self._by_domain(name, main, setting)),
        ):
            alike = configuration(main, trees[0]) if len(set(trees)) == 1 else None
            plan.add(name, lambda name=name, make=make: make(name), alike)

    def add_head(self, plan: Plan, head: Drafter, action: Action, main: str, setting: SamplingSetting) -> None:
        """The TALF head under its static action."""
        title, alike = f"{TITLES[main]}, TALF head {tuple(action)}", configuration(main, action, HEAD)
        plan.add(title, lambda: self.method(title, Delayed(action), VERIFIERS[main], setting, head), alike)
        plan.learned.add(title)

    def add_assisted(self, plan: Plan, tokens: int | None, setting: SamplingSetting) -> None:
        """transformers' own assisted generation with `tokens` drafted a step, None: with its default schedule."""
        title = assisted_title(tokens)
        plan.add(title, lambda: transformers_assisted(title, self.target, self.draft, setting, self.new_tokens, tokens))

    def predicted(self, verifier: str, action: Action, setting: SamplingSetting) -> tuple[float, float] | None:
        """Tokens and seconds a step of a static tree, means over the roots traced under `setting`: what it was chosen by. None
        for a rule without labels."""
        labels = STATIC[verifier][0] if verifier in STATIC else verifier
        if labels not in self.roots.samples:
            return None
        choices, tree = self._choices(labels), tree_index(action)
        own = (self.roots.setting == self._index(setting)).nonzero()[:, 0]
        return float(choices.efficiency[own, tree].mean()), float(choices.priced(0, own)[1][:, tree].mean())

    def _add_static(self, plan: Plan, name: str, verifier: str, action: Action, setting: SamplingSetting) -> None:
        rule = VERIFIERS[verifier]
        plan.add(name, lambda: self.method(name, Delayed(action), rule, setting), configuration(verifier, action))
        if predicted := self.predicted(verifier, action, setting):
            plan.predicted[name] = predicted

    def _domain_trees(self, main: str, setting: SamplingSetting) -> list[Action]:
        best = best_by_domain(self._choices(main), 0, self._index(setting))
        return [self.static(main, setting), *(TREES[option] for option in best.values())]

    def _by_domain(self, title: str, main: str, setting: SamplingSetting) -> Generate:
        best = best_by_domain(self._choices(main), 0, self._index(setting))
        otherwise = self.static(main, setting)
        actions = {kind: TREES[option] for kind, option in best.items()}
        own = {a: self.method(title, Delayed(a), VERIFIERS[main], setting) for a in {otherwise, *actions.values()}}
        return lambda prompt, seed, kind: own[actions.get(kind, otherwise)](prompt, seed, kind)

    def head_action(self, drafter: Drafter, main: str, setting: SamplingSetting, prompts: list[list[int]]) -> Action:
        """The static action with the most tokens per second for a draft head under `main`: the `fastest` of HEAD_ACTIONS."""

        def tried(action: Action) -> Trial:
            decoder = SpeculativeDecoder(self.target, drafter, Delayed(action), VERIFIERS[main], self.draft_setting, self.fixed)
            decoder.generate(prompts[0], min(WARM_UP, self.new_tokens), setting, Rng.seeded(0))

            def run(prompt: list[int], seed: int) -> tuple[int, float]:
                generation = decoder.generate(prompt, self.new_tokens, setting, Rng.seeded(seed))
                return generation.decoded, generation.decode_seconds

            return run

        return fastest({action: tried(action) for action in HEAD_ACTIONS}, prompts)

    def assisted_schedule(self, setting: SamplingSetting, prompts: list[list[int]]) -> int | None:
        """The schedule with the most tokens per second for transformers' own loop: the `fastest` of SCHEDULES."""

        def tried(tokens: int | None) -> Trial:
            title, pair = assisted_title(tokens), (self.target, self.draft, setting)
            transformers_assisted(title, *pair, min(WARM_UP, self.new_tokens), tokens)(prompts[0], 0, "")
            generate = transformers_assisted(title, *pair, self.new_tokens, tokens)

            def run(prompt: list[int], seed: int) -> tuple[int, float]:
                record = generate(prompt, seed, "")
                return record.tokens, record.seconds

            return run

        return fastest({tokens: tried(tokens) for tokens in SCHEDULES}, prompts)

    def _choices(self, labels: str) -> PricedRoots:
        if labels not in self._known:
            self._known[labels] = PricedRoots.of(self.roots, [labels], [self.table])
        return self._known[labels]

    def _index(self, setting: SamplingSetting) -> int:
        """Which of the roots' settings it is. Raises UserError if it was not traced."""
        wanted = torch.tensor([setting.temperature, setting.top_p])
        for index, pair in enumerate(self.roots.settings):
            if torch.allclose(torch.tensor(pair), wanted):
                return index
        raise UserError(f"{setting} was not traced, so there are no labels for it: add it to traces.settings.")
