"""Baselines with a parameter, each family at the setting that is fastest on prompts that are not
evaluated.

What a user could run in place of a selector: policies that change the length of their drafts, trees
of the draft's most probable tokens, n-grams. Every family has at least as many trials as a head's
static tree, 12, and is timed in the decode loop, not priced by a table.
"""

from dataclasses import replace
from itertools import product
from typing import NamedTuple

from nde_talf.decoding.drafter import Drafter
from nde_talf.decoding.ngram import NgramDrafter
from nde_talf.decoding.ngram_settings import NgramConfig
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Delayed, FollowTau
from nde_talf.decoding.policies.dynatree import DynaTree, DynaTreeConfig
from nde_talf.decoding.policies.dyspec import DySpec
from nde_talf.decoding.policies.ngram import NgramTree
from nde_talf.decoding.policies.salf import Salf
from nde_talf.decoding.policies.stopping import CRITERIA, ConfidenceStop, FollowMean
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.decoding.verifier import Verifier
from nde_talf.evaluation.benchmark import Generate
from nde_talf.evaluation.methods import (
    BEST_STATIC,
    NGRAM,
    TITLES,
    Bench,
    Plan,
    fastest,
    selector_title,
)
from nde_talf.selector.online import Bandit, OnlineAcceptance, prices

DRAFT_TREES = "draft trees"
FAMILIES = (
    "confidence",
    "last acceptance",
    "mean acceptance",
    "online acceptance",
    "bandit",
    DRAFT_TREES,
)
"""Those that need a draft model alone."""
MIXED_FAMILIES = ("static", "selector")
"""What drafts where n-grams find nothing."""
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
ARMS = 8  # trees that a bandit chooses among, at most
WARM_RATE = 0.1  # at which an online estimate learns from the prompts that it is tuned on


class Candidate(NamedTuple):
    """A policy with a rule that is lossless on its trees. drafter: None for the LM draft."""

    policy: TreePolicy
    rule: Verifier
    drafter: Drafter | None = None

    def method(
        self, bench: Bench, title: str, setting: SamplingSetting, tokens: int | None = None
    ) -> Generate:
        """It as a method that writes so many tokens; None: as many as the bench's."""
        return bench.method(title, self.policy, self.rule, setting, self.drafter, tokens)


def candidates(
    bench: Bench, family: str, main: str, setting: SamplingSetting
) -> dict[str, Candidate]:
    """The policies of a family that are tried under the rule `main`, by title.

    Those that need labels or prices are left out where there are none.
    """
    greedy = setting.temperature == 0
    # Picked tokens, which greedy decoding verifies, have no distribution that `main` could look at.
    rule = VERIFIERS["greedy" if greedy else main]
    if family == DRAFT_TREES:
        return _draft_trees(greedy)
    return {
        f"{TITLES[main]}, {title}": Candidate(policy, rule)
        for title, policy in _by_length(bench, family, main, setting)
    }


def _by_length(
    bench: Bench, family: str, main: str, setting: SamplingSetting
) -> list[tuple[str, TreePolicy]]:
    """Policies that change the length of their drafts, or choose among trees."""
    if family == "confidence":
        found, greedy = product(CRITERIA, THRESHOLDS, (4, 8, 16)), setting.temperature == 0
        return [
            (f"confidence ({by} < {at:g}, ≤ {n})", ConfidenceStop(at, n, by, greedy))
            for by, at, n in found
        ]
    if family == "mean acceptance":
        means = product((2, 4, 8), (0, 1, 2), (8, 16))
        return [
            (f"mean of {window} steps + {plus}, ≤ {n}", FollowMean(window, plus, n))
            for window, plus, n in means
        ]
    labels = bench.predictions.labelled(main, setting)
    if family == "last acceptance":
        shapes = set(product((1, 2, 3, 4), (1, 2, 4)))
        if labels:
            static = bench.predictions.static(main, setting)
            shapes.add((static.k, max(1, static.l2)))
        return [(f"({k}, τ−1, {n})", FollowTau(k, n, 8)) for k, n in sorted(shapes)]
    if not labels:
        return []
    cost = prices(bench.table, main)
    if family == "online acceptance":
        tried = product((0.0, 0.01, 0.03, 0.1, 0.3, 1.0), (8, 16))
        weights = bench.online_weights.get(setting)
        given = {} if weights is None else {"weights": weights}
        return [
            (f"online acceptance, rate {rate:g}, ≤ {n}", OnlineAcceptance(cost, n, rate, **given))
            for rate, n in tried
        ]
    best = bench.predictions.ranked(main, setting, ARMS)
    arms = product((2, 4, ARMS), (0.03, 0.1, 0.3, 1.0))
    return [
        (f"bandit over {n} trees, width {width:g}", Bandit(cost, best[:n], width))
        for n, width in arms
    ]


