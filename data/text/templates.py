"""Tokenizers and chat templates of others, loaded, tried and rendered."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from textwrap import shorten
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nde_talf.data.text.conversation import ASSISTANT, USER, Message, UnsuitedError
from nde_talf.decoding.common.errors import Advice, UserError, first_line
from nde_talf.decoding.models.end_tokens import end_tokens
from nde_talf.decoding.models.gguf import model_folder
from nde_talf.decoding.models.loading import read_config

PROBE = "an answer that stands for any other 5c1d"
"""An answer whose place in a rendered conversation shows what the template adds."""
ASKED = "a question of plain words"
"""The question before it."""
TRIED: list[Message] = [{"role": USER, "content": ASKED}, {"role": ASSISTANT, "content": PROBE}]
"""The conversation that every template is tried on."""


def load_tokenizer(where: Any, name: str = "model.target") -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder or of a hub name.

    Raises UserError, naming `name` and the folder, if there is none that encodes a text.
    """
    where = model_folder(where, name)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        if len(tokenizer("a text")["input_ids"]) < 1 or len(tokenizer) < 2:
            raise ValueError("its vocabulary does not hold the letters of a text")
        return tokenizer
    except UserError:
        raise
    except Exception as error:  # tokenizers raises Exception itself
        read_config(where, name)  # whose fault it may be
        raise UserError(
            f"{name}={where}: no tokenizer could be loaded from there"
            f" ({type(error).__name__}: {shorten(str(error), 200, placeholder=' ...')}). Save the"
            " tokenizer beside the model."
        ) from error


def check_ids(tokenizer: PreTrainedTokenizerBase, rows: int, where: str) -> None:
    """Check that the tokens of every text have a row of the embedding; advise about other tokens.

    These are its first and last ones, and those that the chat template writes. Gemma-3's tokenizer
    has a token for images that its smallest models lack.
    """
    beyond = {index: token for token, index in tokenizer.get_vocab().items() if index >= rows}
    used = {tokenizer.eos_token_id, *tokenizer("")["input_ids"]}
    with suppress(UserError):
        used |= {*tokenizer(ChatTemplate(tokenizer, "").render(TRIED))["input_ids"]}
    listed = ", ".join(f"{token} ({index})" for index, token in sorted(beyond.items())[:4])
    fault = f"{where}: the embedding has {rows} rows, and none for {listed} of its tokenizer"
    if not beyond.keys().isdisjoint(used):
        raise UserError(
            f"{fault}, which every text or chat holds. Resize and train the embedding"
            " (resize_token_embeddings), or give the model's own tokenizer."
        )
    if beyond:
        warnings.warn(f"{fault}: a text with these cannot be read.", Advice, stacklevel=2)


class ChatTemplate:
    """A chat template, tried on a question and an answer before it is trusted.

    Args:
        tokenizer: gives the template, if there is no other.
        key: the setting that asks for it, for messages.
        template: Jinja text in place of the tokenizer's own.
        options: passed to the template, such as {"enable_thinking": False}.

    Raises:
        UserError: it fails, or does not show the question or the answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        key: str,
        template: str | None = None,
        options: dict[str, Any] | None = None,
    ):
        self._tokenizer, self._how = tokenizer, {"chat_template": template, **(options or {})}
        if fault := self._fault():
            raise UserError(
                f"{key}: the chat template of {tokenizer.name_or_path} {fault}. Mend it, or take a"
                " tokenizer with another one."
            )

    def _fault(self) -> str:
        """Say why no conversation can be rendered; "" if a question and its answer are shown."""
        try:
            text = _squeezed(self.render(TRIED))
        except UnsuitedError as error:
            return f"cannot render a conversation ({first_line(error.__cause__ or error)})"
        if all(_squeezed(said) in text for said in (ASKED, PROBE)):
            return ""
        return "does not show a question and its answer, so that none could be used"

    def render(self, messages: Sequence[Message], **how) -> str:
        """Render a conversation. Raises UnsuitedError where the template refuses it."""
        how = {"tokenize": False} | self._how | how
        try:
            return str(self._tokenizer.apply_chat_template([*messages], **how))
        except Exception as error:  # a template is a program
            raise UnsuitedError(f"that the template refuses ({first_line(error)})") from error


def _squeezed(text: str) -> str:
    return "".join(text.split())


def text_ends(where: str, eos: Any, vocabulary: int) -> frozenset[int]:
    """Return the tokens that end a model's texts by its tokenizer and chat template, and `eos`.

    Only `eos`, from its generation_config, counts without a tokenizer in the folder or hub name
    `where`. A template that is not there, fails or does not show an answer adds none.
    """
    tokenizer, tail = None, ""
    with suppress(UserError):
        tokenizer = load_tokenizer(where)
        tail = ChatTemplate(tokenizer, "").render(TRIED).rpartition(PROBE)[2]
    return end_tokens(eos, vocabulary, tokenizer, tail)
