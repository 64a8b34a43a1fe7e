"""Text that a target writes without data: what it continues, what ends it, and what cannot be used."""

from collections.abc import Sequence

import pytest

from nde_talf.data.dialogues.chat_mask import ChatEncoder
from nde_talf.data.dialogues.self_made import Opening, first_token, user_turn
from nde_talf.data.text.tokenizer import train_tokenizer
from nde_talf.data.traces.store import TraceStore
from nde_talf.pipelines.stages.answers import Sampling, SelfMade
from tests.data.chat_templates import END_OF_TURN, family_tokenizer

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TEXTS = ["What is 1 plus 1, and why?", "It is 2, since [INST] two ones are two. [/INST]"]


@pytest.mark.parametrize(
    "family,template,before,closing",
    [
        ("llama3", None, "<|end_header_id|>\n\n", "<|eot_id|>"),
        ("qwen3", None, "<|im_start|>user\n", "<|im_end|>"),
        ("gemma3", None, "<start_of_turn>user\n", "<end_of_turn>"),
        ("qwen2", MISTRAL, "[INST]", "[/INST]"),
        ("phi", PHI, "<|user|>\n", "<|end|>"),
    ],
)
def test_a_users_turn_begins_and_ends_as_the_template_has_it(family, template, before, closing):
    tokenizer = family_tokenizer("qwen2" if family == "phi" else family, TEXTS)
    if family == "phi":
        tokenizer.add_tokens(["<|end|>", "<|user|>", "<|assistant|>"], special_tokens=True)
    encoder = ChatEncoder(tokenizer, template)
    opening = user_turn(encoder)
    assert tokenizer.decode(opening.tokens).endswith(before) and opening.closing == closing
    special = closing in (*END_OF_TURN.values(), "<|end|>")
    assert opening.ends == ((tokenizer.convert_tokens_to_ids(closing),) if special else ())
    whole = encoder.prompt([{"role": "user", "content": TEXTS[0]}])
    assert whole[: len(opening.tokens)] == opening.tokens


def test_a_base_model_begins_with_its_first_token_or_else_its_end():
    tokenizer = train_tokenizer(TEXTS, 300)
    assert first_token(tokenizer).tokens == [tokenizer.bos_token_id]
    tokenizer.bos_token = None
    assert first_token(tokenizer) == Opening([tokenizer.eos_token_id])


class Recited:
    """Writes texts that are known, and counts how often it is asked."""

    def __init__(self, tokenizer, texts: Sequence[str]):
        self.tokenizer, self.texts, self.asked = tokenizer, list(texts), 0

    def sample(self, prompts, setting, new_tokens, seed, ends):
        first = seed % 1_009 * len(prompts)
        made = self.texts[first : first + len(prompts)]
        self.asked += 1
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in made]
        return [p + text[:new_tokens] for p, text in zip(prompts, ids, strict=True)]

    def close(self) -> None: ...


USABLE = [
    "Why is the sky blue today?",
    "How do I boil two eggs at once?",
    "為什麼天空今天是藍色的呢？",
]
FAULTY = {
    "": "that are empty or short",
    "Why is the sky <|im_start|> blue?": "with special tokens inside",
    "Why is the \x07 sky blue today?": "with letters that cannot be printed",
    "Why is the \ufffd sky blue today?": "with letters that cannot be printed",
    "Why, is the sky BLUE today??": "much like another",
    "Which cities of this world and of all others are held out from here, and why?": "much like another",
    "word " * 200: "that did not end",
}


def made(folder, tokenizer, texts, size=3):
    engine = Recited(tokenizer, texts)
    closing = "<|im_end|>"
    opening = Opening([1, 2], (tokenizer.convert_tokens_to_ids(closing),), closing)
    store = TraceStore(folder, "questions")
    own = SelfMade(store, Sampling(lambda: engine, size, 0), tokenizer, opening, 120)
    return own, engine


def test_what_cannot_be_used_is_counted_and_nothing_is_written_twice(tmp_path, capsys):
    tokenizer = family_tokenizer("qwen2", TEXTS)
    texts = [USABLE[0], *FAULTY, *USABLE[1:], *USABLE[:2]]
    own, engine = made(tmp_path, tokenizer, texts)
    held_out = ["Which cities of this world and of all others are held out from here"]
    assert own.texts(3, held_out) == USABLE and engine.asked == 4
    printed = " ".join(capsys.readouterr().out.split())
    for reason in ("3 of 10 can be used", "2 much like another", *FAULTY.values()):
        assert reason in printed
    again, idle = made(tmp_path, tokenizer, texts)
    assert again.texts(2, held_out) == USABLE[:2] and not idle.asked
