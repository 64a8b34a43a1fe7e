"""Equal methods are recognised and decoded once; static exports are called that."""

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest

from nde_talf.decoding.actions import TREES, Action, tree_index
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.ngram_settings import NgramConfig
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.policies.dyspec import DySpec
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.evaluation import methods
from nde_talf.evaluation.assisted import (
    LOOKUPS,
    PLAIN,
    SCHEDULES,
    Schedule,
    assisted_title,
    lookup_title,
)
from nde_talf.evaluation.benchmark import Record, together
from nde_talf.evaluation.methods import Bench, configuration, selector_title
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.trials import WARM_UP
from nde_talf.selector.selector import Selector, SelectorSchema
from tests.decoding.pairs import tiny_pair
from tests.draft_training.heads import random_head
from tests.evaluation.labelled import BEST, SETTING, TABLE, roots

RULES = ("naive", "bv", "nss", "naivetree", "specinfer", "spectr", "khisti", "traversal", "gbv")


def decode(pair, rule: str, tree: Action) -> list[int]:
    decoder = SpeculativeDecoder(pair[0], LMDrafter(pair[1]), Delayed(tree), VERIFIERS[rule])
    return decoder.generate([1, 2, 3], 60, SETTING, Rng.seeded(5)).tokens


@pytest.mark.slow
def test_equal_configurations_write_the_same_text_and_others_do_not():
    """With one seed, on a path: what is called the same really is, draw by draw."""
    pair, path = tiny_pair(40, noise=0.2), Action(1, 0, 4)
    texts = {rule: decode(pair, rule, path) for rule in RULES}
    alike = {
        (a, b)
        for a, b in combinations(RULES, 2)
        if configuration(a, path) == configuration(b, path)
    }
    assert alike == {
        ("naive", "naivetree"),
        ("naive", "specinfer"),
        ("naivetree", "specinfer"),
        ("bv", "traversal"),
        ("bv", "gbv"),
        ("traversal", "gbv"),
    }
    assert all(texts[a] == texts[b] for a, b in alike)
    assert texts["nss"] != texts["specinfer"] != texts["traversal"] != texts["nss"]


def test_trees_and_drafters_tell_methods_apart():
    assert configuration("specinfer", Action(1, 2, 2)) == configuration(
        "specinfer", Action(3, 4, 0)
    )  # one path of four
    assert configuration("specinfer", Action(2, 0, 2)) != configuration(
        "naivetree", Action(2, 0, 2)
    )
    assert configuration("gbv", Action(2, 0, 2)) != configuration("traversal", Action(2, 0, 2))
    assert configuration("specinfer", Action(1, 0, 4)) != configuration(
        "specinfer", Action(1, 0, 4), "draft head"
    )


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(*tiny_pair(40), roots(BEST), TABLE, 12)


def selector(rules: tuple[str, ...], tree: Action, learned: bool) -> Selector:
    """With `tree`, under the last of the rules, as its best static option."""
    made = Selector(
        SelectorSchema(16, 16, rules, ((1.0, 1.0),), (learned,), hidden=(8, 8), width=4)
    )
    made.static_efficiency[0, (len(rules) - 1) * len(TREES) + tree_index(tree)] = 9.0
    return made


def test_a_plan_decodes_each_method_once(bench):
    plan = bench.plan(SETTING)
    bench.add_assisted(plan, Schedule(6), SETTING)
    bench.add_statics(plan, ["traversal", "specinfer"], SETTING)
    bench.add_rules(plan, SETTING)
    bench.add_baselines(plan, "traversal", SETTING)
    assert list(plan.methods) == [
        BASELINE,
        CONTROL,
        "transformers assisted (6 tokens)",
        "Traversal (2, 0, 3)",
        "SpecInfer (1, 0, 4)",
        "BV (1, 0, 1)",
        "Traversal (2, τ−1, 3)",
    ]
    assert plan.same == {
        "NaiveTree (1, 0, 4)": "SpecInfer (1, 0, 4)",
        "Naive (1, 0, 4)": "SpecInfer (1, 0, 4)",
        "Traversal, by entropy": "Traversal (2, 0, 3)",
        "Traversal, by domain": "Traversal (2, 0, 3)",
    }
    tokens, seconds = plan.predicted["SpecInfer (1, 0, 4)"]
    assert tokens == 9 and seconds == pytest.approx(1.4)  # four draft passes and one of the target


