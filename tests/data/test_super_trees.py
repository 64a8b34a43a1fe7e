"""Super-trees from real models: their labels are what decoding gives, in chunks of any size."""

import pytest
import torch

from nde_talf.data.traces.label_chunks import labels
from nde_talf.data.traces.super_trees import Prefix, SuperTrees, super_trees
from nde_talf.decoding.actions import TREE_INDEX, Action
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.names import LABELLED
from nde_talf.decoding.policies.base import DecodingState
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting, warp
from nde_talf.decoding.session import TreeSession
from nde_talf.decoding.super_tree import super_tree_layout
from nde_talf.decoding.tree import WarpedRows
from tests.decoding.laws import expected_block_efficiency
from tests.decoding.pairs import tiny_pair

pytestmark = pytest.mark.slow

SETTING, LAYOUT = SamplingSetting(0.8), super_tree_layout()
ACTIONS = [Action(1, 0, 11), Action(2, 2, 2), Action(4, 0, 8), Action(4, 8, 8)]


def drawn(target, draft, context: list[int], roots: list[int], seed: int) -> SuperTrees:
    """A super-tree at each of `roots`."""
    prefixes = [Prefix(model, torch.tensor(context)) for model in (target, draft)]
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(len(roots), len(LAYOUT), generator=generator, dtype=torch.float64)
    return super_trees(*prefixes, torch.tensor(roots), LAYOUT, SETTING, uniforms, 300)


CONTEXT, SAMPLES, REPEATS = [3, 1, 4, 1, 5, 9], 100, 300


@pytest.fixture(scope="module", params=[11, 9], ids="{} draft rows".format)
def labelled(request):
    """A pair of a target with 11 rows, and by verifier its labels [SAMPLES, 233] of the root after
    CONTEXT.

    A draft of 9 rows does not know its token 9.
    """
    target, draft = tiny_pair(11, noise=0.06)
    if request.param < 11:
        draft.module.resize_token_embeddings(request.param, mean_resizing=False)
        draft = CausalModel(draft.module, "draft")
        draft.match(11)
    with torch.inference_mode():
        trees = drawn(target, draft, CONTEXT, [len(CONTEXT) - 1] * SAMPLES, 1)
        (made,) = labels(trees, target, draft, [(SETTING, SETTING)], LABELLED, LAYOUT, 300)
    return target, draft, made


def decoded(target, draft, action, names, repeats, seed) -> dict[str, torch.Tensor]:
    """Tau + 1 [repeats] by verifier, of really decoding one step with `action` behind CONTEXT:
    every tree for all of them.
    """
    session = TreeSession(target.hidden, target.device, target.dtype)
    features = session.append(CONTEXT[:-1])
    p_previous = warp(target.logits(features[-1]), SETTING)
    state = DecodingState(CONTEXT[-1], len(CONTEXT), 100, SETTING, p_previous, features[-1])
    drafter, rng = LMDrafter(draft), Rng.seeded(seed)
    values: dict[str, list[float]] = {name: [] for name in names}
    drafter.start(CONTEXT[:-1], CONTEXT[-1], features, SETTING)
    for _ in range(repeats):
        tree = Delayed(action).draft(state, drafter, rng)
        tree.p = WarpedRows(target.logits(session.grow(tree.tokens, tree.parents)), SETTING)
        session.rollback()
        drafter.session.rollback()
        drafter._rows, drafter._states = {}, drafter._states[:1]
        for name, sums in values.items():
            sums.append(1.0 + tree.depth[VERIFIERS[name](tree, rng).end])
    return {name: torch.tensor(sums) for name, sums in values.items()}


@pytest.mark.parametrize("action", ACTIONS, ids=str)
@torch.inference_mode()
def test_labels_are_what_decoding_from_the_root_gives(labelled, action):
    target, draft, estimates = labelled

    names = LABELLED
    # Of so many comparisons one in 400 lies outside by chance: such a one has to hold with ten
    # times the repetitions.
    for seed, repeats in enumerate((REPEATS, 10 * REPEATS)):
        values = decoded(target, draft, action, names, repeats, seed)
        names = []
        for name, counted in values.items():
            label = estimates[name][:, TREE_INDEX[action]]
            error = (counted.var() / repeats + label.var() / SAMPLES) ** 0.5
            if abs(label.mean() - counted.mean()) >= 3 * error:
                names.append(name)
    assert not names


@pytest.mark.parametrize("chunk", [29, 100, 5000])
@torch.inference_mode()
def test_labels_in_chunks_are_labels_of_all_rows_at_once(chunk):
    target, draft = tiny_pair(11, noise=0.06)
    settings = [(setting, SETTING) for setting in (SamplingSetting(0.6), SamplingSetting(1.0, 0.9))]
    trees = drawn(target, draft, [*CONTEXT, 2, 6], [4, 4, 7, 7], 0)
    chunked = labels(trees, target, draft, settings, LABELLED, LAYOUT, chunk)
    for pair, by_name in zip(settings, chunked, strict=True):
        p, q = trees.distributions(target, draft, *pair)
        for name in LABELLED:
            whole = expected_block_efficiency(p, q, trees.tokens, name)
            torch.testing.assert_close(by_name[name].double(), whole, atol=1e-4, rtol=1e-5)
