"""A byte-level BPE tokenizer, and text packed into rows of tokens.

Documents are laid end to end, each closed by the tokenizer's special token.
"""

from array import array
from collections.abc import Iterable, Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nde_talf.decoding.common.errors import UserError

END_OF_TEXT = "<|endoftext|>"
"""The one special token: it begins and ends every document."""
AT_ONCE = 256
"""Documents that are encoded together: a tokenizer's own objects are many times their tokens."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens, the first `<|endoftext|>`.

    Every string is encoded without loss, since all 256 bytes are tokens. Encoding adds no special
    tokens.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def pack(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], length: int) -> torch.Tensor:
    """Lay documents end to end and cut into rows [rows, length].

    Before each come the end of a text, and what the tokenizer begins one with. There is no
    padding; the last, shorter row is dropped.

    Args:
        tokenizer: has a token that ends a text.
        documents: the texts, for example `dataset["text"]`.
        length: tokens in a row.

    Raises:
        UserError: the documents do not fill one row.
    """
    texts = list(documents)
    parts = (texts[start : start + AT_ONCE] for start in range(0, len(texts), AT_ONCE))
    begin = [each for each in tokenizer("")["input_ids"] if each != tokenizer.eos_token_id]
    encoded = (
        begin + ids
        for part in parts
        for ids in tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
    )
    return in_rows(encoded, tokenizer.eos_token_id, length)


def in_rows(documents: Iterable[Sequence[int]], separator: int, length: int) -> torch.Tensor:
    """Lay documents of token ids end to end like `pack`."""
    stream = array("i")
    for ids in documents:
        stream.append(separator)
        stream.extend(ids)
    rows = len(stream) // length
    if rows == 0:
        raise UserError(
            f"The corpus has {len(stream)} tokens, less than one row of {length}: use more text or"
            " shorter rows."
        )
    packed = torch.frombuffer(stream, dtype=torch.int32)[: rows * length]
    return packed.view(rows, length).long()
