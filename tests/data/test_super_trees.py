"""Super-trees from real models: their rows are each path run alone, and their labels are what
decoding gives.
"""

import pytest
import torch

from nde_talf.data.traces.label_chunks import labels
from nde_talf.data.traces.super_trees import (
    Prefix,
    super_trees,
)
from nde_talf.decoding.actions import TREE_INDEX, Action
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.names import LABELLED
from nde_talf.decoding.policies.base import DecodingState
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting, warp
from nde_talf.decoding.session import TreeSession
from nde_talf.decoding.super_tree import SuperTreeLayout, super_tree_layout
from nde_talf.decoding.tree import WarpedRows
from tests.data.padded import padded_pair
from tests.decoding.laws import expected_block_efficiency
from tests.decoding.pairs import tiny_pair

pytestmark = pytest.mark.slow

SETTING, LAYOUT = SamplingSetting(0.8), super_tree_layout()
ACTIONS = [
    Action(1, 0, 11),
    Action(2, 2, 2),
    Action(4, 0, 8),
    Action(4, 8, 8),
]


def uniform(count: int, layout: SuperTreeLayout, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, len(layout), generator=generator, dtype=torch.float64)


def test_every_row_is_its_path_run_alone():
    target, draft = tiny_pair(11, hidden=32, layers=2)
    layout, trajectory = super_tree_layout(2, 2, 2), torch.tensor([1, 2, 3, 4, 5, 6])
    roots = torch.tensor([2, 5])
    with torch.inference_mode():
        prefixes = [Prefix(model, trajectory) for model in (target, draft)]
        trees = super_trees(*prefixes, roots, layout, SETTING, uniform(2, layout, 0), 3)
        tokens, hidden, q = trees.tokens, trees.h_p, warp(draft.logits(trees.h_q), SETTING)
        for tree, root in enumerate(roots.tolist()):
            for row in range(layout.inner):
                path = tokens[tree][layout.ancestors[row]].tolist()
                ids = torch.tensor([[*trajectory[:root].tolist(), *path]])
                assert torch.allclose(
                    hidden[tree, row], target.body(ids).last_hidden_state[0, -1], atol=1e-5
                )
                assert torch.allclose(
                    q[tree, row], warp(draft.module(ids).logits[0, -1], SETTING), atol=1e-5
                )


CONTEXT, SAMPLES, REPEATS = [3, 1, 4, 1, 5, 9], 100, 300


@pytest.fixture(scope="module", params=[11, 9], ids="{} draft rows".format)
def labelled(request):
    """A pair of a target with 11 rows, and by verifier its labels [SAMPLES, 233] of the root after
    CONTEXT.

    A draft of 9 rows does not know its token 9.
    """
    target, draft = padded_pair(11, request.param, noise=0.06)
    with torch.inference_mode():
        trajectory = torch.tensor(CONTEXT)
        prefixes = Prefix(target, trajectory), Prefix(draft, trajectory)
        roots = torch.full((SAMPLES,), len(CONTEXT) - 1)
        trees = super_trees(*prefixes, roots, LAYOUT, SETTING, uniform(SAMPLES, LAYOUT, 1), 300)
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

    def outside(values: dict[str, torch.Tensor]) -> list[str]:
        means = []
        for name, counted in values.items():
            label = estimates[name][:, TREE_INDEX[action]]
            error = (counted.var() / len(counted) + label.var() / SAMPLES) ** 0.5
            if abs(label.mean() - counted.mean()) >= 3 * error:
                means.append(name)
        return means

    # Of so many comparisons one in 400 lies outside by chance: such a one has to hold with ten
    # times the repetitions.
    if again := outside(decoded(target, draft, action, LABELLED, REPEATS, 0)):
        assert not outside(decoded(target, draft, action, again, 10 * REPEATS, 1))


def test_labels_in_chunks_are_labels_of_all_rows_at_once():
    target, draft = tiny_pair(11, noise=0.06)
    trajectory, settings = (
        torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]),
        [SamplingSetting(0.6), SamplingSetting(1.0, 0.9)],
    )
    with torch.inference_mode():
        prefixes = Prefix(target, trajectory), Prefix(draft, trajectory)
        roots = torch.tensor([4, 4, 7, 7])
        trees = super_trees(*prefixes, roots, LAYOUT, SETTING, uniform(4, LAYOUT, 0), 100)
        for chunk in (29, 100, 5000):
            chunked = labels(
                trees,
                target,
                draft,
                [(setting, SETTING) for setting in settings],
                LABELLED,
                LAYOUT,
                chunk,
            )
            for setting, by_name in zip(settings, chunked, strict=True):
                p, q = trees.distributions(target, draft, setting, SETTING)
                for name in LABELLED:
                    whole = expected_block_efficiency(p, q, trees.tokens, name)
                    assert torch.allclose(by_name[name].double(), whole, atol=1e-4, rtol=1e-5), (
                        chunk,
                        setting,
                        name,
                    )
