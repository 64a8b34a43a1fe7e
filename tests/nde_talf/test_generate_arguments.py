"""Every argument of transformers' generate(): with `speculate` the result is that of generate()
alone, or the call is refused in a sentence, and nothing else.

`generate_arguments.json` has to hold every logits processor, stopping criterion and setting of the
installed transformers. Prompts have 9 tokens, padding included; "$end" ends the last row first.
"""

import inspect
import json
from collections import Counter
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from string import ascii_letters

import pytest
import torch
import transformers.generation as hf
from tokenizers import Tokenizer, decoders, models
from transformers import DynamicCache, PreTrainedTokenizerFast
from transformers.generation import GenerationConfig, logits_process, stopping_criteria

from nde_talf import Beam, CausalModel, DySpec, NeuralPolicy, Selector, UserError, speculate
from nde_talf.draft_training.export.head_format import save_head
from tests.decoding.families import V
from tests.draft_training.heads import random_head
from tests.nde_talf.test_in_transformers import TREE, batch, noisy
from tests.selector.examples import TABLE, schema

TABLES = json.loads(Path(__file__).with_name("generate_arguments.json").read_text())
SOURCES = {"logits_processor": logits_process, "stopping_criteria": stopping_criteria}
MODEL, DRAFT = noisy("llama", 0.01)
START = 9
PLAIN = MODEL.generate(**batch(3, max_new_tokens=10, eos_token_id=None))[:, START:].tolist()
END, THIRD, LETTERS = PLAIN[2][4], PLAIN[0][2], ascii_letters[:V]
READER = Tokenizer(models.BPE({letter: token for token, letter in enumerate(LETTERS)}, []))
READER.decoder = decoders.Fuse()
READER = PreTrainedTokenizerFast(tokenizer_object=READER)


class Noting(hf.StoppingCriteria):
    """Notes the texts that it is asked about; `over` says which have ended."""

    def __init__(self, over, rows):
        self.over, self.asked, self.done = over, [], [False] * rows

    def __call__(self, input_ids, scores, **_):
        self.asked.append(input_ids.tolist())
        return self.over(self, input_ids)


class Named(Noting):
    eos_token_id = END  # a name by which generate() pads rows that ended


def rows_done(criterion, ids):
    """Remember which rows are done, of a batch of one size."""
    for row, text in enumerate(READER.batch_decode(ids[:, START:])):
        criterion.done[row] |= LETTERS[END] in text
    return torch.tensor(criterion.done)


OWN = {
    "notes": partial(Noting, lambda criterion, ids: torch.zeros(len(ids)) > 0),
    "rows done": partial(Noting, rows_done),
    "all done": partial(Noting, lambda criterion, ids: bool(rows_done(criterion, ids).all())),
    "budget": partial(
        Noting, lambda criterion, ids: torch.zeros(len(ids)) < len(criterion.asked) - 5
    ),
    "named": partial(Named, lambda criterion, ids: ids[:, -1] == END),
}
MORE = {"": {}, "no end": {"eos_token_id": None}}


class Words(list):
    """A streamer."""

    def put(self, value):
        self.append(value.tolist())

    def end(self):
        self.append("end")


