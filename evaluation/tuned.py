"""Baselines with a parameter: policies that change the length of their drafts without a trained selector, each family at the
setting that is fastest on prompts that are not evaluated.

Every family has at least as many trials as a head's static tree, 12, and is timed in the decode loop, not priced by a table.
"""

from itertools import product

from decoding.actions import TREES
from decoding.policies.base import TreePolicy
from decoding.policies.delayed import FollowTau
from decoding.policies.stopping import CRITERIA, ConfidenceStop, FollowMean
from decoding.sampling import SamplingSetting
from decoding.verification import VERIFIERS
from evaluation.benchmark import Generate
from evaluation.methods import TITLES, Bench, Plan, fastest
from selector.online import Bandit, OnlineAcceptance, prices

FAMILIES = ("confidence", "last acceptance", "mean acceptance", "online acceptance", "bandit")
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
ARMS = 8  # trees that a bandit chooses among, at most


def candidates(bench: Bench, family: str, main: str, setting: SamplingSetting) -> dict[str, TreePolicy]:
    """The policies of a family that are tried under the rule `main`, by title. Those that need labels or prices are left out
    where there are none."""
    if family == "confidence":
        found = product(CRITERIA, THRESHOLDS, (4, 8, 16))
        greedy = setting.temperature == 0
        return {f"confidence ({by} < {at:g}, ≤ {n})": ConfidenceStop(at, n, by, greedy) for by, at, n in found}
    if family == "mean acceptance":
        return {
            f"mean of {window} steps + {plus}, ≤ {n}": FollowMean(window, plus, n)
            for window, plus, n in product((2, 4, 8), (0, 1, 2), (8, 16))
        }
    if family == "last acceptance":
        return {f"({k}, τ−1, {n})": FollowTau(k, n, 8) for k, n in product((1, 2, 3, 4), (1, 2, 4))}
    if not (labels := bench.predictions.labelled(main, setting)):
        return {}
    cost = prices(bench.table, main)
    if family == "online acceptance":
        return {
            f"online acceptance, rate {rate:g}, ≤ {n}": OnlineAcceptance(cost, n, rate)
            for rate, n in product((0.0, 0.01, 0.03, 0.1, 0.3, 1.0), (8, 16))
        }
    own, priced = bench.predictions.under(setting), bench.predictions.priced(labels)
    pace = (priced.priced(0, own)[1] / priced.efficiency[own]).mean(0)  # seconds a token
    best = pace.topk(ARMS, largest=False).indices.tolist()
    return {
        f"bandit over {n} trees, width {width:g}": Bandit(cost, [TREES[i] for i in best[:n]], width)
        for n, width in product((2, 4, ARMS), (0.03, 0.1, 0.3, 1.0))
    }


def tune(bench: Bench, tried: dict[str, TreePolicy], main: str, setting: SamplingSetting, prompts: list[list[int]]) -> str:
    """The title of the policy with the most tokens per second."""

    def make(title: str, tokens: int) -> Generate:
        return bench.method(title, tried[title], VERIFIERS[rule_of(main, setting)], setting, new_tokens=tokens)

    return fastest(list(tried), make, bench.new_tokens, prompts)


def rule_of(main: str, setting: SamplingSetting) -> str:
    """Picked tokens, which greedy decoding verifies, have no distribution that `main` could look at."""
    return "greedy" if setting.temperature == 0 else main


def add_tuned(bench: Bench, plan: Plan, title: str, policy: TreePolicy, main: str, setting: SamplingSetting) -> None:
    """A family's best policy under `main`."""
    name = f"{TITLES[main]}, {title}"
    plan.add(name, lambda: bench.method(name, policy, VERIFIERS[rule_of(main, setting)], setting))
