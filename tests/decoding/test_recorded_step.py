"""Recorded steps: today's tokens, the target's law, one upload and one wait, and graphs could hold them."""

import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from nde_talf import (
    VERIFIERS,
    Action,
    Autoregressive,
    Beam,
    CausalModel,
    DecodingState,
    Delayed,
    EagleDrafter,
    LMDrafter,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
    StaticShapes,
)
from nde_talf.decoding.actions import ACTIONS
from nde_talf.decoding.actions import TREES as ALL_TREES
from nde_talf.decoding.common.errors import Advice
from nde_talf.decoding.models import static_shapes
from nde_talf.decoding.models.static_shapes import RecordedGraphs
from nde_talf.decoding.recorded_step import PARENTS, SEES, RecordedShapes, RecordedSteps
from nde_talf.decoding.rules.verification_table import Rows
from nde_talf.decoding.sampling import rng as sampling
from nde_talf.decoding.sampling.nucleus import nucleus_sorted
from nde_talf.decoding.sampling.sampling_setting import RAW
from nde_talf.decoding.testing import exact_law
from tests.decoding.families import family
from tests.decoding.laws import continued as law_and_then_p
from tests.decoding.laws import distance
from tests.decoding.memoized import memoized_model
from tests.decoding.pairs import tiny_pair
from tests.decoding.tables import Tables, emitted, scored
from tests.decoding.test_laws import TOLERANCE, PeakedTables
from tests.decoding.tiny_loop import law_of
from tests.draft_training.heads import random_eagle3, random_head
from tests.refusal import refusal
from tests.test_simulated_gpu import PROMPT, Scripted, selecting

RULES = ("specinfer", "naivetree", "nss", "traversal")
TREES = (Action(4, 0, 3), Action(2, 2, 2), Action(3, 1, 1))
HEADS = {"eagle": random_head, "eagle3": random_eagle3}
CONTEXT = 48


def static():
    return RecordedShapes(CONTEXT, rows=48)


def drafter(name, target, draft, shapes):
    return LMDrafter(draft, shapes) if name == "lm" else EagleDrafter(HEADS[name](target), shapes)


def decoder(policy, rule, shapes, drafts="lm", pair=None):
    target, draft = pair or tiny_pair(29, layers=4)
    return SpeculativeDecoder(
        target, drafter(drafts, target, draft, shapes), policy, rule, static=shapes
    )


