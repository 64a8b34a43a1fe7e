"""Read one's own data, and fit the configuration to it.

Columns become templates, counts and splits follow its size, and three rows are shown. Imports no
torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.panel import Panel
from rich.text import Text

from nde_talf.data.text.conversation import DIALOGUES, UnsuitedError, and_skipped, question, shown
from nde_talf.data.text.corpus import load_table
from nde_talf.data.text.row_template import RowTemplate
from nde_talf.data.text.settings import ANSWERS, PromptSet
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console
from nde_talf.pipelines.config.schema import Config

FEWEST = 8
"""Prompts of the smallest file: the selector's folds, a prompt to tune on, three to decode."""
QUESTIONS = ("prompt", "question", "instruction", "problem", "query", "input", "text", "content")
"""Columns that may hold a prompt."""


def fit_prompts(config: Config, own: Mapping[str, PromptSet]) -> Config:
    """Recognise the columns of own prompts, and fit the counts to them.

    Counts of prompts, with the splits, are lowered to what is there. It is printed what the prompts
    are used for, and what text is learnt from.
    """
    fitted, counts = {}, []
    for name, entry in own.items():
        fitted[name], count = _recognise_prompts(entry, f"data.sets.{name}.template")
        counts.append(count)
    sets = config.data.sets | fitted
    available = min(config.data.prompt_count, min(counts) * len(sets))
    data = replace(config.data, sets=sets, prompt_count=available)
    traces, evaluation, selector = config.traces, config.evaluation, config.selector
    left = data.prompt_count - data.test_prompts
    if left < 2:
        raise UserError(
            f"data.test_fraction={data.test_fraction}: of {data.prompt_count} prompts it leaves"
            f" {left} to learn from and to choose by. Lower it."
        )
    if traces.train_prompts + traces.validation_prompts > left:
        validation = max(1, left // 3)
        traces = replace(traces, validation_prompts=validation, train_prompts=left - validation)
    if evaluation.most_prompts > data.test_prompts:
        evaluation = replace(evaluation, prompts=data.test_prompts)
    tuning = min(evaluation.calibration_prompts, traces.validation_prompts)
    evaluation = replace(evaluation, calibration_prompts=tuning)
    selector = replace(selector, folds=max(2, min(selector.folds, traces.train_prompts)))
    console.print(
        f"{data.prompt_count} prompts (data.prompt_count): {traces.train_prompts} train the"
        f" selector, {traces.validation_prompts} end its training, {evaluation.most_prompts} of"
        f" {data.test_prompts} held out are decoded (evaluation.prompts)."
    )
    if data.source == ANSWERS:
        console.print(
            "Drafts learn from your prompts with the target's answers, but for those held out; no"
            " built-in text."
        )
    return replace(config, data=data, traces=traces, evaluation=evaluation, selector=selector)


def _recognise_prompts(entry: PromptSet, key: str) -> tuple[PromptSet, int]:
    """Find the template of a set's prompts, if none is given, and count them."""
    source = str(entry.source)
    rows = load_table(source, entry.split)
    template = entry.template or question_template(rows.column_names, source, key)
    rendered = RowTemplate(template, source, key)
    rendered.check(rows.column_names)
    asked: dict[str, None] = {}
    skipped: Counter[str] = Counter()
    for row in rows:
        try:
            asked[shown(question(row, rendered))] = None
        except UnsuitedError as error:
            skipped[str(error)] += 1
    texts = [*asked]
    found = f"{source}: {len(texts)} prompts by {template!r}, of {len(rows)} rows"
    show(found + and_skipped(skipped), texts[:3])
    if len(texts) < FEWEST:
        raise UserError(
            f"{source}: it has {len(texts)} different prompts; the least is {FEWEST}, to train on"
            " some and to decode others. 60 are enough for a first run."
        )
    return replace(entry, template=template), len(texts)


def question_template(columns: list[str], source: str, key: str) -> str:
    """Return the template of a prompt over `columns`.

    Raises:
        UserError: none of the columns has a prompt's name, or several have.
    """
    named = [name for name in QUESTIONS if name in columns]
    chosen = named or [name for name in DIALOGUES if name in columns][:1]
    if len(chosen) == 1:
        return f"{{{chosen[0]}}}"
    raise UserError(
        f"{source}: which column is the prompt? It has {', '.join(chosen or columns)}. Name it with"
        f" \"{key}='{{COLUMN}}'\"."
    )


def show(title: str, texts: Sequence[str]) -> None:
    """Print the first texts in a frame."""
    console.print(title)
    framed("the first", Text("\n─\n".join(map(shortened, texts))))


def framed(title: str, text: Text) -> None:
    """Print a text in a frame."""
    console.print(Panel(text, title=Text(title), title_align="left"))


def shortened(text: str) -> str:
    """The text; of one with more than 600 characters the middle is left out."""
    if len(text) <= 600:
        return text
    return f"{text[:300]}\n[... {len(text) - 600} characters ...]\n{text[-300:]}"
