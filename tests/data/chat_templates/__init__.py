"""Chat templates that render text dialogues as those of Llama 3, Qwen 2.5, Qwen 3 and Gemma 3 do;
tokenizers for them.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nde_talf.data.text.tokenizer import train_tokenizer

SPECIAL = {
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "qwen2": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    "gemma3": ("<bos>", "<start_of_turn>", "<end_of_turn>"),
}
END_OF_TURN = {
    "llama3": "<|eot_id|>",
    "qwen2": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "gemma3": "<end_of_turn>",
}
FAMILIES = tuple(SPECIAL)


def template(family: str) -> str:
    return Path(__file__).with_name(f"{family}.jinja").read_text()


def family_tokenizer(family: str, texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer trained on `texts` with a family's special tokens and template: bytes, but for
    Gemma, whose blanks are a letter of words and whose unknown letters are bytes.
    """
    if family == "gemma3":
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        backend.train_from_iterator(
            texts,
            trainers.BpeTrainer(vocab_size=500, special_tokens=letters, show_progress=False),
            len(texts),
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    else:
        tokenizer = train_tokenizer(texts, 320)
    tokenizer.add_tokens(list(SPECIAL[family]), special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token = SPECIAL[family][0], END_OF_TURN[family]
    tokenizer.chat_template = template(family)
    return tokenizer
