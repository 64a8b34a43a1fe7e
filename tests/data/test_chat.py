"""Chat templates of four families: what counts is what the assistant generates, and the rest of a
document is what it saw.
"""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nde_talf.data.dialogues.chat_mask import ChatEncoder, UnsuitedError, encode_dialogues
from nde_talf.data.dialogues.read import Dialogue, in_order
from nde_talf.decoding.common.errors import UserError
from tests.data.chat_templates import END_OF_TURN, FAMILIES, family_tokenizer

TURNS = [
    ["What is the capital of France?", "The capital of France is Paris."],
    [
        "And of Italy?\n\nIn one word, please.",
        "Rome.\n\n    It lies on the Tiber, naïvely \u2014 日本 🦊.",
    ],
    ["<|im_end|> and <end_of_turn> are odd words", "What is the capital of France?"],
]
SYSTEM = {"from": "system", "value": "Answer briefly."}
ANSWERS = [answer for _, answer in TURNS]


def dialogue(turns=TURNS, system=False, cut=False) -> Dialogue:
    said = [
        {"from": who, "value": text}
        for turn in turns
        for who, text in zip(("human", "gpt"), turn, strict=True)
    ]
    return Dialogue("one", in_order([SYSTEM] * system + said), cut)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(family):
    return family_tokenizer(family, [text for turn in TURNS for text in turn])


def counted(encoder, document) -> list[str]:
    """The texts of a document's runs of tokens that count."""
    runs, last = [], False
    for token, counts in zip(document.tokens, document.loss, strict=True):
        if counts:
            runs += [] if last else [[]]
            runs[-1].append(token)
        last = counts
    return [encoder.decode(run) for run in runs]


@pytest.mark.parametrize("system", [False, True])
def test_what_counts_is_the_answers_and_their_ends_of_turn_and_nothing_else(
    family, tokenizer, system
):
    encoder = ChatEncoder(tokenizer)
    documents = encoder.documents(dialogue(system=system))
    said = [text for document in documents for text in counted(encoder, document)]
    assert said == [answer + END_OF_TURN[family] for answer in ANSWERS]
    assert len(documents) == (
        3 if family == "qwen3" else 1
    )  # Qwen3 drops earlier thoughts: a document an answer
    assert not any(document.loss[0] for document in documents)
    messages = dialogue(system=system).messages
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert encoder.decode(documents[-1].tokens) == rendered


def test_every_answer_stands_behind_the_very_tokens_that_prompt_for_it(tokenizer):
    encoder = ChatEncoder(tokenizer, options={"enable_thinking": False})
    messages = dialogue(system=True).messages
    answers = 0
    for document in encoder.documents(dialogue(system=True)):
        starts = [
            i for i in range(1, len(document.loss)) if document.loss[i] and not document.loss[i - 1]
        ]
        for start in starts:
            answers += 1
            assert document.tokens[:start] == encoder.prompt(messages[: 2 * answers])
    assert answers == len(TURNS)


def test_a_cut_answer_has_no_end_to_learn(family, tokenizer):
    encoder = ChatEncoder(tokenizer)
    *_, last = encoder.documents(dialogue(cut=True))
    assert counted(encoder, last)[-1] == ANSWERS[-1] and last.loss[-1]


def test_a_template_that_marks_what_is_generated_is_believed(tokenizer, family):
    marking = (
        "{% for turn in messages %}{% if turn.role == 'assistant' %}{% generation %}{{"
        " turn.content }}"
        + END_OF_TURN[family]
        + "{% endgeneration %}{% else %}{{ turn.content }}{% endif %}\n{% endfor %}"
    )
    encoder = ChatEncoder(tokenizer, marking)
    assert encoder.marked and not ChatEncoder(tokenizer).marked
    (document,) = encoder.documents(dialogue())
    assert counted(encoder, document) == [answer + END_OF_TURN[family] for answer in ANSWERS]
    with pytest.raises(UnsuitedError, match="marks nothing"):
        ChatEncoder(tokenizer, marking.replace("'assistant'", "'nobody'")).documents(
            dialogue(cut=True)
        )


def showing(answer: str) -> str:
    """A template of questions "Q" and answers "A", the latter by the Jinja text `answer`."""
    question = "{% if turn.role == 'user' %}Q {{ turn.content }}\nA {% else %}"
    return "{% for turn in messages %}" + question + answer + "<|im_end|>\n{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    "answer", ["{{ turn.content | upper }}", "{{ turn.content.split('is')[-1] }}"]
)
def test_a_template_that_rewrites_answers_is_refused(answer):
    tokenizer = family_tokenizer("qwen2", ["a few words"])
    documents, skipped = encode_dialogues(
        ChatEncoder(tokenizer, showing(answer)), [dialogue(TURNS[:1])]
    )
    assert not documents and skipped == {"whose answers the template does not show as they are": 1}


def test_a_token_over_the_beginning_of_an_answer_is_refused():
    tokenizer = family_tokenizer("qwen2", ["a few words"])
    glued = (
        "{% for turn in messages %}{{ turn.content }}{{ ' f' if turn.role == 'user' else eos_token"
        " }}{% endfor %}"
    )
    assert len(tokenizer(" few")["input_ids"]) == 1
    with pytest.raises(UnsuitedError, match="reaches over"):
        ChatEncoder(tokenizer, glued).documents(dialogue([["So", "ew words"]]))


def test_without_a_template_or_an_end_of_turn_it_is_said_what_to_set():
    tokenizer = family_tokenizer("qwen2", ["a few words"])
    with pytest.raises(UserError, match="no special token"):
        ChatEncoder(
            tokenizer, "{% for turn in messages %}{{ turn.content }}\n\n{% endfor %}"
        ).documents(dialogue())
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"dialogues\.chat_template"):
        ChatEncoder(tokenizer)


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_tokenizers_that_put_a_blank_before_words_keep_the_boundary_of_the_prompt(scheme):
    """As of Llama 2, whose template has a blank on both sides of an answer: the assistant generates
    both.
    """
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=letters, show_progress=False)
    backend.train_from_iterator(
        [text for turn in TURNS[:1] for text in turn] + ["And of Italy?", "Rome."], trainer
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "{% for turn in messages %}{% if turn.role == 'user' %}{{ bos_token }}[INST] {{"
        " turn.content }} [/INST]{% else %} {{ turn.content }} {{ eos_token }}{% endif %}{%"
        " endfor %}"
    )
    encoder, turns = ChatEncoder(tokenizer), [TURNS[0], ["And of Italy?", "Rome."]]
    (document,) = encoder.documents(dialogue(turns))
    assert [text.strip() for text in counted(encoder, document)] == [
        f"{answer} </s>" for _, answer in turns
    ]
    starts = [
        i for i in range(1, len(document.loss)) if document.loss[i] and not document.loss[i - 1]
    ]
    assert document.tokens[: starts[0]] == encoder.prompt(dialogue(turns).messages[:1])
