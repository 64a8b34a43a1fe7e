"""Methods: equal ones are recognised and decoded once, grids are tuned once, exports are named."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from nde_talf import (
    Action,
    Beam,
    DySpec,
    SamplingSetting,
    Selector,
)
from nde_talf.decoding.actions import TREE_INDEX, canonical
from nde_talf.evaluation.bench import Bench
from nde_talf.evaluation.benchmark import Task
from nde_talf.evaluation.methods import plan_methods, selector_title
from nde_talf.evaluation.plan import Plan
from nde_talf.evaluation.protocol import BASELINE, CONTROL, STATIC_TREE
from nde_talf.evaluation.static_trees import PICKED, StaticTrees, picked
from nde_talf.evaluation.tuning import WARM_UP, Candidate, Method, Tuner, read_tuned
from nde_talf.selector.schema import SelectorSchema
from tests.decoding.pairs import tiny_pair
from tests.evaluation.labelled import BEST, SETTING, TABLE, roots

RULES = ("naive", "bv", "nss", "naivetree", "specinfer", "spectr", "khisti", "traversal", "gbv")
GREEDY, PROMPT = SamplingSetting(0.0), [1, 2, 3]


@pytest.fixture
def bench(tmp_path):
    tuner = Tuner(tmp_path / "tuned.json", 12, [PROMPT, [4, 5]])
    labels = StaticTrees.of(roots(BEST), TABLE, SETTING)
    target, draft = tiny_pair(40)
    return Bench(
        target=target,
        draft=draft,
        setting=SETTING,
        tune=tuner,
        labels=labels,
        kinds=["code", "prose"],
    )


def at(bench, setting, **changed):
    labels = bench.labels if setting == SETTING else None
    return replace(bench, setting=setting, labels=labels, **changed)


def texts(plan, names):
    return [
        [token for block in plan.methods[name].blocks(PROMPT, 7) for token in block.tokens]
        for name in names
    ]


def selector(rule, tree, learned):
    """With `tree` as its best static option."""
    made = Selector(
        SelectorSchema(16, 16, (rule,), ((1.0, 1.0),), (learned,), hidden=(8, 8), width=4)
    )
    made.static_efficiency[0, TREE_INDEX[canonical(tree)]] = 9.0
    return made


def test_a_plan_decodes_each_method_once(bench):
    bench.rules = ("traversal", "specinfer")
    plan = plan_methods(bench, {"selector", "rules", "baselines"})
    assert list(plan.methods) == [
        BASELINE,
        CONTROL,
        "Traversal (2, 0, 3)",
        "SpecInfer (1, 0, 4)",
        "NaiveTree (1, 0, 4)",
        "Naive (1, 0, 4)",
        "BV (1, 0, 1)",
    ]
    assert plan.titles.same == {
        "Traversal, by domain": "Traversal (2, 0, 3)",
    }
    assert plan.titles.roles[STATIC_TREE.format("traversal")].method == "Traversal (2, 0, 3)"
    first, second = (plan.methods[name] for name in (BASELINE, CONTROL))
    assert first.decoder is not second.decoder  # the control does the same work in one of its own
    assert len({str(text) for text in texts(plan, [BASELINE, CONTROL])}) == 1


@pytest.mark.slow
def test_a_selector_chooses_or_is_its_static_export(bench):
    bench.selectors = {
        "specinfer": selector("specinfer", Action(1, 0, 4), False),
        "gbv": selector("gbv", Action(2, 0, 5), False),
        "traversal": selector("traversal", Action(2, 0, 5), True),
    }
    bench.rules = ("specinfer",)
    plan, title = plan_methods(bench, {"selector"}), selector_title("traversal")
    exports = {
        selector_title("specinfer"): "SpecInfer + selector: static (1, 0, 4)",
        selector_title("gbv"): "GBV + selector: static (2, 0, 5)",
    }
    assert plan.titles.exports == exports and plan.titles.learned == [title]
    assert plan.titles.same == {exports[selector_title("specinfer")]: "SpecInfer (1, 0, 4)"}
    assert list(plan.methods)[2:] == ["SpecInfer (1, 0, 4)", exports[selector_title("gbv")], title]
    record = plan.methods[title](Task(PROMPT))
    assert sum(record.actions.values()) == record.steps == sum(record.accepted.values())
    assert record.cpu_seconds > 0


def test_the_fastest_of_a_grid_is_taken_by_halves_and_only_once(tmp_path):
    """With a clock that says how long each candidate takes."""
    tried = []

    def candidate(seconds):
        def make(title, new_tokens):
            def generate(task):
                if new_tokens > WARM_UP:
                    tried.append((seconds, task.tokens[0]))
                return SimpleNamespace(tokens=10, seconds=float(seconds))

            return generate

        return Candidate(f"takes {seconds} s", make, {"seconds": seconds})

    tune = Tuner(tmp_path / "tuned.json", 12, [[1], [2], [3]])
    method = Method("key", "role", [candidate(n) for n in range(12, 0, -1)], learned=True)
    assert tune(method).options == {"seconds": 1}
    counts = [[prompt for _, prompt in tried].count(n) for n in (1, 2, 3)]
    assert counts == [12, 6, 3] and {n for n, prompt in tried if prompt == 3} == {1, 2, 3}
    assert tune(method) is method.grid[-1] and len(tried) == 21
    assert read_tuned(tune.file) == {"key": {"seconds": 1}}
    fewer = method._replace(grid=method.grid[:-1])
    assert tune(fewer).options == {"seconds": 2}  # another grid than the file knows
    plan = Plan()
    plan.add(fewer, tune)
    assert plan.titles.roles == {"key": ("role", "takes 2 s", "")} and plan.titles.learned == [
        "takes 2 s"
    ]


@pytest.mark.slow
def test_a_setting_without_labels_has_a_tree_by_timing_and_the_policies_of_the_papers(bench):
    greedy = at(
        bench,
        GREEDY,
        policies={"Beam": (Beam(k=3, depth=3, nodes=6), "nss"), "DySpec": (DySpec(6), "greedy")},
        draft_setting="0.3",
    )
    plan = plan_methods(greedy, {"selector", "rules", "baselines", "policies"})
    names = list(plan.methods)
    assert greedy.labels is None and names[:2] == [BASELINE, CONTROL]
    policies = {tree.title: tree.policy for tree in PICKED}
    assert plan.methods[names[2]].decoder.policy is policies[names[2]]
    assert picked(read_tuned(greedy.tune.file)[STATIC_TREE.format("greedy")]) is policies[names[2]]
    assert names[3:] == ["Beam", "DySpec"]
    assert plan.methods["DySpec"].decoder.draft_setting == SamplingSetting(0.3)
    assert len({str(text) for text in texts(plan, names)}) == 1


def test_static_trees_are_ranked_by_labels(bench):
    """Labels: (2, 0, 3) commits 9 tokens, every other tree 1, so that among the others those of one
    draft pass cost least.
    """
    ranked = bench.labels.ranked("traversal", 3)
    assert ranked[0] == bench.fastest(bench.best_static("traversal")) == BEST["traversal"]
    assert len(set(ranked)) == 3 and all(tree.depth == 1 for tree in ranked[1:])
    assert bench.labels.ranked("traversal", 1, "code") == ranked[:1]
    assert bench.labels.ranked("traversal", 1, "tables") == []  # no roots
