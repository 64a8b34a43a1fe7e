"""EAGLE-3's head: three layers' features, a readout of its own and a draft vocabulary; what does
not go with it is refused.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.draft_training.export.head_format import load_head, save_head
from nde_talf.draft_training.export.published_heads import FILES
from nde_talf.draft_training.model.draft_vocab import (
    fraction_inside,
    frequent_tokens,
    layout_of,
    vocabulary_in,
)
from nde_talf.draft_training.model.eagle3 import Eagle3Head, three_layers
from nde_talf.draft_training.targets.target_trees import target_features
from nde_talf.draft_training.training.head_training import build_head, fit_head
from nde_talf.draft_training.training.losses import HeadReadout, node_metrics, talf_loss
from nde_talf.draft_training.training.readout_timing import readout_gains
from nde_talf.draft_training.training_settings import NORMS, HeadConfig, TalfLoss
from tests.draft_training.heads import (
    KillBefore,
    family_target,
    predictable_rows,
    random_eagle3,
    random_head,
    same,
    tiny_target,
)
from tests.draft_training.one_by_one import plain_path
from tests.refusal import refusal

SOME = torch.tensor([2, 3, 5, 11, 28])
TINY = HeadConfig(
    features="three",
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


def test_the_layers_are_three_of_the_targets_in_ascending_order():
    assert three_layers(32) == (2, 16, 29) and three_layers(7) == (2, 3, 4)  # vLLM's default
    assert three_layers(2) == (0, 1, 2) and three_layers(4) == (1, 2, 3)
    with refusal("1 layer"):
        three_layers(1)


@torch.no_grad()
def test_layers_features_come_with_the_same_pass(target):
    tokens, positions = torch.randint(29, (2, 6)), torch.arange(6)[None].expand(2, -1)
    states = target.reader((0, 1, 3, 4))(tokens, positions, None, None)
    final, layers = target.parts(states, (0, 1, 3, 4))
    assert torch.equal(final, target.hidden(tokens, positions, None, None))
    theirs = target.body(tokens, output_hidden_states=True).hidden_states
    torch.testing.assert_close(layers[..., :-16], torch.cat([theirs[0], theirs[1], theirs[3]], -1))
    torch.testing.assert_close(target.body.norm(layers[..., -16:]), final)
    with refusal("layers 2, 5"):
        target.reader((2, 5))


def test_the_vocabulary_is_what_is_most_frequent_in_what_counts():
    tokens = torch.tensor([[7, 7, 4, 4, 1, 9, 9, 9]])
    counts = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]]).bool()
    rows = TokenRows(tokens, counts, torch.zeros_like(tokens))
    assert frequent_tokens(rows, 2, 10).tolist() == [4, 7]
    assert frequent_tokens(rows, 4, 10).tolist() == [0, 1, 4, 7]  # what never comes up, in order
    assert fraction_inside(rows, torch.tensor([4, 7])) == pytest.approx(0.8)
    with refusal("draft_vocab=10"):
        frequent_tokens(rows, 10, 10)
    assert frequent_tokens(rows, 0.8, 10).tolist() == [4, 7]
    assert frequent_tokens(rows, 0.9, 10) is None  # 1 came up once: as much is new in other text


def test_d2t_and_t2d_name_the_vocabulary():
    d2t, t2d = layout_of(SOME, 29).values()
    assert d2t.tolist() == [2, 2, 3, 8, 24] and t2d.nonzero().flatten().tolist() == SOME.tolist()
    assert torch.equal(vocabulary_in({"d2t": d2t, "t2d": t2d}, 29, ""), SOME)
    for broken in ({"t2d": t2d}, {"d2t": d2t + 1, "t2d": t2d}, {"d2t": d2t, "t2d": t2d[:-1]}):
        with refusal(r"head: its d2t and t2d"):
            vocabulary_in(broken, 29, "head")


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("own,vocabulary", [(True, None), (True, SOME), (False, SOME)])
def test_the_loss_of_a_readout_is_autograds(own, vocabulary, chunk):
    """Over the vocabulary, where the target's most likely token is in it."""
    torch.manual_seed(0)
    lm_head, labels, weights = torch.randn(29, 8), torch.randn(33, 8), torch.rand(33)
    ids = torch.arange(29) if vocabulary is None else vocabulary
    draft, matrix = (torch.randn(n, 8, requires_grad=True) for n in (33, len(ids)))
    readout = HeadReadout(lm_head, matrix=matrix, vocabulary=vocabulary, chunk=chunk)
    if not own:  # some of the target's rows, scaled and capped as they are
        readout = HeadReadout(lm_head, None, 0.5, 2.0, vocabulary=vocabulary, chunk=chunk)

    def capped(logits):
        return logits if own else 2 * (logits / 4).tanh()

    p = capped(labels @ lm_head.T).softmax(-1)
    inside = p[:, ids] / p[:, ids].sum(-1, keepdim=True)
    log_q = capped(draft @ (matrix if own else lm_head[ids]).T).log_softmax(-1)
    slow = torch.where(torch.isin(p.argmax(-1), ids), -(inside * log_q).sum(-1), 0.0)
    total, fast, agree = talf_loss(draft, labels, readout, weights)
    torch.testing.assert_close(fast, slow)
    assert torch.equal(agree, ids[log_q.argmax(-1)] == p.argmax(-1))
    trained = (draft, matrix) if own else (draft,)
    ours, theirs = (torch.autograd.grad(3 * loss, trained) for loss in (total, slow @ weights))
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-4)
    metrics = node_metrics(draft, labels, readout)
    q = torch.zeros(33, 29).index_copy_(1, ids, log_q.detach().exp())
    torch.testing.assert_close(metrics.overlap, torch.minimum(p, q).sum(-1))
    torch.testing.assert_close(metrics.kl, (inside * (inside.log() - log_q)).sum(-1))


