"""The target's features along rows: computed once, equal ever after, and gone with the training."""

import torch

from nde_talf.data.dialogues.token_rows import TokenRows
from nde_talf.draft_training.targets.feature_cache import FeatureCache


def test_rows_are_computed_once_and_again_after_a_kill(tmp_path):
    rows = TokenRows.plain(torch.arange(12).view(3, 4))
    seen = []

    def compute(tokens, document):
        seen.append(tokens[:, 0].tolist())
        states = tokens[..., None].float() + len(seen) / 100
        return states, states.expand(-1, -1, 2)

    cache = FeatureCache(compute, rows, tmp_path)
    kept = cache(rows.tokens[:2], None)
    assert all(map(torch.equal, cache(rows.tokens[:2].flip(0), None), (x.flip(0) for x in kept)))
    assert seen == [[0, 4]]
    mixed = cache(rows.tokens[1:], None)  # a new row beside a kept one
    assert torch.equal(mixed[0][0], kept[0][1]) and seen == [[0, 4], [4, 8]]
    assert torch.equal(cache(rows.tokens[2:], None)[1][0], mixed[1][1]) and len(seen) == 2
    cache(rows.tokens[:1] + 100, None)  # of no training row
    assert seen[-1] == [100] and len(seen) == 3
    assert [*tmp_path.iterdir()]  # left by a training that is killed here
    FeatureCache(compute, rows, tmp_path)(rows.tokens[:1], None)
    assert seen[-1] == [0]


def test_its_files_go_with_it(tmp_path):
    rows = TokenRows.plain(torch.arange(12).view(3, 4))
    cache = FeatureCache(lambda tokens, _: (tokens[..., None].float(),) * 2, rows, tmp_path)
    cache(rows.tokens, None)
    cache.close()
    assert not [*tmp_path.iterdir()]