def cases():
    for tree in TREES:
        for drafts in ("lm", *HEADS):
            for rule in RULES:
                quick = rule == "traversal" and (drafts == "lm") == (tree == TREES[0])
                yield pytest.param(tree, drafts, rule, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("tree,drafts,rule", [*cases()])
@pytest.mark.parametrize("setting", [SamplingSetting(1.0, 0.9), SamplingSetting(0.0)], ids=str)
def test_tokens_are_todays(tree, drafts, rule, setting):
    """Numbers are scripted by purpose: for draws of a level, for the rule and for the last token."""
    texts = []
    for shapes in (None, static()):
        of = decoder(Delayed(tree), rule, shapes, drafts)
        text = of.generate(PROMPT, 20, setting, Scripted(0))
        texts.append((text.tokens, [step.nodes for step in text.steps]))
    assert texts[0] == texts[1]
    assert shapes.steps  # of the last one


@pytest.mark.parametrize(
    "name,policy,rule",
    [
        ("tiny", selecting, "specinfer"),
        ("tiny", Autoregressive, "nss"),
        pytest.param("gemma-3", lambda: Delayed(TREES[1]), "traversal", marks=pytest.mark.slow),
    ],
)
def test_a_context_is_filled_as_today(name, policy, rule):
    """By a selector that looks at the models' states, by plain decoding, with windows of attention."""
    texts, asked = [], (PROMPT, CONTEXT + 1 - len(PROMPT), SamplingSetting(0.8))
    for shapes in (StaticShapes(CONTEXT, rows=48), static()):
        pair = tiny_pair(29, layers=4)
        if name != "tiny":
            pair = family(name), family(name, noise=0.01)
        of = decoder(policy(), rule, shapes, pair=pair)
        texts.append(of.generate(*asked, Scripted(0)).tokens)
    assert texts[0] == texts[1] and len(PROMPT) + len(texts[0]) == CONTEXT + 1


class OfTables(RecordedSteps):
    """Steps whose models are tables; draws, merging, the table and the walk are the real ones."""

    def __init__(self, tables):
        self.tables, (row, _) = tables, tables(())
        super().__init__(row, row, row)

    def text(self, row):
        tokens, parents = [], self.whole[PARENTS].tolist()
        while row:
            tokens.append(int(self.rows.tokens[row]))
            row = parents[row]
        return tuple(reversed(tokens))

    def advance(self, count, width, shown):
        self.rows.above.fill_(-1)
        self.rows.w0.fill_(1)
        self.row.fill_(1)
        self.rows.q[0] = self.tables(())[1]
        self.draw(width)

    def level(self, width, below, shown):
        end = int(self.row)
        for row in range(end - width, end):
            self.rows.q[row] = self.tables(self.text(row))[1]
        self.draw(below)

    def score(self, nodes, shown):
        for row in range(int((self.whole[SEES] > 0).sum())):
            self.rows.p[row] = self.tables(self.text(row))[0]
        self.row.fill_(1)

    def emitted(self, policy, rule, rng):
        turn = SimpleNamespace(passes=SimpleNamespace(turn=nullcontext))
        self.decoder = SimpleNamespace(policy=policy, verify=rule, tick=time.perf_counter)
        self.decoder.static = static()
        self.accepted, state = ([0], [0]), DecodingState(0, 1, 20, RAW, None, None)
        return tuple(self.step(state, rng, turn, None)[0].tokens)


def all_tables(night):
    yield Tables("sparse", seed=3, vocabulary=2), 1e-9
    for dtype, bound in TOLERANCE.items():
        for kind in ("gap 16", "two steps", "ties", "top-p of both") if night else ("two steps",):
            yield PeakedTables(kind, dtype, 2), bound


@pytest.mark.parametrize(
    "night",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.law)],
)
@pytest.mark.parametrize(
    "action", [Action(1, 0, 2), Action(2, 0, 1), Action(2, 1, 1), Action(2, 0, 2)], ids=str
)
def test_laws_are_the_targets_and_todays(action, night):
    policy = Delayed(action)
    for name, rule in VERIFIERS.items():
        if rule.table is None or policy.trees not in rule.trees:
            continue
        for tables, bound in all_tables(night):
            steps = OfTables(tables)
            steps.emitted(Delayed(Action(4, 2, 3)), VERIFIERS["traversal"], Rng.seeded(0))
            law = exact_law(partial(steps.emitted, policy, rule))
            today = exact_law(lambda rng, t=tables, r=rule: emitted(scored(t, policy, rng), r, rng))
            assert abs(sum(law.values()) - 1) < 1e-12
            assert distance(law, today) < bound, name
            length = action.depth + 1
            p = law_and_then_p({(): 1.0}, tables, length)
            assert distance(law_and_then_p(law, tables, length), p) < bound, name


def loops():
    for dtype, bound in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        for action in (Action(1, 0, 2), Action(2, 0, 1), Action(2, 1, 1)):
            for rule in RULES if action.k > 1 else ("naive", "bv"):
                quick = (action, rule) == (Action(2, 0, 1), "traversal")
                yield pytest.param(
                    dtype, bound, action, rule, marks=pytest.mark.slow if quick else pytest.mark.law
                )


@pytest.mark.parametrize("dtype,bound,action,rule", [*loops()])
def test_the_law_of_the_loop_is_the_targets(dtype, bound, action, rule):
    """Plain decoding's, of three tokens: of two steps and a commit; the draft is peaked."""
    models = (CausalModel(each.module.to(dtype)) for each in tiny_pair(2, noise=0.15))
    target, draft = map(memoized_model, models)
    shapes, cold = RecordedShapes(16, rows=8), SamplingSetting(0.03)
    of = SpeculativeDecoder(
        target, LMDrafter(draft, shapes), Delayed(action), rule, cold, static=shapes
    )
    plain = SpeculativeDecoder(target, None, Autoregressive(), "nss")
    law, expected = (law_of(each, 3, prompt=[1, 0]) for each in (of, plain))
    assert shapes.steps  # the steps are recorded ones
    assert distance(law, expected) < bound


def recorded(drafts, setting=SamplingSetting(0.6, 0.9), rule="traversal"):
    """A decoder's steps after some of them."""
    of = decoder(Delayed(TREES[0]), rule, static(), drafts)
    of.generate(PROMPT, 8, setting, Rng.seeded(0))
    (steps,) = of.static.steps.values()
    return steps


