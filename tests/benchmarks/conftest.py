"""A tiny run that benchmarks are tried on."""

import pytest

V = 40


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run's folder with a pair of random Llamas, a head and ten prompts."""
    import torch

    from nde_talf.data.text.pair import Pair
    from nde_talf.data.text.prompts import Prompt
    from nde_talf.draft_training.export.head_format import save_head
    from tests.decoding.pairs import tiny_pair
    from tests.draft_training.heads import random_head

    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    target, draft = tiny_pair(V, hidden=32, layers=2)
    for role, model in (("target", target), ("draft", draft)):
        model.module.save_pretrained(folder / "pair" / role)
    save_head(random_head(target), folder / "draft" / "export")
    prompts = [Prompt(str(i), "code", "", [(7 * i + j) % V for j in range(6)]) for i in range(10)]
    rows = torch.zeros(2, 8, dtype=torch.long)
    Pair(folder / "pair").write("target", "draft", prompts, 4, rows, rows)
    return folder
