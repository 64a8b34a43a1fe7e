"""A head that drafts from a part of the vocabulary: which part, what it learns, that it comes back,
and that the law stays the target's.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.papers.talf import after_ranks
from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.checksums import write_checksums
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.policies.beam import Beam
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.policies.dyspec import DySpec
from nde_talf.decoding.policies.salf import Salf
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import SamplingSetting, warp
from nde_talf.draft_training.draft_vocab import (
    fraction_inside,
    frequent_tokens,
    layout_of,
    vocabulary_in,
    vocabulary_of,
)
from nde_talf.draft_training.evaluate import held_out_report
from nde_talf.draft_training.export import load_head, save_head
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.draft_training.losses import HeadReadout, distribution_loss, node_metrics
from nde_talf.draft_training.settings import HeadConfig, TalfLoss
from nde_talf.draft_training.train_head import build_head, fit_head
from tests.decoding.pairs import tiny_model
from tests.draft_training.heads import check_law, predictable_rows, random_eagle3, tiny_target

SOME = torch.tensor([2, 3, 5, 11, 28])
TINY = HeadConfig(
    features="three",
    draft_vocab=20,
    loss=TalfLoss(k=2, depth=3),
    roots=4,
    steps=40,
    batch=4,
    warm_up=2,
    chain_fraction=0.0,
)


@pytest.fixture(scope="module")
def target():
    return tiny_target(layers=4)


def test_the_vocabulary_is_what_is_most_frequent_in_what_counts():
    tokens = torch.tensor([[7, 7, 4, 4, 1, 9, 9, 9]])
    rows = TokenRows(
        tokens, torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]]).bool(), torch.zeros_like(tokens)
    )
    assert frequent_tokens(rows, 2, 10).tolist() == [4, 7]
    assert frequent_tokens(rows, 4, 10).tolist() == [0, 1, 4, 7]  # what never comes up, in order
    assert fraction_inside(rows, torch.tensor([4, 7])) == pytest.approx(0.8)
    with pytest.raises(UserError, match="draft_vocab=10"):
        frequent_tokens(rows, 10, 10)


def test_d2t_and_t2d_name_the_vocabulary():
    d2t, t2d = layout_of(SOME, 29)
    assert d2t.tolist() == [2, 2, 3, 8, 24] and t2d.nonzero().flatten().tolist() == SOME.tolist()
    assert torch.equal(vocabulary_of(d2t), SOME) and torch.equal(
        vocabulary_in({"d2t": d2t, "t2d": t2d}, 29, ""), SOME
    )
    for broken in (
        {"d2t": d2t},
        {"t2d": t2d},
        {"d2t": d2t + 1, "t2d": t2d},
        {"d2t": d2t, "t2d": t2d[:-1]},
    ):
        with pytest.raises(UserError, match=r"head: its d2t and t2d"):
            vocabulary_in(broken, 29, "head")


@pytest.mark.parametrize("chunk", [5, 64])
def test_the_loss_is_over_the_vocabulary_where_the_likeliest_token_is_in_it(chunk):
    torch.manual_seed(0)
    lm_head, labels, weights = torch.randn(29, 8), torch.randn(33, 8), torch.rand(33)
    draft, own = torch.randn(33, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    p = (labels @ lm_head.T).softmax(-1)
    kept = torch.isin(p.argmax(-1), SOME)
    assert 0 < kept.sum() < 33
    inside = p[:, SOME] / p[:, SOME].sum(-1, keepdim=True)
    log_q = (draft @ own.T).log_softmax(-1)
    slow = torch.where(kept, -(inside * log_q).sum(-1), 0.0)
    fast, agree = distribution_loss(
        draft, labels, HeadReadout(lm_head, own=own, vocabulary=SOME, chunk=chunk)
    )
    torch.testing.assert_close(fast, slow)
    assert torch.equal(agree, SOME[log_q.argmax(-1)] == p.argmax(-1))
    ours, theirs = (
        torch.autograd.grad((loss * weights).sum(), (draft, own)) for loss in (fast, slow)
    )
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-4)
    metrics = node_metrics(draft, labels, HeadReadout(lm_head, own=own, vocabulary=SOME, chunk=7))
    q = torch.zeros(33, 29).index_copy_(1, SOME, log_q.detach().exp())
    torch.testing.assert_close(metrics.overlap, torch.minimum(p, q).sum(-1))
    torch.testing.assert_close(metrics.kl, (inside * (inside.log() - log_q)).sum(-1))
    assert torch.equal(metrics.agree, agree)


@torch.no_grad()
def test_logits_are_those_of_its_rows_and_nothing_elsewhere(target):
    head, outputs = random_eagle3(target, vocabulary=SOME.tolist()), torch.randn(2, 3, 16)
    logits = head.logits(outputs)
    torch.testing.assert_close(logits[..., SOME], head.norm(outputs) @ head.lm_head.weight.T)
    assert torch.isneginf(logits).sum() == 6 * 24
    assert warp(logits, SamplingSetting(0.7, 0.9))[..., SOME].sum() == pytest.approx(6)


@pytest.mark.slow
def test_training_learns_within_the_vocabulary(target, tmp_path):
    rows = predictable_rows(target, 16)
    head = fit_head(target, rows, TINY, tmp_path)
    vocabulary = frequent_tokens(TokenRows.plain(rows), 20, 29)
    assert torch.equal(head.vocabulary, vocabulary)
    fresh = build_head(target, TINY, vocabulary).eval()
    assert torch.equal(fresh.lm_head.weight, target.lm_head.weight[vocabulary])
    after, before = (
        held_out_report(one, target, TokenRows.plain(rows), k=2) for one in (head, fresh)
    )
    assert all(one < 0.8 * other for one, other in zip(after["kl"], before["kl"], strict=True))
    assert after["overlap"][0] > before["overlap"][0]
    after_ranks(head, target, TokenRows.plain(rows), ranks=2, stride=4)
    with pytest.raises(UserError, match="draft_vocab=29"):
        fit_head(target, rows, replace(TINY, draft_vocab=29), tmp_path / "all")


def test_a_head_comes_back_with_its_vocabulary(target, tmp_path):
    head = random_eagle3(target, vocabulary=SOME.tolist())
    folder = save_head(head, tmp_path / "head")
    weights, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    assert (weights["d2t"].dtype, weights["t2d"].dtype) == (torch.int64, torch.bool)
    assert torch.equal(torch.arange(5) + weights["d2t"], SOME) and weights[
        "lm_head.weight"
    ].shape == (5, 16)
    assert (config["draft_vocab_size"], config["vocab_size"]) == (5, 29)
    loaded = EagleDrafter.from_pretrained(folder, target).head
    assert all(
        torch.equal(weight, loaded.state_dict()[name]) for name, weight in head.state_dict().items()
    )
    warm = build_head(target, replace(TINY, draft_vocab=5, warm_start=str(folder)))
    assert torch.equal(warm.vocabulary, SOME)
    with pytest.raises(UserError, match="vocabulary of 5 tokens"):
        build_head(target, replace(TINY, draft_vocab=None, warm_start=str(folder)))
    save_file(
        {name: tensor for name, tensor in weights.items() if name not in ("d2t", "t2d")},
        folder / "model.safetensors",
    )
    write_checksums(folder)
    with pytest.raises(UserError, match=r"size mismatch for lm_head\.weight"):
        load_head(folder, target)


@pytest.mark.parametrize("change", ["features=final", "draft_vocab=0"])
def test_a_vocabulary_without_a_readout_of_its_own_is_refused(change):
    name, value = change.split("=")
    with pytest.raises(UserError, match=r"draft\.draft_vocab"):
        replace(TINY, **{name: int(value) if value.isdigit() else value})


SAMPLING = [
    name for name, verifier in VERIFIERS.items() if "delayed" in verifier.trees and name != "greedy"
]
CHOSEN = [("beam", "nss"), ("salf", "nss"), ("dyspec", "without_replacement")]
POLICIES = {
    "delayed": lambda: Delayed(Action(2, 0, 1)),
    "beam": lambda: Beam(
        k=2, depth=2, nodes=3
    ),  # chooses what cannot be drafted where there is nothing else
    "salf": lambda: Salf(nodes=3, batch=2, threshold=0.5),
    "dyspec": lambda: DySpec(nodes=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [[1, 2], [3]])
@pytest.mark.parametrize("policy,rule", [*(("delayed", rule) for rule in SAMPLING), *CHOSEN])
def test_the_enumerated_law_of_the_loop_is_the_targets(policy, rule, vocabulary):
    target = tiny_model(4, layers=2)
    head = random_eagle3(target, vocabulary=vocabulary)
    check_law(SpeculativeDecoder(target, EagleDrafter(head), POLICIES[policy](), VERIFIERS[rule]))