def test_the_gradient_of_a_float32_matrix_is_summed_in_float32():
    """Products are bfloat16's; 40,000 rows of like gradients would stop a sum in bfloat16."""
    torch.manual_seed(0)
    lm_head, labels = torch.randn(29, 8).bfloat16(), torch.randn(8).expand(40_000, 8)
    matrix, draft = torch.randn(29, 8, requires_grad=True), torch.randn(8).expand(40_000, 8)
    readout = HeadReadout(lm_head, matrix=matrix)
    total, *_ = talf_loss(draft, labels, readout, torch.full([40_000], 1e-4))
    one, *_ = talf_loss(draft[:1], labels[:1], readout, torch.full([1], 4.0))
    ours, theirs = (torch.autograd.grad(each, matrix)[0] for each in (total, one))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-2)


def test_an_export_has_eagle_3s_layout_and_starts_a_training(target, tmp_path):
    head = random_eagle3(target, vocabulary=SOME.tolist())
    head.sizes.copy_(torch.tensor([0.5, 2.0, 16.0]).repeat_interleave(16))
    folder = save_head(head, tmp_path / "head")
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert torch.equal(torch.arange(5) + weights["d2t"], SOME) and weights["t2d"].sum() == 5
    assert weights["midlayer.self_attn.k_proj.weight"].shape == (8, 32)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (5, 29)
    features = torch.randn(5, 48)  # the file's fc takes them as they are
    torch.testing.assert_close(features @ weights["fc.weight"].T, head.combine(features))
    warm = build_head(target, replace(TINY, draft_vocab=5, warm_start=str(folder)))
    assert torch.equal(warm.vocabulary, SOME)
    with refusal("drafts 5 tokens"):
        build_head(target, replace(TINY, draft_vocab=None, warm_start=str(folder)))