def _draft_trees(greedy: bool) -> dict[str, Candidate]:
    """The policies of other papers, which draft the tokens that the draft holds most probable."""
    picked, drawn = (
        VERIFIERS["greedy" if greedy else rule] for rule in ("nss", "without_replacement")
    )
    found: dict[str, Candidate] = {}
    for nodes in (4, 8, 16):
        found |= {
            f"Beam (3 wide, 4 deep, {nodes} nodes)": Candidate(Beam(3, 4, nodes), picked),
            f"SALF ({nodes} nodes)": Candidate(Salf(nodes, batch=4), picked),
            f"DynaTree ({nodes} nodes)": Candidate(DynaTree(DynaTreeConfig(nodes=nodes)), picked),
            f"DySpec ({nodes} nodes)": Candidate(DySpec(nodes), drawn),
        }
    return found


def ngram_configs(base: NgramConfig, mixed: bool) -> list[NgramConfig]:
    """What is tried for n-grams: alone, or mixed with another draft."""
    changed = (
        product((1, 2), (4, 8, 16), (0.1, 0.3))
        if not mixed
        else product((1, 2), (4, 8), (0.0, 0.4, 0.7))
    )
    last = "min_rate" if mixed else "threshold"
    return [
        replace(base, **dict(zip(("min_size", "nodes", last), values, strict=True)))
        for values in changed
    ]


def ngram_candidates(bench: Bench, base: NgramConfig) -> dict[str, Candidate]:
    """Drafting from the text alone."""
    return {
        f"{NGRAM} ({own.min_size} to {own.max_size} tokens, {own.nodes} nodes, threshold {own.threshold:g})": Candidate(
            NgramTree(own), VERIFIERS["nss"], NgramDrafter(bench.target.vocab_size, own)
        )
        for own in ngram_configs(base, mixed=False)
    }


def mixed_candidates(
    bench: Bench, base: NgramConfig, what: str, main: str, setting: SamplingSetting
) -> dict[str, Candidate]:
    """N-grams where the text repeats itself; elsewhere the best static tree of `main`, or its
    selector.

    None where it has no labels, or no selector that chooses.
    """
    if what == "selector":
        elsewhere: TreePolicy | None = bench.neural.get(main)
        title = selector_title(main)
    else:
        tree = (
            bench.predictions.static(main, setting)
            if bench.predictions.labelled(main, setting)
            else None
        )
        elsewhere, title = tree and Delayed(tree), tree and f"{TITLES[main]} {tuple(tree)}"
    found: dict[str, Candidate] = {}
    for own in ngram_configs(base, mixed=True) if elsewhere else ():
        policy, drafter = bench.mixed(own, None, elsewhere, VERIFIERS[main])
        sizes = (
            f"{own.min_size} to {own.max_size} tokens, {own.nodes} nodes, rate ≥ {own.min_rate:g}"
        )
        found[f"{NGRAM} ({sizes}) + {title}"] = Candidate(policy, policy.verifier, drafter)
    return found


def mixed_role(what: str, main: str) -> str:
    """The role of n-grams with the best static tree of `main`, or with its selector."""
    return (
        f"{NGRAM} +"
        f" {selector_title(main) if what == 'selector' else f'{TITLES[main]}, {BEST_STATIC}'}"
    )


def tune(
    bench: Bench, tried: dict[str, Candidate], setting: SamplingSetting, prompts: list[list[int]]
) -> str:
    """The title of the one with the most tokens per second."""
    return fastest(
        list(tried),
        lambda title, tokens: tried[title].method(bench, title, setting, tokens),
        bench.new_tokens,
        prompts,
    )


def add_tuned(
    bench: Bench, plan: Plan, role: str, title: str, best: Candidate, setting: SamplingSetting
) -> None:
    """A family's best candidate."""
    plan.add(title, lambda: best.method(bench, title, setting), role=role)


def learn_online(
    bench: Bench, main: str, setting: SamplingSetting, prompts: list[list[int]]
) -> list[float]:
    """The weights that an `OnlineAcceptance` has after decoding the prompts one after the other:
    where its sequences begin.
    """
    policy = OnlineAcceptance(prices(bench.table, main), rate=WARM_RATE)
    decode = bench.method("", policy, VERIFIERS[main], setting)
    for seed, prompt in enumerate(prompts):
        decode(prompt, seed, "")
        policy.weights = list(policy.last)
    return policy.weights
