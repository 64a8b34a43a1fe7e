"""Tokenizers and chat templates of others, loaded and rendered within limits."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nde_talf.decoding.common.errors import UserError, first_line
from nde_talf.decoding.end_tokens import EndTokens, end_tokens
from nde_talf.decoding.loading import check_files

SECONDS = 5.0
"""Time that rendering one conversation may take."""
PROBE = "an answer that stands for any other 5c1d"
"""An answer whose place in a rendered conversation shows what the template adds."""
LONGEST = 10_000_000
"""Characters of a rendered conversation, and the largest number in a template."""


def load_tokenizer(where: Any, name: str = "model.target") -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder or of a hub name.

    Raises UserError, naming `name` and the folder, if there is none that encodes a text.
    """
    try:
        check_files(Path(where))
        tokenizer: Any = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        if len(tokenizer("a text")["input_ids"]) < 1 or len(tokenizer) < 2:
            raise ValueError("its vocabulary does not hold the letters of a text")
        return tokenizer
    except UserError:
        raise
    except Exception as error:  # tokenizers raises Exception itself
        raise UserError(
            f"{name}={where}: no tokenizer could be loaded from there"
            f" ({type(error).__name__}: {shorten(str(error), 200, placeholder=' ...')}). Save the"
            " tokenizer beside the model."
        ) from error


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], key: str, /, **how: Any
) -> str:
    """Render a conversation by a chat template, as text.

    Raises UserError, naming `key`, for a template that fails, takes too long or gives no text.
    """
    try:
        template = tokenizer.get_chat_template(how.get("chat_template"))
        _check_numbers(template)
        with in_time():
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, **how)
        if not isinstance(text, str) or not 0 < len(text) <= LONGEST:
            raise ValueError(f"it gives no text of 1 to {LONGEST} characters")
        return text
    except Exception as error:  # a template is a program
        raise UserError(
            f"{key}: the chat template cannot render a conversation ({type(error).__name__}:"
            f" {first_line(error)}). Mend it, or take a tokenizer with another one."
        ) from error


def tokenizer_of(where: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer beside a model; None where there is none."""
    with suppress(UserError):
        return load_tokenizer(where)
    return None


def text_ends(tokenizer: PreTrainedTokenizerBase | None, eos: Any, vocabulary: int) -> EndTokens:
    """Return the tokens that end the text of a model: see `nde_talf.decoding.end_tokens`.

    eos: of its generation_config. A chat template that is not there, fails or does not show a plain
    answer adds none.
    """
    if tokenizer is None:
        return end_tokens(eos, vocabulary)
    return end_tokens(eos, vocabulary, tokenizer, _after_answer(tokenizer))


def _after_answer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the chat template puts after the last answer of a conversation; "" without."""
    for content in (PROBE, [{"type": "text", "text": PROBE}]):
        asked, answered = {"role": "user", "content": "Hi"}, {"role": "assistant"}
        with suppress(UserError):
            messages: Any = [asked, answered | {"content": content}]
            _, shown, closing = render(tokenizer, messages, "").rpartition(PROBE)
            if shown:
                return closing
    return ""


def _check_numbers(template: str) -> None:
    """Raise ValueError for powers and for numbers that make a text of any size at once."""
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateError:
        return  # the tokenizer's own environment knows more tags, and says what is wrong
    large = (node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, int))
    if any(parsed.find_all(nodes.Pow)) or max(large, default=0) > LONGEST:
        raise ValueError(f"it holds a power, or a number beyond {LONGEST}")


@contextmanager
def in_time() -> Iterator[None]:
    """Raise TimeoutError inside the block after `SECONDS`; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
