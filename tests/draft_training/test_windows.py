"""Heads beside targets of many families: sliding and chunked windows, soft caps, scales, experts,
images.

Past the window, labels of trees in packed rows are plain passes over each text, and decoding with a
head is plain greedy decoding.
"""

import json

import pytest
import torch

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.draft_training.export.head_format import load_head, save_head
from nde_talf.draft_training.model.families import NoHeadError
from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.targets.target_trees import target_beam
from tests.decoding.families import FAMILIES, WINDOW, V, family
from tests.draft_training.heads import random_head

HEADLESS = {"gemma-3n", "phi", "opt", "opt-350m", "gpt2", "gptj"}
SOME = ["mistral", "gemma-2", "gpt-oss", "llama-4", "granite", "deepseek-v3", "lfm2"]
LENGTHS, DEPTH = (31, 27), 11  # of the documents of a row; the trees are deeper than half a window
ROOTS = (4, 12, 29, 33, 57)


def row():
    tokens = torch.randint(V, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)])[None]
    return TokenRows(tokens, torch.ones_like(tokens).bool(), document)


@pytest.fixture(scope="module", params=SOME)
def target(request):
    """With other readouts than embeddings, or those with tied ones would repeat one token."""
    target = family(request.param)
    target.lm_head.weight = torch.nn.Parameter(
        target.lm_head.weight.roll(7, 0), requires_grad=False
    )
    return target


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_head_with_full_attention_or_says_why_not(name, tmp_path):
    target = family(name)
    if name in HEADLESS:
        with pytest.raises(NoHeadError, match=r"no draft head can be built|bias"):
            EagleHead(target)
        return
    head = random_head(target)
    folder = save_head(head, tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    assert (
        set(config.get("layer_types") or ["full_attention"]) == {"full_attention"}
        and config["vocab_size"] == V
    )
    tokens, states = torch.arange(20)[None], torch.randn(1, 20, target.hidden_size)
    one, two = (
        each.logits(each(tokens, tokens, None, None, states))
        for each in (head, load_head(folder, target))
    )
    assert torch.equal(one, two) and one.shape == (1, 20, V) and one.isfinite().all()


@pytest.mark.slow
@torch.no_grad()
def test_labels_of_trees_in_packed_rows_are_plain_passes_past_the_window(target, monkeypatch):
    monkeypatch.setattr("nde_talf.draft_training.targets.target_trees.ROWS", 8)
    rows, roots = row(), torch.tensor(ROOTS)
    trees = target_beam(target, rows.tokens, 2, DEPTH, roots, rows.document)
    for at, root in enumerate(ROOTS):
        start = 0 if root < LENGTHS[0] else LENGTHS[0]
        paths = [rows.tokens[0, start : root + 1].tolist()]
        expected, packed = [plain(target, paths[0])], [target.logits(trees.along[0, root])]
        for level, labels in zip(trees.levels, trees.labels, strict=True):
            nodes = torch.stack([level.parents, level.tokens], -1)[0, at].tolist()
            paths = [[*paths[parent], token] for parent, token in nodes]
            expected += [plain(target, path) for path in paths]
            packed += list(target.logits(labels[0, at]))
        assert len(paths[0]) - len(rows.tokens[0, start : root + 1]) > WINDOW / 2
        scale = torch.stack(expected).abs().max()
        torch.testing.assert_close(
            torch.stack(packed) / scale, torch.stack(expected) / scale, atol=2e-5, rtol=0
        )


def plain(target, tokens):
    """Logits [V] after `tokens` by the model itself."""
    return target.module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
