"""A dialogue as token ids through a chat template, and which of them an assistant would have
generated.

What counts is found from the template alone. An answer begins where the template prompts for it, or
after what the template puts before every answer, such as an empty block of thoughts. It ends with
the token that ends a turn. Nothing is found by looking for words in the text. This module knows one
tokenizer, but not where dialogues come from or how documents are packed.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from nde_talf.data.dialogues.pack import Document
from nde_talf.data.dialogues.read import ASSISTANT, Dialogue, Message
from nde_talf.data.dialogues.settings import KEY
from nde_talf.decoding.common.errors import UserError

_PROBE = "an answer that stands for any other 5c1d"
_GENERATION = re.compile(r"\{%-?\s*generation\b")


class UnsuitedError(ValueError):
    """A dialogue that the template or the tokenizer does not represent faithfully; the message says
    why, for a count.
    """


class ChatEncoder:
    """Encodes dialogues as token ids, and marks those that an assistant generates.

    Args:
        tokenizer: of the target.
        template: Jinja text in place of the tokenizer's own chat template.
        options: passed to the template, such as {"enable_thinking": False}.

    Raises:
        UserError: there is no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        options: dict[str, Any] | None = None,
    ):
        if not (template or tokenizer.chat_template):
            raise UserError(
                f"{KEY}: the tokenizer has no chat template. Save one with the tokenizer"
                f" (tokenizer.chat_template), or set {KEY}.chat_template to its Jinja text."
            )
        self.tokenizer, self.options = tokenizer, options or {}
        self.template = template or tokenizer.get_chat_template()
        self.marked = bool(_GENERATION.search(self.template))
        """Whether the template itself says what is generated."""
        added = (str(token) for token in tokenizer.added_tokens_decoder.values())
        self._special = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of `messages` and of what the template puts before the next answer."""
        return self._ids(self._render(messages, add_generation_prompt=True))

    def documents(self, dialogue: Dialogue) -> list[Document]:
        """The dialogue as documents, in which the answers' tokens count, each with the token that
        ends its turn.

        There is one document, unless the template renders an answer differently once the dialogue
        goes on. Qwen3's does, as it drops earlier thoughts; then there is one document for every
        answer, rendered as the answer was given.

        Raises:
            UnsuitedError: the template or the tokenizer does not represent this dialogue
                faithfully.
            UserError: the template ends no turn with a special token.
        """
        documents = (
            self._marked(dialogue.messages) if self.marked else self._derived(dialogue.messages)
        )
        if dialogue.cut:
            documents[-1] = self._without_end(documents[-1])
        return documents

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _derived(self, messages: Sequence[Message]) -> list[Document]:
        whole = self._render(messages)
        found = [
            self._answer(messages[: i + 1])
            for i, message in enumerate(messages)
            if message["role"] == ASSISTANT
        ]
        if all(whole.startswith(text) for text, _, _ in found):
            return [self._document(whole, [(start, said) for _, start, said in found])]
        return [self._document(text, [(start, said)]) for text, start, said in found]

    def _answer(self, messages: Sequence[Message]) -> tuple[str, int, str]:
        """Of messages that end with an answer: their text, the character where the answer begins,
        and the answer with its end of turn.
        """
        text, prompt = (
            self._render(messages),
            self._render(messages[:-1], add_generation_prompt=True),
        )
        head, found, tail = self._render(
            [*messages[:-1], {"role": ASSISTANT, "content": _PROBE}]
        ).rpartition(_PROBE)
        if not found or not text.endswith(tail):
            raise UnsuitedError("whose answers the template does not show as they are")
        if not head.startswith(prompt):
            raise UnsuitedError(
                "whose answers the template renders otherwise than it prompts for them"
            )
        end = self._end_of_turn(tail)
        for start in (
            prompt,
            head,
            # the head may end with what stands before every answer, such as an empty block of thoughts
        ):
            said = text[len(start) : len(text) - len(tail)]
            if text.startswith(start) and said.split() == messages[-1]["content"].split():
                return text, len(start), said + end
        raise UnsuitedError("whose answers the template does not show as they are")

    def _end_of_turn(self, tail: str) -> str:
        """The blanks and the special token that `tail`, the template's text after an answer, begins
        with.
        """
        own = tail.lstrip()
        special = next((s for s in self._special if own.startswith(s)), None)
        if special is None:
            raise UserError(
                f"{KEY}: the chat template ends an answer with {tail[:40]!r}, which is no special"
                " token, so that a head cannot learn where an answer ends. Use a template with a"
                " token for the end of a turn."
            )
        return tail[: len(tail) - len(own)] + special

    def _document(self, text: str, answers: Sequence[tuple[int, str]]) -> Document:
        """`text` as ids, of which the `answers`, (first character, text with its end of turn) each,
        count.
        """
        tokens = self._ids(text)
        loss = [False] * len(tokens)
        characters = known = 0  # where the answer before ends, in characters and in tokens
        for start, said in answers:
            first = known + self._agreeing(tokens[known:], text[characters:start])
            if first == known:  # a tokenizer that sees further back than to the last end of turn
                first = self._agreeing(tokens, text[:start])
            if not first:
                raise UnsuitedError("in which a token reaches over the beginning of an answer")
            closing = self.tokenizer.convert_tokens_to_ids(
                next(s for s in self._special if said.endswith(s))
            )
            rest = tokens[first:]
            answer = rest[: rest.index(closing) + 1] if closing in rest else []
            if _normal(self.decode(answer)) != _normal(said):
                raise UnsuitedError("that the tokenizer does not give back")
            characters, known = start + len(said), first + len(answer)
            loss[first:known] = [True] * len(answer)
        return Document(tokens, loss)

    def _agreeing(self, tokens: Sequence[int], text: str) -> int:
        """How many ids `text` has if `tokens` begin with them; else 0."""
        ids = self._ids(text)
        return len(ids) if list(tokens[: len(ids)]) == ids else 0

    def _marked(self, messages: Sequence[Message]) -> list[Document]:
        found = self._apply(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        if not any(found["assistant_masks"]):
            raise UnsuitedError("of which the template marks nothing as generated")
        return [Document(list(found["input_ids"]), [bool(one) for one in found["assistant_masks"]])]

    def _without_end(self, document: Document) -> Document:
        """`document` up to the last answer's last word, the end of its turn left out."""
        end = 1 + max(i for i, counts in enumerate(document.loss) if counts)
        while (
            end and (text := self.decode([document.tokens[end - 1]])) in self._special
        ) or not text.strip():
            end -= 1
        return document.cut(end)

    def _render(self, messages: Sequence[Message], **options) -> str:
        return self._apply(messages, tokenize=False, **options)

    def _apply(self, messages: Sequence[Message], **how) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.template, **how, **self.options
            )
        except TemplateError as error:
            raise UnsuitedError(f"that the template refuses ({error})") from error

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def encode_dialogues(
    encoder: ChatEncoder, dialogues: Iterable[Dialogue]
) -> tuple[list[Document], Counter[str]]:
    """The documents of all dialogues, and why how many dialogues were skipped."""
    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    for dialogue in dialogues:
        try:
            documents += encoder.documents(dialogue)
        except UnsuitedError as error:
            skipped[str(error)] += 1
    return documents, skipped


def _normal(text: str) -> str:
    """`text` as tokenizers may give it back: composed, and without a blank in front that belongs to
    its first token.
    """
    return unicodedata.normalize("NFC", text).removeprefix(" ")