def test_a_static_export_is_named_and_not_decoded_where_it_is_there_already(bench):
    plan, title = bench.plan(SETTING), selector_title("specinfer")
    bench.add_statics(plan, ["specinfer"], SETTING)
    bench.add_selector(plan, "specinfer", selector(("specinfer",), Action(1, 0, 4), False), SETTING)
    name = "SpecInfer + selector: static (1, 0, 4)"
    assert plan.exports == {title: name} and plan.same == {name: "SpecInfer (1, 0, 4)"}
    assert list(plan.methods) == [BASELINE, CONTROL, "SpecInfer (1, 0, 4)"] and not plan.learned
    both = selector(("specinfer", "traversal"), Action(2, 0, 5), False)
    bench.add_selector(plan, "across", both, SETTING)
    other = "Any rule + selector: static Traversal (2, 0, 5)"
    assert (
        plan.exports[selector_title("across")] == other
        and list(plan.methods)[-1] == other
        and not plan.learned
    )


@pytest.mark.slow
def test_a_selector_that_chooses_is_learned_and_has_a_static_baseline_of_its_own(bench):
    plan, title = bench.plan(SETTING), selector_title("traversal")
    bench.add_selector(plan, "traversal", selector(("traversal",), Action(2, 0, 5), True), SETTING)
    assert plan.learned == {title} and title in plan.methods and not plan.exports
    assert plan.static == {title: "(2, 0, 3)"}  # by the labels, whatever the selector remembers
    record = plan.methods[title]([1, 2, 3], 0, "code")
    assert sum(record.actions.values()) == record.steps == sum(record.accepted.values())
    assert record.cpu_seconds > 0 and record.first_seconds > 0


def test_a_head_has_a_static_tree_and_the_selector_that_was_trained_for_it(bench):
    head, plan = EagleDrafter(random_head(bench.target)), bench.plan(SETTING)
    bench.add_head(plan, head, Action(1, 0, 3), "traversal", SETTING)
    for learned, tree in (
        (True, Action(2, 0, 5)),
        (False, Action(2, 0, 5)),
        (False, Action(1, 0, 3)),
    ):
        own = selector(("traversal",), tree, learned)
        own.table = TABLE
        bench.add_head_selector(plan, head, own, "traversal", SETTING)
    chosen, title = (
        "Traversal, TALF head + selector (NDE)",
        "Traversal, TALF head + selector: static",
    )
    assert list(plan.methods)[2:] == [
        "Traversal, TALF head (1, 0, 3)",
        chosen,
        f"{title} (2, 0, 5)",
    ]
    assert (
        plan.same == {f"{title} (1, 0, 3)": "Traversal, TALF head (1, 0, 3)"}
        and chosen in plan.learned
    )
    record = plan.methods[chosen]([1, 2, 3], 0, "code")
    assert record.tokens >= 11 and sum(record.actions.values()) == record.steps


def test_the_control_is_the_same_work_in_a_decoder_of_its_own(bench):
    plan = bench.plan(SETTING)
    first, second = (plan.methods[name] for name in (BASELINE, CONTROL))
    assert first.decoder is not second.decoder
    a, b = (list(method.blocks([1, 2, 3], 7)) for method in (first, second))
    assert [x.tokens for x in a] == [x.tokens for x in b]


def test_the_heads_tree_is_the_fastest_of_those_tried(bench, monkeypatch):
    """With a clock that says how long each tree takes: a second a node, so that the shortest path
    wins.
    """
    tried = []

    class Timed:
        def __init__(self, name, decoder, setting, new_tokens):
            self.action, self.new_tokens = decoder.policy.action, new_tokens

        def __call__(self, prompt, seed, kind):
            if self.new_tokens > WARM_UP:
                tried.append(self.action)
            return SimpleNamespace(tokens=10, seconds=float(self.action.nodes))

    monkeypatch.setattr(methods, "Speculative", Timed)
    assert bench.timed_action(
        LMDrafter(bench.draft), "traversal", SETTING, [[1], [2], [3]]
    ) == Action(1, 0, 1)
    assert (
        len(tried) == 12 + 6 + 3
        and tried[-3:] == sorted(methods.TIMED_ACTIONS, key=lambda action: action.nodes)[:3]
    )


def test_a_setting_without_labels_has_a_tree_by_timing_and_the_policies_of_the_papers(bench):
    greedy = SamplingSetting(0.0)
    assert bench.predictions.traced(SETTING) and not bench.predictions.traced(greedy)
    plan, prompts = bench.plan(greedy), [[1, 2, 3], [4, 5]]
    action = bench.timed_action(LMDrafter(bench.draft), "traversal", greedy, prompts)
    bench.add_timed(plan, "traversal", action, greedy)
    bench.add_policy(plan, "Beam", Beam(k=3, depth=3, nodes=6), "nss", greedy)
    bench.add_policy(plan, "DySpec at 0.3", DySpec(6), "without_replacement", greedy, "0.3")
    assert list(plan.methods) == [
        BASELINE,
        CONTROL,
        f"Traversal {tuple(action)}",
        "Beam",
        "DySpec at 0.3",
    ]
    assert action in methods.TIMED_ACTIONS and not plan.predicted.keys() - {BASELINE, CONTROL}
    assert plan.methods["DySpec at 0.3"].decoder.draft_setting == SamplingSetting(0.3)
    texts = [
        [token for block in own.blocks([1, 2, 3], 7) for token in block.tokens]
        for own in plan.methods.values()
    ]
    assert all(text == texts[0] for text in texts)
    with pytest.raises(UserError, match=r"T=0 was not traced.*traces\.settings"):
        bench.add_rules(plan, greedy)


