"""A GGUF file is converted once, into a folder with the same weights, tokenizer and template."""

import os

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nde_talf import CausalModel
from nde_talf.data.text.templates import load_tokenizer
from nde_talf.decoding.common.model_record import changed, recorded
from nde_talf.decoding.models.gguf import _converted, model_folder
from tests.refusal import refusal

gguf = pytest.importorskip("gguf")
HEADS, ROWS, H = 4, 2, 32
LETTERS = [chr(letter) for letter in range(33, 127)] + ["Ġ", "Ċ", "ab"]
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}


def write_gguf(file, seed=0):
    """Write a Llama as llama.cpp's converter lays it out; return its weights, dequantised."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=H,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=ROWS,
        tie_word_embeddings=True,
    )
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(H)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(ROWS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(H // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * 3 + [1] * len(LETTERS))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    wanted = {}
    for name, weight in LlamaForCausalLM(config).model.state_dict(prefix="model.").items():
        theirs, kind = name, gguf.GGMLQuantizationType.Q4_1
        for ours, other in PARTS.items():
            theirs = theirs.replace(ours, other)
        if weight.dim() == 1:
            kind = gguf.GGMLQuantizationType.F32
        data = gguf.quantize(weight.numpy(), kind)
        wanted[name] = torch.tensor(gguf.dequantize(data, kind))
        if heads := {"attn_q.weight": HEADS, "attn_k.weight": ROWS}.get(theirs.split(".", 2)[-1]):
            data = data.reshape(heads, 2, -1, data.shape[-1]).swapaxes(1, 2).reshape(data.shape)
        writer.add_tensor(theirs, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return wanted


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    _converted.cache_clear()
    yield tmp_path / "hub/nde-talf"
    _converted.cache_clear()


def test_a_conversion_holds_the_dequantised_weights_and_is_made_once(tmp_path, cache):
    file = tmp_path / "tiny.gguf"
    wanted = write_gguf(file)
    (tmp_path / "config.json").write_text("{}")  # another model's
    target = CausalModel.load(file)
    weights = target.module.state_dict()
    assert {*weights} - {*wanted} == {"lm_head.weight"}  # tied
    assert all(torch.equal(weights[name], wanted[name].bfloat16().float()) for name in wanted)
    tokenizer = load_tokenizer(file)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer("ab b<|im_end|>")["input_ids"] == [WORDS.index("ab"), 97, 68, 2]
    assert (target.ends, tokenizer.eos_token) == ({2}, "<|im_end|>")

    (folder,) = cache.glob("tiny-*")
    made, record = os.stat(folder / "model.safetensors"), recorded(str(folder))
    _converted.cache_clear()
    assert model_folder(file) == str(folder)
    assert os.stat(folder / "model.safetensors") == made
    write_gguf(file, seed=1)
    assert changed(model_folder(file), record) == "source.json has changed"


@pytest.mark.parametrize(
    "damage,words",
    [
        (lambda data: data[:-100], "cannot be read, or does not hold what it should"),
        (lambda data: data[:200], "cannot be read, or does not hold what it should"),
        (lambda data: b"", "cannot be read, or does not hold what it should"),
        (lambda data: data.replace(b"blk.1.ffn_up", b"blk.9.ffn_up"), "it lacks .*up_proj"),
        (lambda data: data.replace(b"llama", b"lamma"), "architecture lamma is not supported"),
        (lambda data: data.replace(b"blk.0.attn_k", b"rope_k.attn_"), "leaves scaled positions"),
    ],
)
def test_a_file_that_is_no_whole_llama_is_refused_and_leaves_nothing(
    tmp_path, cache, damage, words
):
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    file.write_bytes(damage(file.read_bytes()))
    with refusal(rf"model\.target=.*tiny\.gguf: .*{words}"):
        model_folder(file, "model.target")
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_missing_file_or_reader_and_a_cache_without_room_are_told(tmp_path, cache, monkeypatch):
    with refusal(r"model\.draft=nowhere\.gguf: there is no such file"):
        model_folder("nowhere.gguf", "model.draft")
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    with monkeypatch.context() as patch:
        patch.setattr(f"{model_folder.__module__}.find_spec", lambda name: None)
        with refusal("pip install 'gguf"):
            model_folder(file)
    monkeypatch.setenv("HF_HOME", str(file))  # no folder can be made in it
    with refusal("cannot be written there .*set HF_HOME"):
        model_folder(file)
