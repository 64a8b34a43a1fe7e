"""Trees that lie on the device: the same draws, the target's exact law, and one wait a step."""

import pytest
import torch

from decoding.actions import Action
from decoding.drafter import LMDrafter
from decoding.loop import SpeculativeDecoder
from decoding.policies.base import DecodingState
from decoding.policies.delayed import Autoregressive, Delayed, draft_delayed
from decoding.sampling import RAW, Rng, SamplingSetting
from decoding.static import StaticShapes
from decoding.testing import exact_law
from decoding.unread import UnreadTree
from decoding.verification import VERIFIERS
from decoding.verification.unread import residual_weights
from draft_training.head_drafter import EagleDrafter
from tests.decoding.laws import distance
from tests.decoding.on_device import METHODS, ReadingDrafter, distance_to_target, one_step
from tests.decoding.pairs import prompts, tiny_pair
from tests.decoding.tables import KINDS, TableDrafter, Tables, V, context_of
from tests.decoding.wide_rows import rows
from tests.draft_training.heads import random_head

RULES = ["nss", "naive", "specinfer", "bv", "traversal"]
PATHS = [Action(1, 0, 1), Action(1, 2, 0), Action(1, 0, 0)]
TREES = [Action(2, 0, 1), Action(2, 1, 1), Action(3, 0, 1)]
DEEP = [Action(2, 0, 2), Action(1, 1, 2)]  # over two tokens only
CASES = [(name, a) for name in RULES for a in PATHS + TREES + DEEP if Delayed(a).trees in VERIFIERS[name].trees]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name,action", CASES, ids=str)
def test_output_law_is_the_targets(name, action, kind):
    few = action in DEEP or (name, action) == ("nss", Action(2, 1, 1))  # NSS draws at every node: many outcomes
    tables = Tables(kind, seed=3, vocabulary=2 if few else V)
    assert distance_to_target(name, action, tables) < (1e-7 if kind == "close" else 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RULES, "naivetree", "khisti", "gbv"])
def test_verdicts_have_the_law_of_the_rule_on_the_host(name):
    """Of the node accepted last and the token, not only of what is emitted."""
    tables, action = Tables("random", seed=5, vocabulary=2), Action(2, 0, 2) if name not in ("naive", "bv") else Action(1, 0, 3)

    def host(rng):
        state = DecodingState(0, 1, 1 << 20, RAW, None, None)
        tree = draft_delayed(action, state, TableDrafter(tables), rng)
        tree.p = [tables(context_of(tree, node))[0] for node in range(len(tree))]
        verdict = VERIFIERS[name](tree, rng)
        return tuple(tree.tokens), tuple(map(tuple, tree.children)), tuple(verdict.path), verdict.token

    def on_device(rng):
        tree, _, verdict = one_step(tables, action, VERIFIERS[name].unread, rng)
        return tuple(tree.tokens), tuple(map(tuple, tree.children)), tuple(verdict.path), verdict.token

    assert distance(exact_law(host), exact_law(on_device)) < 1e-9


def test_the_same_seed_drafts_the_same_tree():
    tables, repeats = Tables("random", seed=1), 0
    for seed in range(60):
        action = Action(1 + seed % 4, seed % 3, seed % 5)
        state = DecodingState(0, 1, 1 << 20, RAW, None, None)
        host = draft_delayed(action, state, TableDrafter(tables), Rng.seeded(seed))
        state.unread = True
        tree = draft_delayed(action, state, ReadingDrafter(tables), Rng.seeded(seed))
        tree.p = torch.zeros(len(tree), V)
        read, nodes, *_ = tree.read(torch.tensor([0]), torch.tensor([0]))
        assert (read.tokens, read.parents, read.children) == (host.tokens, host.parents, host.children)
        assert [int(tree.tokens[node]) for node in nodes] == host.tokens
        repeats += len(tree) - len(host)
    assert repeats > 50


def test_draws_on_a_device_are_those_of_the_host():
    rows = torch.rand(200, 50, generator=torch.Generator().manual_seed(0)).square()
    rows[:, 40:] = 0
    rows[::3, :7] = 0
    assert Rng.seeded(3).categorical(rows).tolist() == Rng.seeded(3).categorical(list(rows))

    class Last(Rng):
        def uniform(self) -> float:
            return 1 - 2**-53

    drawn = Last(torch.Generator()).categorical(rows)
    assert drawn.max() < 40 and bool((rows.gather(1, drawn[:, None]) > 0).all())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "peaked", "one-hot", "equal"])
@pytest.mark.parametrize("carried", [False, True])
def test_weights_in_float32_are_those_of_float64(kind, carried):
    """At a vocabulary of 150,000, some of whose draws coincide."""
    p, q = rows(kind, 12)
    q = torch.where(q < q.topk(4).values[:, -1:], 1e-6 * q, q)
    q = q / q.sum(-1, keepdim=True)
    trees = []
    for dtype in (torch.float32, torch.float64):
        rng, tree = Rng.seeded(0), UnreadTree(0, q[0].to(dtype))
        for level, children in enumerate((1, 3, 1, 1)):
            if level:
                for tip in tree.tips:
                    tree.q[tip] = q[tip].to(dtype)
            tree.draw([children] * len(tree.tips), rng)
        tree.p = p[: len(tree)].to(dtype)
        trees.append(tree)
    single, double = trees
    assert torch.equal(torch.stack(single.tokens), torch.stack(double.tokens))
    first = torch.cat([level.first for level in single.levels])
    assert len(first.unique()) < len(first) == 11
    weights, exact = (residual_weights(tree, carried) for tree in trees)
    for name in ("own", "w0", "c", "keep"):
        found, right = (getattr(each, name)[first.unique()] for each in (weights, exact))
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
    for name in ("traversal", "gbv") if carried else ("specinfer", "nss"):
        for seed in range(5):
            assert single.read(*VERIFIERS[name].unread(single, Rng.seeded(seed)))[2].token >= 0


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("name,policy", METHODS, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_greedy_decoding_is_autoregressive_decoding(name, policy, with_head, static):
    target, draft = tiny_pair(64, hidden=32, layers=2)
    shapes = StaticShapes(60, rows=32) if static else None
    drafter = EagleDrafter(random_head(target), shapes) if with_head else LMDrafter(draft, shapes)
    plain = SpeculativeDecoder(target, None, Autoregressive(), VERIFIERS["specinfer"])
    warm = SamplingSetting(0.7)  # the draft's, so that branches differ
    fast = SpeculativeDecoder(target, drafter, policy, VERIFIERS[name], warm, static=shapes, unread=True)
    for seed, prompt in enumerate(prompts(2, 64)):
        asked = prompt, 1000 if static else 50, SamplingSetting(0.0), Rng.seeded(seed)
        generation = fast.generate(*asked)
        assert generation.tokens == plain.generate(prompt, len(generation.tokens), *asked[2:]).tokens
    assert with_head or generation.block_efficiency > 1.1


def test_a_distribution_without_mass_is_an_error():
    target, draft = tiny_pair(16)
    decoder = SpeculativeDecoder(target, LMDrafter(draft), Delayed(Action(2, 1, 1)), VERIFIERS["traversal"], unread=True)
    stream = iter(decoder.blocks([1, 2], 50, SamplingSetting(), Rng.seeded(0)))
    next(stream)
    with torch.no_grad():
        draft.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="positive, finite"):
        for _ in stream:
            pass