def test_transformers_loop_gets_the_fastest_of_its_schedules(bench, monkeypatch):
    """Timed like the head's trees: with a clock under which six tokens are best, and on prompts
    that are all used.
    """
    tried = []

    def timed(name, target, draft, setting, new_tokens, schedule):
        def generate(prompt, seed, kind):
            if new_tokens > WARM_UP:
                tried.append((schedule, prompt[0]))
            tokens, slow = (
                (schedule.tokens, schedule.threshold + (schedule.kind != "constant"))
                if schedule
                else (20, 1)
            )
            return SimpleNamespace(tokens=10, seconds=1.0 + abs(tokens - 6) + slow)

        return generate

    monkeypatch.setattr(methods, "transformers_assisted", timed)
    assert bench.assisted_schedule(SETTING, [[1], [2], [3]]) == Schedule(6)
    assert [schedule for schedule, prompt in tried if prompt == 1] == list(SCHEDULES)
    assert len(SCHEDULES) == len(methods.TIMED_ACTIONS) and len(tried) == 12 + 6 + 3


def test_transformers_loop_is_named_by_its_schedule(bench):
    chosen = bench.assisted_schedule(SETTING, [[1, 2, 3], [4, 5, 6]], SCHEDULES[:3])
    assert chosen in SCHEDULES[:3]
    plan = bench.plan(SETTING)
    bench.add_assisted(plan, None, SETTING)
    title = list(plan.methods)[-1]
    assert title == assisted_title(None) == "transformers assisted (default schedule)"
    assert plan.methods[title]([1, 2, 3], 0, "code").method == title


def test_n_grams_and_transformers_other_loops_are_methods_like_others(bench):
    greedy, config = SamplingSetting(0.0), NgramConfig(min_size=2)
    plan, head = bench.plan(greedy), EagleDrafter(random_head(bench.target))
    lookup = bench.lookup(greedy, [[1, 2, 3]])
    bench.add_plain(plan, greedy)
    bench.add_lookup(plan, lookup, greedy)
    bench.add_ngram(plan, config, greedy)
    bench.add_mixed(plan, config, None, Action(1, 0, 2), "traversal", greedy)
    bench.add_mixed(plan, config, head, Action(1, 0, 2), "traversal", greedy)
    names = [
        PLAIN,
        lookup_title(lookup),
        "n-gram",
        "n-gram + Traversal (1, 0, 2)",
        "n-gram + Traversal, TALF head (1, 0, 2)",
    ]
    assert lookup in LOOKUPS and list(plan.methods) == [BASELINE, CONTROL, *names]
    long = {name: replace(plan.methods[name], new_tokens=60) for name in (BASELINE, *names[2:])}
    texts = {
        name: [token for block in own.blocks([1, 2, 3], 0) for token in block.tokens]
        for name, own in long.items()
    }
    assert all(text == texts[BASELINE] for text in texts.values())
    record = long["n-gram"]([1, 2, 3], 0, "code")
    assert sum(record.drafted_by_match.values()) == record.nodes - record.steps > 0
    assert sum(record.accepted_by_match.values()) == record.tokens - record.steps > 0
    assert together([record, record])[0].drafted_by_match == {
        size: 2 * n for size, n in record.drafted_by_match.items()
    }
    assert (
        Record.of_line(record.line()) == record
        and not long[BASELINE]([1, 2, 3], 0, "code").drafted_by_match
    )


def test_a_target_without_a_draft_is_decoded_by_n_grams_and_by_transformers(bench):
    alone, greedy = Bench(bench.target, None, None, None, 12), SamplingSetting(0.0)
    plan = alone.plan(greedy)
    alone.add_ngram(plan, NgramConfig(), greedy)
    alone.add_plain(plan, greedy)
    assert list(plan.methods) == [BASELINE, CONTROL, "n-gram", PLAIN] and not plan.predicted
    assert all(own([1, 2, 1, 2], 0, "code").tokens >= 11 for own in plan.methods.values())
