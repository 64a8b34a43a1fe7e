"""Which methods stage evaluate decodes under a setting, and how each is tuned first.

What is tuned is chosen once, on prompts that are not evaluated, and written beside the records, so
that a resumed evaluation decodes the same methods.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nde_talf.data.text.prompts import Prompt
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json, write_json
from nde_talf.decoding.drafter import Drafter, drafter_of
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.evaluation.assisted import DEFAULT, Lookup, Schedule
from nde_talf.evaluation.methods import NGRAM, TITLES, Bench, Plan
from nde_talf.evaluation.protocol import BASELINE
from nde_talf.evaluation.trials import trial_count
from nde_talf.evaluation.tuned import (
    DRAFT_TREES,
    FAMILIES,
    MIXED_FAMILIES,
    add_tuned,
    candidates,
    learn_online,
    mixed_candidates,
    mixed_role,
    ngram_candidates,
    tune,
)
from nde_talf.pipelines.config import WITHOUT_DRAFT, Config
from nde_talf.pipelines.drafted import load_head_draft
from nde_talf.pipelines.policy_table import default_verifier, make_policy
from nde_talf.pipelines.selector import selectors
from nde_talf.pipelines.stage import console
from nde_talf.selector.baselines import MIN_ROOTS
from nde_talf.selector.fingerprint import fingerprint, same_model
from nde_talf.selector.selector import Selector

RERANKED = 3  # the best static trees by the labels that are timed, where baselines are tuned
ROLES = "roles"
"""Files of what each method of a setting is: see `Plan.roles`."""


def plan_methods(
    config: Config,
    folders: dict[str, Path],
    bench: Bench,
    setting: SamplingSetting,
    tuning: list[Prompt],
) -> Plan:
    """The methods of one setting. A method that is the same as an earlier one is not decoded."""
    wanted, main, plan = methods(config), config.selector.verifiers[0], bench.plan(setting)
    name, texts = (
        next(key for key, own in SETTINGS.items() if own == setting),
        [prompt.tokens for prompt in tuning],
    )

    def once(file: str, key: str, kind: Any, choose: Callable[[], Any]) -> Any:
        """What `choose` finds by timing, a `kind`, chosen once: a resumed evaluation reads it from
        a file.

        One of an earlier version may hold another key.
        """
        remembered = folders["evaluate"] / f"{file}-{name}.json"
        if not remembered.exists() or key not in read_json(remembered):
            write_json(remembered, {key: choose()})
        return read_json(remembered, dict[str, kind])[key]

    def timed(file: str, drafter: Drafter | None = None) -> Action:
        """The static tree of a drafter (None: the LM draft), chosen by timing."""
        drafter = drafter or drafter_of(bench.draft, bench.fixed)
        return Action(
            *once(
                file,
                "action",
                tuple[int, int, int],
                lambda: bench.timed_action(drafter, main, setting, texts),
            )
        )

    labelled, tuned = (
        bench.predictions.traced(setting),
        "tuned" in wanted and bench.draft is not None,
    )
    # At temperature 0 all rules accept the same tokens of the same draws, so the main one stands
    # for all.
    chosen = {
        own: rules for own, rules in selectors(config).items() if setting.temperature or own == main
    }
    static_rules = [
        rule for rule in config.selector.verifiers if setting.temperature or rule == main
    ]
    if tuned and labelled:
        drafter = drafter_of(bench.draft, bench.fixed)
        for rule in dict.fromkeys([*static_rules, main]):
            best = bench.predictions.ranked(rule, setting, RERANKED)
            choose = partial(bench.timed_action, drafter, rule, setting, texts, best)
            found = once(f"static-{rule}", "tree", tuple[int, int, int], choose)
            bench.predictions.timed[rule, setting] = Action(*found)
        bench.online_weights[setting] = once(
            "online", "weights", list[float], lambda: learn_online(bench, main, setting, texts)
        )
    if "assisted" in wanted and same_rows(bench.target, bench.draft):
        found = once(
            "assisted",
            "schedule",
            tuple[int, str, float] | None,
            lambda: bench.assisted_schedule(setting, texts),
        )
        bench.add_assisted(plan, found and Schedule(*found), setting)
    if "transformers" in wanted:
        bench.add_plain(plan, setting)
        bench.add_lookup(
            plan,
            Lookup(*once("lookup", "sizes", tuple[int, int], lambda: bench.lookup(setting, texts))),
            setting,
        )
        if same_rows(bench.target, bench.draft) and not (
            tuned and "assisted" in wanted
        ):  # else it is among what was tried
            bench.add_assisted(plan, DEFAULT, setting)
    if "selector" in wanted and labelled:
        bench.add_statics(plan, static_rules, setting)
        for own in chosen:
            bench.add_selector(
                plan, own, Selector.from_pretrained(folders["selector"] / "export" / own), setting
            )
    elif "selector" in wanted:
        bench.add_timed(plan, main, timed("static"), setting)
    if "rules" in wanted and labelled:
        bench.add_rules(plan, setting)
    if "baselines" in wanted and labelled:
        few = [
            kind
            for kind in sorted({*bench.roots.kind})
            if not bench.predictions.ranked(main, setting, 1, kind)
        ]
        if few:
            console.print(
                f"! {setting}: fewer than {MIN_ROOTS} training roots of {', '.join(few)}, so by"
                " domain the best tree of the setting is taken there. Raise traces.train_prompts,"
                " or lower traces.stride."
            )
        choose = partial(_by_domain, bench, main, setting, tuning)
        trees = once("domains", "trees", dict[str, tuple[int, int, int]], choose) if tuned else None
        bench.add_baselines(
            plan, main, setting, trees and {kind: Action(*tree) for kind, tree in trees.items()}
        )
    ngram = config.evaluation.ngram
    if tuned:
        named = {own: own if own == DRAFT_TREES else f"{TITLES[main]}, {own}" for own in FAMILIES}
        families = {
            role: partial(candidates, bench, own, main, setting) for own, role in named.items()
        }
        if "ngram" in wanted:
            families[NGRAM] = partial(ngram_candidates, bench, ngram)
        if "mixed" in wanted:
            mixed = {
                own: partial(mixed_candidates, bench, ngram, own, main, setting)
                for own in MIXED_FAMILIES
            }
            families |= {mixed_role(own, main): found for own, found in mixed.items()}
        for role, tried in ((role, find()) for role, find in families.items()):
            if tried:
                file = "tuned-" + re.sub("[^a-z]+", "-", role.lower()).strip("-")
                best = once(
                    file, "method", str, lambda tried=tried: tune(bench, tried, setting, texts)
                )
                add_tuned(bench, plan, role, best, tried[best], setting)
                plan.learned |= {best} if role == mixed_role("selector", main) else set()
    if "policies" in wanted:
        for own, options in config.evaluation.policies.items():
            policy, rule = make_policy(own, options), default_verifier(own, setting.temperature)
            bench.add_policy(
                plan,
                policy_title(own, options),
                policy,
                rule,
                setting,
                config.evaluation.draft_temperature,
            )
    head = (
        load_head_draft(folders["draft"] / "export", bench.target).drafter(bench.fixed)
        if "head" in wanted
        else None
    )
    if head:
        bench.add_head(plan, head, timed("head", head), main, setting)
        if config.evaluation.head_run:
            bench.add_head_selector(plan, head, head_selector(config, head), main, setting)
    if "ngram" in wanted and not tuned:
        bench.add_ngram(plan, ngram, setting)
    if "mixed" in wanted and bench.draft and not (tuned and labelled):
        tree = bench.predictions.static(main, setting) if labelled else timed("static")
        bench.add_mixed(plan, ngram, None, tree, main, setting)
    if "mixed" in wanted and head:
        bench.add_mixed(plan, ngram, head, timed("head", head), main, setting)
    roles = {"roles": plan.roles, "same": plan.same, "learned": sorted(plan.learned)}
    write_json(folders["evaluate"] / f"{ROLES}-{name}.json", {"setting": str(setting), **roles})
    return plan


def estimate(config: Config, bench: Bench, tuning: list[Prompt]) -> str:
    """How much will be decoded, and how long that takes if all methods are as fast as plain
    decoding.
    """
    wanted, rules, prompts = methods(config), len(config.selector.verifiers), len(tuning)
    setting, tuned = SETTINGS[config.evaluation.settings[0]], "tuned" in wanted
    rules = rules if setting.temperature else 1
    tried = [12] * len(wanted & {"assisted", "transformers", "head"})
    if tuned:
        tried += [
            63,
            18,
            *[12] * (len(FAMILIES) - 2 + ("ngram" in wanted) + 2 * ("mixed" in wanted)),
            *[RERANKED] * rules,
        ]
    timed = sum(trial_count(count, prompts) for count in tried)
    counts = {
        "selector": 2 * rules + config.selector.across,
        "baselines": 3,
        "rules": len(config.traces.verifiers),
        "head": 1,
    }
    counts |= {
        "tuned": len(FAMILIES),
        "ngram": 1,
        "mixed": 1 + ("selector" in wanted),
        "assisted": 1,
        "transformers": 4,
    }
    decoded = 2 + sum(counts.get(own, len(config.evaluation.policies)) for own in wanted)
    plain = bench.plan(setting).methods[BASELINE]
    plain(tuning[0].tokens, 0, "")
    record, blocks = (
        plain(tuning[0].tokens, 0, ""),
        config.evaluation.prompts * config.evaluation.passes,
    )
    minutes = (record.seconds + record.first_seconds) * (decoded * blocks + timed) / 60
    several, tokens = len(config.evaluation.settings), config.evaluation.new_tokens
    return (
        f"about {decoded} methods a setting, {blocks} blocks of {tokens} tokens, and {timed}"
        f" generations to tune: {minutes:.0f} min at the speed of plain decoding,"
        f" {several * minutes:.0f} min for {several} settings. After an interruption, what is done"
        " is not decoded again"
    )


def head_selector(config: Config, head: EagleDrafter) -> Selector:
    """The selector that the run `evaluation.head_run` trained for the head.

    Raises UserError if there is none, or it is for another head.
    """
    name, main = config.evaluation.head_run, config.selector.verifiers[0]
    export = Path(config.paths.checkpoints) / str(name) / "selector" / "export" / main
    if not (export / "config.json").exists():
        raise UserError(
            f"evaluation.head_run={name}: {export} holds no selector. Train one: run={name}"
            f" base={config.run} traces.drafter=head selector.verifiers=[{main}]."
        )
    selector = Selector.from_pretrained(export)
    if not same_model(selector.schema.pair.get("draft", ()), fingerprint(head.model)):
        raise UserError(
            f"evaluation.head_run={name}: the selector in {export} was trained for another draft"
            f" than this run's head. Train it again with run={name} base={config.run}"
            " traces.drafter=head."
        )
    return selector


def _by_domain(
    bench: Bench, main: str, setting: SamplingSetting, tuning: list[Prompt]
) -> dict[str, Action]:
    """The best static tree of `main` for each domain with enough roots: the fastest of the best
    ones by the labels, on the prompts of that domain, where there are any.
    """
    found, drafter = {}, drafter_of(bench.draft, bench.fixed)
    for kind in sorted({*bench.roots.kind}):
        if best := bench.predictions.ranked(main, setting, RERANKED, kind):
            texts = [prompt.tokens for prompt in tuning if prompt.kind == kind]
            found[kind] = (
                bench.timed_action(drafter, main, setting, texts, best) if texts else best[0]
            )
    return found


def policy_title(name: str, options: dict[str, Any]) -> str:
    """What a policy is called in tables: "SALF (nodes=32)"."""
    titles = {"salf": "SALF", "dynatree": "DynaTree", "dyspec": "DySpec", "gbv": "GBV"}
    title = titles.get(name, name.replace("_", " ").capitalize())
    given = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"{title} ({given})" if given else title


def without_labels(config: Config) -> str:
    """What is left out, or chosen in another way, under settings that were not traced; empty where
    all were.
    """
    names = [name for name in config.evaluation.settings if name not in config.traces.settings]
    wanted = methods(config)
    said = [f"no {own}" for own in ("selector", "rules", "baselines") if own in wanted]
    said += (
        [f"the static tree of {config.selector.verifiers[0]} chosen by timing"]
        if "selector" in wanted
        else []
    )
    return f"{', '.join(names)} not traced, so {', '.join(said)} there" if names and said else ""


def same_rows(target: CausalModel, draft: CausalModel | None) -> bool:
    return isinstance(draft, CausalModel) and target.config.vocab_size == draft.config.vocab_size


def methods(config: Config) -> set[str]:
    """What is compared with plain decoding: of what is asked for, what there is without a draft
    model where there is none.

    Then n-grams are mixed with the head alone.
    """
    wanted = {*config.evaluation.methods}
    if config.traces.drafter == "head":
        return wanted - {"assisted", "head"}  # all methods draft with the head
    mixed = {"mixed"} if "head" in wanted else set()
    return wanted if config.model.has_draft else wanted & {*WITHOUT_DRAFT, *mixed}
