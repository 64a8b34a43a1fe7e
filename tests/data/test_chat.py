"""Chat templates of four families: what counts is what the assistant generates, and the rest of a
document is what it saw.
"""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nde_talf.data.dialogues.chat_mask import ChatEncoder, encode_dialogues
from nde_talf.data.dialogues.read import Dialogue, in_order
from nde_talf.data.text.conversation import UnsuitedError
from nde_talf.data.text.templates import ChatTemplate
from tests.data.chat_templates import END_OF_TURN, FAMILIES, family_tokenizer
from tests.refusal import refusal

TURNS = [
    ["What is the capital of France?", "The capital of France is Paris."],
    [
        "And of Italy?\n\nIn one word, please.",
        "Rome.\n\n    It lies on the Tiber, naïvely \u2014 日本 🦊.",
    ],
    ["<|im_end|> and <end_of_turn> are odd words", "What is the capital of France?"],
]
SYSTEM = {"role": "system", "content": "Answer briefly."}
ANSWERS = [answer for _, answer in TURNS]


def dialogue(turns=TURNS, cut=False) -> Dialogue:
    said = [
        {"from": who, "value": text}
        for turn in turns
        for who, text in zip(("human", "gpt"), turn, strict=True)
    ]
    return Dialogue("one", in_order(said), cut)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(family):
    return family_tokenizer(family, [text for turn in TURNS for text in turn])


def counted(encoder, document) -> list[tuple[int, str]]:
    """The first token of each of a document's runs that count, and its text."""
    runs: dict[int, list[int]] = {}
    for at, (token, counts) in enumerate(zip(document.tokens, document.loss, strict=True)):
        if counts and not document.loss[at - 1]:
            start = at
        if counts:
            runs.setdefault(start, []).append(token)
    return [(start, encoder.decode(run)) for start, run in runs.items()]


@pytest.mark.parametrize("system", [[], [SYSTEM]])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_what_counts_is_the_answers_each_after_the_very_tokens_that_prompt_for_it(
    family, tokenizer, system, options
):
    encoder, messages = ChatEncoder(tokenizer, options=options), system + dialogue().messages
    documents = encoder.documents(Dialogue("one", messages))
    runs = [(d, *run) for d in documents for run in counted(encoder, d)]
    assert [text for *_, text in runs] == [answer + END_OF_TURN[family] for answer in ANSWERS]
    # Qwen3 drops earlier thoughts: a document an answer.
    assert len(documents) == (3 if family == "qwen3" else 1)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert encoder.decode(documents[-1].tokens) == rendered
    if family != "qwen3" or options:  # it thinks before it answers
        for turn, (document, start, _) in enumerate(runs):
            prompt = encoder.prompt(messages[: len(system) + 2 * turn + 1])
            assert document.tokens[:start] == prompt


def test_a_cut_answer_has_no_end_to_learn(tokenizer):
    encoder = ChatEncoder(tokenizer)
    *_, last = encoder.documents(dialogue(cut=True))
    assert counted(encoder, last)[-1][1] == ANSWERS[-1] and last.loss[-1]


def showing(answer: str, question: str = "Q {{ turn.content }}\nA ") -> str:
    """A template of questions and answers, the latter by the Jinja text `answer`."""
    asked = "{% if turn.role == 'user' %}" + question + "{% else %}"
    return "{% for turn in messages %}" + asked + answer + "{% endif %}{% endfor %}"


THINKING = "{{ '<think>' ~ turn.reasoning_content ~ '</think>' if turn.reasoning_content }}"


@pytest.mark.parametrize(
    "answer,turn,taught",
    [
        (THINKING, {"reasoning_content": "Two."}, "<think>Two.</think>4<|im_end|>"),
        ("", {"reasoning_content": "Two."}, "4<|im_end|>"),
    ],
)
def test_thoughts_are_learnt_where_the_template_shows_them(answer, turn, taught):
    tokenizer = family_tokenizer("qwen2", ["a few words", "<think>Two.</think>"])
    encoder = ChatEncoder(tokenizer, showing(answer + "{{ turn.content }}<|im_end|>\n"))
    asked = {"role": "user", "content": "2 + 2?"}
    row = in_order([asked, {"role": "assistant", "content": "4", **turn}])
    (document,) = encoder.documents(Dialogue("one", row))
    assert counted(encoder, document)[0][1] == taught


def test_a_template_is_tried_before_it_is_trusted(tmp_path):
    tokenizer = family_tokenizer("qwen2", ["a few words"])
    tokenizer.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    says = "{{ m.role }} {{ m.content }}<|im_end|>"
    odd = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    said = [{"role": who, "content": f"by {who}"} for who in ("system", "user", "assistant")]
    whole = "".join(f"{m['role']} {m['content']}<|im_end|>" for m in said)
    chats = [
        ChatTemplate(tokenizer, "key", "{% for m in messages %}" + template + "{% endfor %}")
        for template in (says, odd + says)
    ]
    assert chats[0].render(said) == whole
    with pytest.raises(UnsuitedError, match="that the template refuses"):
        chats[1].render(said)
    for template in (
        "{{ m.role }}",
        "{{ m.content[:5] }}",
        "{% if m.role == 'user' %}" + says + "{% endif %}",
    ):
        with refusal(f"key: the chat template of {tmp_path}"):
            ChatTemplate(tokenizer, "key", "{% for m in messages %}" + template + "{% endfor %}")


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_tokenizers_that_put_a_blank_before_words_keep_the_boundary_of_the_prompt(scheme):
    """As of Llama 2, whose template has a blank on both sides of an answer: the assistant generates
    both.
    """
    turns = [TURNS[0], ["And of Italy?", "Rome."]]
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=letters, show_progress=False)
    backend.train_from_iterator([text for turn in turns for text in turn], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    question = "{{ bos_token }}[INST] {{ turn.content }} [/INST]"
    tokenizer.chat_template = showing(" {{ turn.content }} {{ eos_token }}", question)
    encoder = ChatEncoder(tokenizer)
    (document,) = encoder.documents(dialogue(turns))
    runs = counted(encoder, document)
    assert [text.strip() for _, text in runs] == [f"{answer} </s>" for _, answer in turns]
    assert document.tokens[: runs[0][0]] == encoder.prompt(dialogue(turns).messages[:1])


@pytest.mark.parametrize("cut", [False, True])
def test_an_answer_with_a_special_token_inside_is_skipped(cut):
    tokenizer = family_tokenizer("qwen2", ["Why is it so?"])
    tokenizer.add_tokens(["<think>"])
    encoder = ChatEncoder(tokenizer)
    for answer, suited in (("So <|im_start|> it is.", False), ("<think> So it is.", True)):
        turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": answer}]
        assert len(encode_dialogues(encoder, [Dialogue("x", turns, cut)])[0]) == suited
