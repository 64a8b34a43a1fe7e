"""The methods that the benchmark compares, each with the static action it deserves.

Static actions come from the labels (best tokens per second on the traces' training roots, priced by the latency table), so
every rule is given its own best tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decoding.actions import TREES, Action
from decoding.drafter import Drafter, LMDrafter
from decoding.errors import UserError
from decoding.loop import SpeculativeDecoder
from decoding.model import CausalModel
from decoding.policies.base import TreePolicy
from decoding.policies.delayed import Delayed, FollowTau
from decoding.sampling import Coins, SamplingSetting
from decoding.static import StaticShapes
from decoding.verification import VERIFIERS, Verifier
from evaluation.benchmark import Generate, speculative
from selector.choices import Choices
from selector.latency import LatencyTable
from selector.rivals import EntropyRule, best_by_domain
from selector.roots import Roots

SINGLE_PATH = torch.tensor([tree.k == 1 for tree in TREES])
DRAFTING = torch.tensor([tree.depth > 0 for tree in TREES])
# Tried on a few prompts to give a draft head, which has no labels of its own, its static action.
HEAD_ACTIONS = tuple(Action(*a) for a in (*((1, 0, n) for n in range(1, 9)), (2, 0, 2), (4, 0, 1), (4, 0, 2), (4, 0, 3)))
TITLES = {
    "naive": "Naive",
    "bv": "BV",
    "nss": "NSS",
    "naivetree": "NaiveTree",
    "specinfer": "SpecInfer",
    "spectr": "SpecTr",
    "khisti": "Khisti",
    "traversal": "Traversal",
    "gbv": "GBV",
    "across": "Any rule",
}


def selector_title(name: str) -> str:
    """The method of the selector `name`: of a verifier, or "across"."""
    return f"{TITLES[name]} + selector (NDE)"


# Whose labels give a rule its static tree, and among which trees. Of equal single-path labels any will do.
STATIC = {
    "naive": ("naivetree", SINGLE_PATH),
    "bv": ("traversal", SINGLE_PATH),
    "naivetree": ("naivetree", DRAFTING),
    "specinfer": ("specinfer", DRAFTING),
    "traversal": ("traversal", DRAFTING),
    **{name: (name, DRAFTING) for name in ("nss", "spectr", "khisti", "gbv")},
}


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

    def method(
        self, name: str, policy: TreePolicy, verifier: Verifier, setting: SamplingSetting, drafter: Drafter | None = None
    ) -> Generate:
        """A decoder of policy and verifier; drafter defaults to the LM draft."""
        if drafter is None and policy.trees != "none":
            drafter = LMDrafter(self.draft, self.fixed)
        decoder = SpeculativeDecoder(self.target, drafter, policy, verifier, self.draft_setting, self.fixed)
        return speculative(name, decoder, setting, self.new_tokens)

    def static(self, verifier: str, setting: SamplingSetting) -> Action:
        """The tree with the most tokens per second on the roots traced under `setting`."""
        labels, allowed = STATIC[verifier]
        return TREES[int(self._choices(labels).static(allowed & DRAFTING)[0, self._index(setting)])]

    def rules(self, setting: SamplingSetting) -> dict[str, Generate]:
        """Every rule with labels under its best static tree, named with its (K, L1, L2)."""
        names = [name for name, (labels, _) in STATIC.items() if labels in self.roots.samples]
        return self.statics(names, setting)

    def statics(self, verifiers: Sequence[str], setting: SamplingSetting) -> dict[str, Generate]:
        """Some rules under their best static trees."""
        methods = {}
        for name in verifiers:
            action = self.static(name, setting)
            title = f"{TITLES[name]} {tuple(action)}"
            methods[title] = self.method(title, Delayed(action), VERIFIERS[name], setting)
        return methods

    def rivals(self, main: str, setting: SamplingSetting) -> dict[str, Generate]:
        """Cheap rules that choose trees for `main`: L1 by the last acceptance length, by the draft's entropy, by the domain."""
        static, title, methods = self.static(main, setting), TITLES[main], {}
        branches = max(1, static.l2)
        for name, policy in (
            (f"{title} ({static.k}, τ−1, {branches})", FollowTau(static.k, branches, 8)),
            (f"{title}, by entropy", EntropyRule.fit(self._choices(main), 0, self._index(setting))),
        ):
            methods[name] = self.method(name, policy, VERIFIERS[main], setting)
        name = f"{title}, by domain"
        methods[name] = self._by_domain(name, main, setting)
        return methods

    def _by_domain(self, title: str, main: str, setting: SamplingSetting) -> Generate:
        best = best_by_domain(self._choices(main), 0, self._index(setting))
        otherwise = self.static(main, setting)
        actions = {kind: TREES[option] for kind, option in best.items()}
        own = {a: self.method(title, Delayed(a), VERIFIERS[main], setting) for a in {otherwise, *actions.values()}}
        return lambda prompt, seed, kind: own[actions.get(kind, otherwise)](prompt, seed, kind)

    def head_action(self, drafter: Drafter, main: str, setting: SamplingSetting, prompts: list[list[int]]) -> Action:
        """The static action with the most tokens per second for a draft head under `main`, tried on a few prompts in turn."""
        decoders = {
            action: SpeculativeDecoder(self.target, drafter, Delayed(action), VERIFIERS[main], self.draft_setting, self.fixed)
            for action in HEAD_ACTIONS
        }
        totals = {action: [0.0, 0.0] for action in decoders}
        for seed, prompt in enumerate([prompts[0], *prompts]):
            for action, decoder in decoders.items():
                generation = decoder.generate(prompt, self.new_tokens, setting, Coins.seeded(seed))
                if seed:  # the first round warms up
                    totals[action][0] += generation.decoded
                    totals[action][1] += generation.decode_seconds
        return max(totals, key=lambda action: totals[action][0] / totals[action][1])

    def _choices(self, labels: str) -> Choices:
        return Choices.of(self.roots, [labels], [self.table])

    def _index(self, setting: SamplingSetting) -> int:
        """Which of the roots' settings it is. Raises UserError if it was not traced."""
        wanted = torch.tensor([setting.temperature, setting.top_p])
        for index, pair in enumerate(self.roots.settings):
            if torch.allclose(torch.tensor(pair), wanted):
                return index
        raise UserError(f"{setting} was not traced, so there are no labels for it: add it to traces.settings.")
