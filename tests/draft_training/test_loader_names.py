"""Our exports have the names and sizes that vLLM's and SGLang's loaders take, as
`tools/loader_names.py` read them.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from nde_talf.draft_training.export import save_head
from tests.draft_training.heads import random_eagle3, random_head

LISTS = json.loads(Path(__file__).with_name("loader_names.json").read_text())


@pytest.mark.parametrize("engine", LISTS)
@pytest.mark.parametrize(
    "kind,vocabulary", [("eagle", None), ("eagle3", None), ("eagle3", list(range(5, 18)))]
)
def test_an_export_has_the_names_and_sizes_that_an_engine_loads(
    target, tmp_path, engine, kind, vocabulary
):
    head = random_head(target) if kind == "eagle" else random_eagle3(target, vocabulary=vocabulary)
    folder = save_head(head, tmp_path / "head")
    weights = load_file(folder / "model.safetensors")
    assert {"d2t", "t2d"} <= weights.keys() or vocabulary is None
    assert (
        any(name.startswith("midlayer.") for name in weights) == (kind == "eagle3")
        and LISTS[engine]["renames midlayer"]
    )
    read = {
        name.replace("midlayer.", "layers.0."): w
        for name, w in weights.items()
        if name not in ("d2t", "t2d")
    }
    wanted, config = (
        LISTS[engine][kind],
        SimpleNamespace(**json.loads((folder / "config.json").read_text())),
    )
    assert read.keys() == wanted.keys()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "qkv_input_size": 32, "config": config}
    this = SimpleNamespace(
        config=config, total_num_heads=4, head_dim=4, self_attn=SimpleNamespace(head_dim=4)
    )
    this.hidden_size_in, this.num_aux_hidden_states, this.fc_input_size = 16, 3, 48
    for name, weight in read.items():
        if kind == "eagle3" and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            sizes["hidden_size"] = (
                32  # SGLang's word for what attention reads: embedding and feature
            )
        first, *second = [
            eval(text, {**sizes, "self": this}) for text in wanted[name] if "[" not in text
        ]
        sizes["hidden_size"] = 16
        if name == "lm_head.weight":
            assert list(weight.shape) == [first, *second] == [len(head.own_matrix), 16]
        elif weight.ndim == 1:
            assert list(weight.shape) == [first]
        else:
            assert weight.shape[1] == first and (
                not second or weight.shape[0] in (second[0], 4 * second[0], 2 * second[0])
            )
