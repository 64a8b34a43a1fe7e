"""The methods that the benchmark compares, each with the static action it deserves.

Static actions come from the labels (best tokens per second on the traces' training roots, priced by the latency table), so
every rule is given its own best tree.
"""

from dataclasses import dataclass

import torch

from decoding.actions import TREES, Action
from decoding.drafter import Drafter, LMDrafter
from decoding.errors import UserError
from decoding.loop import SpeculativeDecoder
from decoding.model import CausalModel
from decoding.policies.base import TreePolicy
from decoding.policies.delayed import Autoregressive, Delayed, FollowTau
from decoding.sampling import Coins, SamplingSetting
from decoding.verification import VERIFIERS
from evaluation.benchmark import Generate, speculative
from evaluation.table import BASELINE
from selector.objective import best_static
from selector.roots import Roots

SINGLE_PATH = torch.tensor([tree.k == 1 for tree in TREES])
ROOTWARD = torch.tensor([tree.l1 == 0 for tree in TREES])
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
}
# Whose labels give a rule its static tree, and among which trees. Of equal single-path labels any will do.
STATIC = {
    "naive": ("naivetree", SINGLE_PATH),
    "bv": ("traversal", SINGLE_PATH),
    "naivetree": ("naivetree", DRAFTING),
    "specinfer": ("specinfer", DRAFTING),
    "traversal": ("traversal", ROOTWARD),
    **{name: (name, DRAFTING) for name in ("nss", "spectr", "khisti", "gbv")},
}


def static_action(roots: Roots, setting: SamplingSetting, allowed: torch.Tensor) -> Action:
    """The tree among `allowed` [A] with the most tokens per second on the roots traced under `setting`. Raises UserError if
    there are none."""
    pairs = [torch.tensor(pair) for pair in roots.settings]
    wanted = torch.tensor([setting.temperature, setting.top_p])
    index = next((i for i, pair in enumerate(pairs) if torch.allclose(pair, wanted)), None)
    if index is None:
        raise UserError(f"{setting} was not traced, so there are no labels for it: add it to traces.settings.")
    here = roots.where(roots.setting == index)
    return TREES[best_static(here.efficiency, here.seconds, allowed)]


@dataclass
class Bench:
    """What methods are made of. roots: training roots by verifier. draft_setting: what drafts are warped with, None: as the
    target is; it has to be what the labels were made with."""

    target: CausalModel
    draft: CausalModel
    roots: dict[str, Roots]
    new_tokens: int
    draft_setting: SamplingSetting | None = None

    def method(
        self, name: str, policy: TreePolicy, verifier: str, setting: SamplingSetting, drafter: Drafter | None = None
    ) -> Generate:
        """A decoder of policy and verifier; drafter defaults to the LM draft."""
        if drafter is None and policy.trees != "none":
            drafter = LMDrafter(self.draft)
        decoder = SpeculativeDecoder(self.target, drafter, policy, VERIFIERS[verifier], self.draft_setting)
        return speculative(name, decoder, setting, self.new_tokens)

    def static_methods(self, setting: SamplingSetting, main: str) -> tuple[dict[str, Generate], Action]:
        """Autoregressive decoding and every rule with labels under its best static tree, named with its (K, L1, L2); and the
        tree of `main`, the selector's rule, whose L1 also follows the previous acceptance length in a method of its own."""
        methods = {BASELINE: self.method(BASELINE, Autoregressive(), main, setting)}
        for name, (labels, allowed) in STATIC.items():
            if labels in self.roots:
                action = static_action(self.roots[labels], setting, allowed & DRAFTING)
                title = f"{TITLES[name]} {tuple(action)}"
                methods[title] = self.method(title, Delayed(action), name, setting)
        follow = static_action(self.roots[main], setting, DRAFTING)
        title = f"{TITLES[main]} ({follow.k}, τ−1, {max(1, follow.l2)})"
        methods[title] = self.method(title, FollowTau(follow.k, max(1, follow.l2), 8), main, setting)
        return methods, follow

    def head_action(self, drafter: Drafter, main: str, setting: SamplingSetting, prompts: list[list[int]]) -> Action:
        """The static action with the most tokens per second for a draft head under `main`, tried on a few prompts in turn."""
        decoders = {
            action: SpeculativeDecoder(self.target, drafter, Delayed(action), VERIFIERS[main], self.draft_setting)
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
