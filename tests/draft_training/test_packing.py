"""Packed documents train a head as they would one by one, and only what counts counts."""

import pytest
import torch

from nde_talf.draft_training.targets.document_masks import choose_roots, counted_roots
from nde_talf.draft_training.training.head_training import HeadModule
from nde_talf.draft_training.training_settings import EagleLoss, HassLoss, HeadConfig, TalfLoss
from tests.draft_training.documents import apart, packed
from tests.draft_training.heads import family_target, random_eagle3, random_head, tiny_target


def test_a_root_counts_if_the_token_behind_it_does_in_the_same_document():
    document = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1]])
    every = torch.ones(1, 8).bool()
    assert counted_roots(every, document)[0].nonzero()[:, 0].tolist() == [1, 2, 5]
    assert counted_roots(every, document, ahead=1)[0].nonzero()[:, 0].tolist() == [1]
    one = torch.zeros(1, 8).bool()
    one[0, 3] = True
    assert counted_roots(one, document)[0].nonzero()[:, 0].tolist() == [2]


def test_chosen_roots_count_and_their_weights_make_the_mean():
    counts = torch.zeros(2, 9).bool()
    counts[0, 1:8], counts[1, 3] = True, True
    values = torch.rand(2, 9, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    total, mean = 0.0, (values * counts).sum() / 8
    for _ in range(400):
        roots, weights = choose_roots(counts, 2, generator)
        assert roots.shape == (2, 2) and (roots >= 1).all()
        assert counts.gather(1, roots)[weights > 0].all()
        torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
        total += (values.gather(1, roots) * weights).sum() / 400
    assert abs(total - mean) < 0.02
    roots, weights = choose_roots(counts, 0, generator)
    assert roots[0].tolist() == [1, 2, 3, 4, 5, 6, 7] and weights[1].count_nonzero() == 1


@pytest.mark.parametrize(
    "loss,family,make",
    [
        (TalfLoss(k=2), "llama", random_head),
        (HassLoss(), "gemma3_text", random_head),
        (EagleLoss(), "llama", random_head),
        (TalfLoss(k=2), "llama", random_eagle3),
    ],
)
def test_packed_documents_train_like_documents_apart(loss, family, make):
    target = family_target(family) if family != "llama" else tiny_target()
    head = make(target)
    module = HeadModule(head, HeadConfig(loss=loss, roots=0, chain_fraction=0.0))
    one, two = (module.loss(rows, 0)[0] for rows in (packed(), apart()))
    assert one > 0
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    slopes = (torch.autograd.grad(value, list(head.parameters())) for value in (one, two))
    for mine, reference in zip(*slopes, strict=True):
        scale = reference.abs().max().clamp(min=1)
        torch.testing.assert_close(mine / scale, reference / scale, atol=1e-5, rtol=0)