def written_out(weights, prefix, eps):
    """Norm, product and decoder layer of a head's file in plain torch, as published code has them."""

    def norm(states, name):
        size = (states.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        return states / size * weights[f"{name}.weight"]

    def linear(states, name):
        return states @ weights[f"{name}.weight"].T

    def rotated(states):  # [heads, n, 4]
        angles = torch.arange(states.shape[1])[:, None] * torch.tensor([1.0, 1e4**-0.5]).repeat(2)
        first, second = states.chunk(2, -1)
        return states * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    def layer(read, residual):
        """Attention over `read` and MLP, each added to the residual stream [n, H]."""
        heads, groups, count = 4, 2, len(read)
        query, key, value = (
            linear(read, f"{prefix}.self_attn.{name}_proj").unflatten(-1, (-1, 4)).transpose(0, 1)
            for name in "qkv"
        )
        key, value = (each.repeat_interleave(groups, 0) for each in (rotated(key), value))
        scores = rotated(query) @ key.mT / 2 + torch.full((count, count), -torch.inf).triu(1)
        attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(count, heads * 4)
        states = residual + linear(attended, f"{prefix}.self_attn.o_proj")
        inner = norm(states, f"{prefix}.post_attention_layernorm")
        gated = torch.nn.functional.silu(linear(inner, f"{prefix}.mlp.gate_proj"))
        gated = gated * linear(inner, f"{prefix}.mlp.up_proj")
        return states + linear(gated, f"{prefix}.mlp.down_proj")

    return norm, linear, layer


def written_out_logits(weights, norms, embedding, tokens, features, drafted, config):
    """What the weights of a file say after `drafted` of the `tokens`, in plain torch: each flag as
    vLLM's llama_eagle3 and speculators have it.
    """
    norm, linear, layer = written_out(weights, "midlayer", config.rms_norm_eps)
    if "norm_before_fc" in norms:
        features = norm(features, "input_norm")
    if "fc_norm" in norms:
        parts = enumerate(features.chunk(3, -1))
        features = torch.cat([norm(part, f"fc_norm.{i}") for i, part in parts], -1)
    inputs = linear(features[: len(tokens) - drafted - 1], "fc")
    while True:
        count = len(inputs)
        normed = norm(inputs, "midlayer.hidden_norm")
        embedded = norm(embedding[tokens[1 : count + 1]], "midlayer.input_layernorm")
        residual = normed if "norm_before_residual" in norms else inputs
        states = layer(torch.cat([embedded, normed], -1), residual)
        if count == len(tokens) - 1:
            return linear(norm(states[-1], "norm"), "lm_head")
        fed = norm(states, "norm") if "norm_output" in norms else states
        inputs = torch.cat([inputs, fed[-1:]])


@torch.no_grad()
def test_eagles_head_is_the_published_one(target, tmp_path):
    """EAGLE (arXiv 2401.15077): fc of [embedding; feature], then a layer without an input norm,
    whose output is the next feature; no final norm, and the target's readout.
    """
    tokens = torch.tensor([3, 7, 1, 20, 5, 5])
    features = target_features(target, tokens[None], None)[1][0]
    head = load_head(save_head(random_head(target), tmp_path / "head"), target)
    weights = load_file(tmp_path / "head/model.safetensors")
    _, linear, layer = written_out(weights, "layers.0", head.config.rms_norm_eps)
    embedded = target.module.get_input_embeddings().weight[tokens[1:]]
    for drafted in (0, 1, 3):
        known = features[: len(embedded) - drafted]
        for _ in range(drafted + 1):
            inputs = linear(torch.cat([embedded[: len(known)], known], -1), "fc")
            states = layer(inputs, inputs)
            known = torch.cat([known, states[-1:]])
        theirs = states[-1] @ target.lm_head.weight.T
        ours = head.logits(plain_path(head, tokens, features, drafted))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("norms", [(), *((name,) for name in NORMS), NORMS])
def test_each_norm_is_vllms_and_its_export_comes_back(target, tmp_path, norms):
    head, tokens = random_eagle3(target, norms=norms), torch.tensor([3, 7, 1, 20, 5, 5])
    features = target_features(target, tokens[None], None, layers=head.feature_layers)[1][0]
    folder = save_head(head, tmp_path / "head")
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert {name for name in NORMS if config[name]} == {*norms}
    again = load_head(folder, target)
    assert same(again, head) and again.norms == norms
    embedding = target.module.get_input_embeddings().weight
    for drafted in (0, 1, 3):
        known = (embedding, tokens, features, drafted)
        theirs = written_out_logits(weights, norms, *known, head.config)
        ours = again.logits(plain_path(again, tokens, features, drafted))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_part_of_fc_reads_features_of_size_one_whatever_the_norms(target):
    for norms in ((), ("norm_before_fc",), ("fc_norm",)):
        head = Eagle3Head(target, norms=norms)
        features = target_features(
            target, torch.arange(29)[None], None, layers=head.feature_layers
        )[1]
        read = (head._normed(features) / head.sizes).unflatten(-1, (3, -1))
        assert ((read.pow(2).mean((0, 1, 3)).sqrt().log2()).abs() <= 0.5 + 1e-3).all()


def test_heads_of_the_other_kind_and_layers_that_are_not_llamas_are_refused(target, tmp_path):
    other = family_target("qwen3")
    for beside, make, features in (
        (other, random_head, "final"),
        (target, random_head, "three"),
        (target, random_eagle3, "final"),
    ):
        folder = str(save_head(make(beside), tmp_path / "head"))
        start = replace(TINY, features=features, layer="llama", warm_start=folder)
        with refusal("warm_start"):
            build_head(beside, start)
    with refusal(r"norms=\[\] .*draft\.norms=\[fc_norm\]"):
        build_head(target, replace(TINY, norms=["fc_norm"], warm_start=folder))
    with refusal(r"draft\.layer=llama"):
        Eagle3Head(other)


def test_reading_out_few_tokens_pays(capsys):
    """Eight rows of 20,000: a matter of a thousand times, on any machine."""
    assert readout_gains(torch.randn(20_000, 64), torch.arange(8))
    assert "reading out 8 of 20000 tokens" in " ".join(capsys.readouterr().out.split())


def test_a_head_that_the_target_reads_out_drafts_some_tokens(target, tmp_path):
    """Of its export, the config alone names them; an engine reads the file as any other."""
    rows, config = predictable_rows(target, 12), replace(TINY, features="final", draft_vocab=0.5)
    config = replace(config, steps=4, checkpoint_seconds=0)
    with pytest.raises(ProcessLookupError):
        fit_head(target, rows, config, tmp_path / "run", callbacks=[KillBefore(2)])
    head = fit_head(target, rows, config, tmp_path / "run")  # it goes on
    folder, some, every = tmp_path / "head", head.vocabulary, torch.arange(29)
    assert fraction_inside(TokenRows.plain(rows), some) >= 0.5 and len(some) < 29
    assert not {"d2t", "vocabulary"} & load_file(save_head(head, folder) / FILES[0]).keys()
    again = load_head(folder, target)
    assert torch.equal(again.vocabulary, some) and same(again, head)
    outputs = torch.randn(3, 16)
    whole = target.logits(outputs).index_fill(1, every[~torch.isin(every, some)], -torch.inf)
    torch.testing.assert_close(again.logits(outputs), whole)
    for asked, kept in (("auto", some), (None, None), (7, SOME)):  # of a head that starts another
        warm = build_head(target, replace(config, draft_vocab=asked, warm_start=str(folder)), kept)
        assert warm.vocabulary is kept or torch.equal(warm.vocabulary, kept)
