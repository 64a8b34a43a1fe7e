"""A dialogue as token ids through a chat template, and which of them an assistant generates.

The counted tokens follow from the template alone. An answer begins where the template prompts for
it, or after the text that the template puts before every answer, such as an empty block of
thoughts. It ends with the token that ends a turn. No words are searched for in the text.
"""

import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from nde_talf.data.dialogues.read import ASSISTANT, USER, Dialogue, Message, UnsuitedError
from nde_talf.data.dialogues.settings import KEY
from nde_talf.data.dialogues.token_rows import Document
from nde_talf.data.text.prompts import ids_of
from nde_talf.data.text.templates import PROBE, ChatTemplate
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.models.end_tokens import closing_token, special_tokens


class ChatEncoder:
    """Encodes dialogues as token ids, and marks those that an assistant generates.

    Args:
        tokenizer: of the target.
        template: Jinja text in place of the tokenizer's own chat template.
        options: passed to the template, such as {"enable_thinking": False}.

    Raises:
        UserError: there is no chat template, or no dialogue can be used with it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        options: dict[str, Any] | None = None,
    ):
        if not (template or tokenizer.chat_template):
            raise UserError(
                f"{KEY}: the tokenizer has no chat template. For a plain one give"
                f" '{KEY}=[plain,file]' {KEY}.source=FILE; or set {KEY}.chat_template to its Jinja."
            )
        self.tokenizer = tokenizer
        self.chat = ChatTemplate(tokenizer, f"{KEY}.chat_template", template, options)
        probe = [{"role": USER, "content": PROBE}]
        self._special = special_tokens(tokenizer)
        # An added token may be a word of answers, as Qwen 3's <think> is.
        plain = {str(t) for t in tokenizer.added_tokens_decoder.values() if not t.special}
        self._reserved = {*self._special} - plain
        try:
            self._answer([*probe, {"role": ASSISTANT, "content": PROBE}])
        except UnsuitedError as error:
            raise UserError(
                f"{KEY}.chat_template: every dialogue is one {error}, so that none could be used."
                " Give a template in which an answer follows what asks for it."
            ) from error

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Encode `messages` and what the template puts before the next answer."""
        return ids_of(self.chat.render(messages, add_generation_prompt=True), self.tokenizer)

    def around_user(self) -> tuple[str, str]:
        """Return the text before a user's first turn, and that between it and its answer."""
        text = self.chat.render([{"role": USER, "content": PROBE}], add_generation_prompt=True)
        before, _, after = text.partition(PROBE)
        return before, after

    def documents(self, dialogue: Dialogue) -> list[Document]:
        """Encode a dialogue as documents, in which the answers and their ends of turn count.

        There is one document, unless the template renders an answer differently once another turn
        follows. Qwen3's does, as it drops earlier thoughts; then there is one document for every
        answer, rendered as the answer was given.

        Raises:
            UnsuitedError: the template or the tokenizer does not represent this dialogue
                faithfully.
            UserError: the template ends no turn with a special token.
        """
        messages, cut = dialogue.messages, dialogue.cut
        said = "\n".join(m["content"] for m in messages if m["role"] == ASSISTANT)
        if any(token in said for token in self._reserved):
            raise UnsuitedError("whose answers hold special tokens")
        whole = self.chat.render(messages)
        ends = [i for i, message in enumerate(messages, 1) if message["role"] == ASSISTANT]
        finished = ends[:-1] if cut else ends
        texts = {self.chat.render(messages[:end]): self._answer(messages[:end]) for end in finished}
        if cut:  # perhaps inside its thoughts, where the template would put their end before it
            prompt = self.chat.render(messages[:-1], add_generation_prompt=True)
            answer = messages[-1]["content"]
            whole = prompt + answer
            texts[whole] = len(prompt), answer
        if all(whole.startswith(text) for text in texts):
            return [self._document(whole, list(texts.values()), cut)]
        return [
            self._document(text, [answer], cut and text == whole) for text, answer in texts.items()
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode, special tokens included."""
        text = self.tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _answer(self, messages: Sequence[Message]) -> tuple[int, str]:
        """Find the last answer: the character where it begins, and it with its end of turn."""
        *before, last = messages
        text = self.chat.render(messages)
        prompt = self.chat.render(before, add_generation_prompt=True)
        probe: Message = {"role": ASSISTANT, "content": PROBE}
        head, shown, tail = self.chat.render([*before, probe]).rpartition(PROBE)
        ends = shown and text.endswith(tail)
        if ends and not head.startswith(prompt):
            raise UnsuitedError(
                "whose answers the template renders otherwise than it prompts for them"
            )
        # The head may end with what precedes every answer, such as an empty block of thoughts.
        for start in (prompt, head):
            answer = text[len(start) : len(text) - len(tail)]
            if ends and text.startswith(start):
                alone = answer.split() == last["content"].split()
                if alone or (len(last) > 2 and last["content"] in answer):  # thoughts
                    return len(start), answer + self._end_of_turn(tail)
        raise UnsuitedError("whose answers the template does not show as they are")

    def _end_of_turn(self, tail: str) -> str:
        """Return the blanks and the special token that the text after an answer begins with."""
        bare = tail.lstrip()
        special = closing_token(self._special, tail)
        if special is None:
            raise UserError(
                f"{KEY}: the chat template ends an answer with {tail[:40]!r}, which is no special"
                " token, so that a head cannot learn where an answer ends. Use a template with a"
                " token for the end of a turn."
            )
        return tail[: len(tail) - len(bare)] + special

    def _document(self, text: str, answers: list[tuple[int, str]], cut: bool) -> Document:
        """Encode `text`, of which `answers` count: first character, text with its end.

        cut: the last of them has no end.
        """
        tokens = ids_of(text, self.tokenizer)
        loss = [False] * len(tokens)
        characters = known = 0  # where the answer before ends, in characters and in tokens
        for start, answer in answers:
            first = known + self._agreeing(tokens[known:], text[characters:start])
            if first == known:  # a tokenizer that sees further back than to the last end of turn
                first = self._agreeing(tokens, text[:start])
            if not first:
                raise UnsuitedError("in which a token reaches over the beginning of an answer")
            if cut and (start, answer) == answers[-1]:
                known = len(tokens)
            else:
                closing = next(s for s in self._special if answer.endswith(s))
                end = self.tokenizer.convert_tokens_to_ids(closing)
                known = tokens.index(end, first) + 1 if end in tokens[first:] else first
            if _normal(self.decode(tokens[first:known])) != _normal(answer):
                raise UnsuitedError("that the tokenizer does not give back")
            characters = start + len(answer)
            loss[first:known] = [True] * (known - first)
        return Document(tokens, loss)

    def _agreeing(self, tokens: Sequence[int], text: str) -> int:
        """Count the ids of `text` if `tokens` begin with them; else 0."""
        ids = ids_of(text, self.tokenizer)
        return len(ids) if list(tokens[: len(ids)]) == ids else 0


def encode_dialogues(
    encoder: ChatEncoder, dialogues: Iterable[Dialogue]
) -> tuple[list[Document], Counter[str]]:
    """Encode all dialogues, and count those skipped by the reason."""
    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    for dialogue in dialogues:
        try:
            for document in encoder.documents(dialogue):  # in 5 bytes per token, not 48
                tokens, loss = array("i", document.tokens), bytearray(document.loss)
                documents.append(Document(tokens, loss))
        except UnsuitedError as error:
            skipped[str(error)] += 1
    return documents, skipped


def _normal(text: str) -> str:
    """Normalise `text` as tokenizers may give it back: composed, without a blank in front."""
    return unicodedata.normalize("NFC", text).removeprefix(" ")