@pytest.mark.parametrize("drafts", ["lm", pytest.param("eagle3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", ["specinfer", "traversal"])
def test_a_graph_could_hold_every_function(drafts, rule, monkeypatch):
    """Run with tensors that have no numbers: nothing is read, no shape depends on any."""
    monkeypatch.setattr(sampling, "nucleus", nucleus_sorted)
    steps = recorded(drafts, rule=rule)
    functions = (
        partial(steps.advance, 4, 4, CONTEXT),
        partial(steps.draw, 4),
        partial(steps.level, 4, 4, CONTEXT),
        partial(steps.score, 16, CONTEXT),
        partial(steps.reach, 4),
        partial(steps.table, 16, 4),
    )
    with torch.inference_mode():
        for function in functions:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                for name, each in vars(steps).items():
                    if isinstance(each, torch.Tensor):
                        monkeypatch.setattr(steps, name, mode.from_tensor(each.clone()))
                rows = (mode.from_tensor(each.clone()) for each in steps.rows)
                monkeypatch.setattr(steps, "rows", Rows(*rows))
                function()


class EveryTree(Delayed):
    """Another tree at every step, until all were drafted."""

    def __init__(self):
        super().__init__(ACTIONS[-1])
        self.left = [*ALL_TREES]

    def delayed_tree(self, state):
        return self.left.pop() if state and self.left else self.action


def drafted_with_every_tree(rule, shapes):
    policy, texts = EveryTree(), []
    of = decoder(policy, rule, shapes, pair=tiny_pair(29, hidden=16))
    while policy.left:
        asked = PROMPT, 150, SamplingSetting(1.0), Rng.seeded(len(texts))
        texts.append(of.generate(*asked).tokens)
    return texts


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param("traversal", marks=pytest.mark.slow),
        pytest.param("specinfer", marks=pytest.mark.law),
    ],
)
def test_few_graphs_serve_all_trees(rule, monkeypatch):
    """A graph is a list of operations, traced without numbers, which nothing of Python reaches."""

    def capture(graphs, function):
        row = function.func.__self__.row
        kept = row.clone()  # a tensor of one number has it while it is traced
        traced = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)()
        row.copy_(kept)
        return traced

    shapes = RecordedShapes(200, rows=48)
    expected = drafted_with_every_tree(rule, shapes)
    shapes = RecordedShapes(200, rows=48)
    monkeypatch.setattr(static_shapes, "asynchronous", lambda device: True)
    monkeypatch.setattr(RecordedGraphs, "_capture", capture)
    assert drafted_with_every_tree(rule, shapes) == expected
    (steps,) = shapes.steps.values()
    counts = Counter(key[0] for key in steps.graphs.graphs)
    assert len(ALL_TREES) == 233 and counts.total() < 60
    # Of a level and the next: 1 and 1, and of each k > 1 also 1 and k, and k and k.
    assert (counts["level"], counts["reach"], counts["score"]) == (7, 4 * (rule == "traversal"), 6)


def test_why_steps_are_not_recorded_is_one_line():
    hooks = [CausalModel(each.module, forward="transformers") for each in tiny_pair(29)]
    for policy, rule, pair, why in (
        (Beam(k=2, depth=2, nodes=4), "nss", None, "no delayed trees of up to 48"),
        (Delayed(Action(2, 0, 2)), "spectr", None, "verifier=spectr looks at whole rows"),
        (Delayed(Action(1, 0, 48)), "bv", None, "no delayed trees of up to 48"),
        (Delayed(Action(2, 0, 2)), "nss", hooks, "no native pass"),
    ):
        with pytest.warns(Advice, match=why):
            of = decoder(policy, rule, RecordedShapes(CONTEXT), pair=pair)
        assert len(of.generate(PROMPT, 4, RAW, Rng.seeded(0)).tokens) == 4


def test_what_does_not_fit_is_named(monkeypatch):
    few = RecordedShapes(CONTEXT, rows=4)
    with refusal("rows=13"):
        decoder(Delayed(TREES[0]), "nss", few).generate(PROMPT, 4, RAW, Rng.seeded(0))
    of = decoder(Delayed(TREES[0]), "nss", static())
    first, second = (of.blocks(PROMPT, 20, RAW, Rng.seeded(0)) for _ in range(2))
    next(first), next(first), next(second)
    with refusal("another sequence"):
        next(first)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    of = decoder(Delayed(TREES[0]), "nss", static())
    monkeypatch.setattr(torch.Tensor, "new_zeros", full)
    with refusal("distributions of 48 nodes need 0.00 GiB"):
        list(of.blocks(PROMPT, 20, RAW, Rng.seeded(0)))
