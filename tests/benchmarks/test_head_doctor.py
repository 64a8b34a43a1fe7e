"""The head doctor reads an engine's counters and names the fault that explains them."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.head_doctor import FAULTS, HEALTHY, diagnose, read_counters, suspects
from nde_talf import CausalModel
from nde_talf.draft_training.export.head_format import save_head
from nde_talf.draft_training.training.head_training import fit_head
from nde_talf.draft_training.training.lm_training import LanguageModel, fit
from nde_talf.draft_training.training_settings import HeadConfig, LanguageModelConfig, TalfLoss
from tests.refusal import refusal

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="x"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="x"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="1"} 1.0
"""


def test_counters_are_read_from_json_and_from_vllms_metrics(tmp_path):
    (tmp_path / "json").write_text('{"drafts": 10, "accepted": [7, 5]}')
    (tmp_path / "metrics").write_text(METRICS)
    assert read_counters(tmp_path / "json") == [10, 7, 5]
    assert read_counters(tmp_path / "metrics") == [14, 7, 3]


@pytest.mark.parametrize("text", ["", '{"drafts": 9, "accepted": [4, 5]}'])
def test_what_holds_no_counters_is_refused(text, tmp_path):
    (tmp_path / "counters").write_text(text)
    with refusal("counters"):
        read_counters(tmp_path / "counters")


def test_the_most_likely_fault_is_named_and_chance_is_not():
    ours = {HEALTHY: [1000, 700, 500], "norm": [1000, 400, 100], "late": [1000, 700, 200]}
    assert diagnose([500, 345, 255], ours) == HEALTHY
    assert diagnose([500, 352, 95], ours) == "late"
    assert diagnose([500, 210, 40], ours) == "norm"


def texts(count, length, seed):
    """Rows [count, length] of a first token 0, then each token the one three before it plus 1."""
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(26, (count, length), generator=generator)
    for at in range(3, length):
        letters[:, at] = (letters[:, at - 3] + 1) % 26
    return torch.cat([torch.zeros(count, 1).long(), letters + 1], 1)


@pytest.mark.long
def test_planted_faults_change_what_is_accepted(tmp_path):
    """A head that looks three tokens back feels every fault but that of the prompts."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 160}
    config = LlamaConfig(
        vocab_size=27, num_hidden_layers=4, num_attention_heads=4, bos_token_id=0, eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0}, **sizes,
    )  # fmt: skip
    recipe = LanguageModelConfig(steps=200, batch=16, warm_up=10, precision="32-true")
    torch.manual_seed(0)
    rows = texts(256, 47, 0)
    trained = fit(LanguageModel(LlamaForCausalLM(config), recipe), rows, tmp_path / "target")
    target = CausalModel(trained)
    settings = HeadConfig(
        loss=TalfLoss(k=2), roots=8, steps=150, batch=8, warm_up=4, precision="32-true"
    )
    export = save_head(fit_head(target, rows, settings, tmp_path / "head"), tmp_path / "export")
    prompts = texts(8, 20, 1).tolist()
    ours = suspects(target, export, prompts, 3, 32)
    assert set(ours) == set(FAULTS)
    for name in list(FAULTS)[:-1]:
        assert diagnose(ours[name], ours) == name
