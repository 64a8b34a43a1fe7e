"""Our exports have the names that vLLM's and SGLang's loaders take."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nde_talf.draft_training.export.head_format import save_head
from tests.draft_training.heads import random_eagle3, random_head

LISTS = json.loads(Path(__file__).with_name("loader_names.json").read_text())


@pytest.mark.parametrize("engine", LISTS)
@pytest.mark.parametrize("make", [random_head, random_eagle3])
def test_an_export_has_the_names_that_an_engine_loads(target, tmp_path, engine, make):
    head = make(target)
    weights = load_file(save_head(head, tmp_path / "head") / "model.safetensors")
    names = {name.replace("midlayer.", "layers.0.") for name in weights}
    assert names == LISTS[engine][head.kind].keys() and LISTS[engine]["renames midlayer"]