class Own(hf.LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.index_fill(1, input_ids[:1, -1], -1e9)


def allowed(row, ids):
    return [token for token in range(1, V) if token % 3 != (len(ids) + row) % 3]


def real(value, rows):
    """The value with what its names stand for, made anew."""
    if isinstance(value, dict):
        return {name: real(each, rows) for name, each in value.items()}
    if isinstance(value, list):
        return [real(each, rows) for each in value]
    if not isinstance(value, str) or not value.startswith("$"):
        return value
    named = {
        "end": lambda: END,
        "first": lambda: PLAIN[0][0],
        "third": lambda: THIRD,
        "letter": lambda: LETTERS[END],
        "reader": lambda: READER,
        "model": lambda: MODEL,
        "draft": lambda: DRAFT,
        "allowed": lambda: allowed,
        "words": Words,
        "own": Own,
        "compile": hf.CompileConfig,
        "watermark": hf.WatermarkingConfig,
        "confidence": lambda: hf.ConfidenceCriteria(0.2),
        "configuration": lambda: GenerationConfig(eos_token_id=END, max_new_tokens=7),
        "timestamps": lambda: GenerationConfig(
            no_timestamps_token_id=40, eos_token_id=0, bos_token_id=0
        ),
        "encoder": lambda: torch.tensor([[3, 4]]),
        "cache": lambda: DynamicCache(config=MODEL.config),
        "ids": lambda: batch(rows)["input_ids"],
        "positions": lambda: torch.arange(START).expand(rows, -1),
        "embeddings": lambda: torch.ones(rows, START, 32),
    }
    return named[value[1:]]()


def asked(rows, table, name, at):
    """The arguments of a case."""
    if table == "own":
        more = {"stopping_criteria": [OWN[name](rows)]} | real(MORE[at], rows)
    elif table == "several":
        more = real(TABLES[table][name], rows)
    elif table == "settings":
        more = {name: real(TABLES[table][name][at], rows)}
    else:
        more = {table: [getattr(SOURCES[table], name)(*real(TABLES[table][name][at], rows))]}
    given = batch(rows, max_new_tokens=10) | more
    if "max_length" in given or "generation_config" in given:
        del given["max_new_tokens"]
    return given


def there(table, name):
    """Whether this version of transformers has it."""
    return hasattr(SOURCES.get(table, GenerationConfig()), name)


LISTED = [(table, name) for table in (*SOURCES, "settings") for name in TABLES[table]]
CASES = [(*one, at) for one in LISTED if there(*one) for at in range(len(TABLES[one[0]][one[1]]))]
CASES += [("several", name, 0) for name in TABLES["several"]]
CASES += [("own", name, more) for name in OWN for more in MORE]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    head = save_head(random_head(CausalModel(MODEL)), tmp_path_factory.mktemp("head"))
    return {
        "path": speculate(DRAFT),
        "tree": speculate(DRAFT, TREE),
        "beam": speculate(DRAFT, Beam(k=3, depth=3, nodes=8)),
        "selector": speculate(DRAFT, NeuralPolicy(Selector(schema(32, 32)).eval(), TABLE)),
        "head": speculate(head, DySpec(nodes=6)),
        "ngram": speculate("ngram"),
    }


def left(given, result):
    """What a call leaves: the text, and what its criteria and its streamer saw."""
    text = result if isinstance(result, torch.Tensor) else result.sequences
    criteria = given.get("stopping_criteria", ())
    seen = [each.asked for each in criteria if isinstance(each, Noting)]
    return type(result), text.tolist(), seen, given.get("streamer")


@cache
def plain(rows, *case):
    """What generate() alone leaves, or the error that it raises."""
    given = asked(rows, *case)
    try:
        return left(given, MODEL.generate(**given))
    except Exception as error:
        return error


def outcome(draft, rows, case):
    """equal or refused; "no call" where generate() raises an error.

    Raises AssertionError for anything else.
    """
    theirs, given = plain(rows, *case), asked(rows, *case)
    try:
        ours = left(given, MODEL.generate(**given, custom_generate=draft))
    except UserError as error:
        assert str(error).startswith("speculate: ") and str(error).endswith("."), error
        return "refused"
    except Exception as error:
        # transformers loses the tokenizer of stop_strings on its way to a callable, and says so.
        lost = "could not locate a tokenizer" in str(error)
        assert lost or isinstance(error, type(theirs)), (case, theirs, error)
        return "no call"
    assert not isinstance(theirs, Exception), f"generate() alone raises {theirs!r}"
    assert ours == theirs, (case, ours, theirs)
    return "equal"


def test_the_tables_hold_all_that_transformers_has():
    """A new class or setting gets a row that says what `speculate` does with it."""
    for table, of in SOURCES.items():
        base = of.LogitsProcessor if table == "logits_processor" else of.StoppingCriteria
        kinds = inspect.getmembers(of, inspect.isclass)
        assert {name for name, kind in kinds if issubclass(kind, base)} <= {*TABLES[table]}
    assert {*vars(GenerationConfig())} <= {*TABLES["settings"]}
    own = {*inspect.signature(MODEL.generate).parameters} - {"kwargs", "custom_generate", *SOURCES}
    assert own <= {*TABLES["several"]}


@pytest.mark.slow
def test_arguments_in_a_padded_batch_give_generates_result_or_a_sentence(drafts):
    """Every case but the settings, with each draft in turn."""
    short = [case for case in CASES if case[0] != "settings"]
    outcomes = Counter(
        outcome(draft, 3, case) for draft, case in zip(cycle(drafts.values()), short)
    )
    assert outcomes["equal"] >= len(short) - 27 and outcomes["refused"] > 15  # 53 of 80


@pytest.mark.long
@pytest.mark.parametrize("draft", ["path", "tree", "beam", "selector", "head", "ngram"])
def test_arguments_with_every_draft_give_generates_result_or_a_sentence(drafts, draft):
    outcomes = Counter(outcome(drafts[draft], rows, case) for case in CASES for rows in (1, 3))
    print(draft, dict(outcomes))
    assert outcomes["equal"] > 200 and outcomes["refused"] > 40
