"""A chat model with a draft head on 60 held-out prompts of four kinds, beside its rivals.

    python -m benchmarks.smollm2 TARGET HEAD OUT --data FOLDER [--selector FOLDER] [--estimate]

TARGET is the folder of SmolLM2-135M-Instruct, HEAD a head's export, and --selector a folder with an
export a rule. --data holds MT-bench, Alpaca and GSM8K (`FILES`), which are not published here. The
questions in `smollm2_prompts.jsonl` the model asked itself: `pipelines.stages.answers.SelfMade`
with seed 65, in shards of 32, and else the defaults of data=self. Of every kind the first questions
by SHA-256 are decoded; the next ones tune, by time in the loop and at each temperature, the head's
trees, n-grams and prompt lookup. --dialogues: the file that the head learned from, which may hold
none of the prompts.

All methods of a prompt are decoded side by side. OUT holds what was measured, so that a killed
command goes on with the prompt, or the method to tune, that it was at. The CPU time that the whole
table takes is printed first; --estimate stops there.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import chain
from pathlib import Path

from nde_talf.pipelines.commands.quiet import quiet  # isort: skip (before torch)

import torch

from benchmarks import decode
from benchmarks.timing import doubts, parser_of, report
from nde_talf.data.dialogues.read import read_dialogues
from nde_talf.data.dialogues.settings import DialogueConfig
from nde_talf.data.text.conversation import USER
from nde_talf.data.text.pair import load_models
from nde_talf.data.text.prompts import Prompt, encode_prompts, make_prompt
from nde_talf.data.text.templates import ChatTemplate, load_tokenizer
from nde_talf.decoding.common.bootstrap import shown
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json, write_json
from nde_talf.decoding.models.end_tokens import up_to_end
from nde_talf.decoding.sampling.rng import SamplingSetting
from nde_talf.draft_training.export.head_format import load_head
from nde_talf.draft_training.head_draft import HeadDraft
from nde_talf.evaluation.bench import Bench
from nde_talf.evaluation.benchmark import Record, Task, read_records, run_benchmark
from nde_talf.evaluation.loops import Speculative, generated
from nde_talf.evaluation.methods import GROUPS, plan_methods
from nde_talf.evaluation.plan import Plan
from nde_talf.evaluation.protocol import BASELINE, HEAD_TREE
from nde_talf.evaluation.speed import speed_ratio
from nde_talf.evaluation.table import by_setting, tabulate
from nde_talf.evaluation.tuning import Tuner
from nde_talf.selector.network import Selector
from nde_talf.selector.prices import LatencyTable
from nde_talf.selector.profiling import measure_latency

FILES = {
    "MT-bench": "mt_bench_question.jsonl",
    "Alpaca": "alpaca_question.jsonl",
    "GSM8K": "gsm8k_train.jsonl",
}
"""Files of questions by kind: rows with `question`, or with `turns`, of which the first counts."""
OWN = Path(__file__).with_name("smollm2_prompts.jsonl")
METHODS = "transformers", "selector", "ngram"
PRICED, SHORT = 256, 16
"""Tokens of context at which steps are priced, and of the text that times are estimated from."""


def digest(question: str) -> str:
    """Hash a question, by which it is chosen and published."""
    return sha256(question.encode()).hexdigest()


def first(file: Path, count: int) -> list[str]:
    """Return the first questions of a file by their hashes.

    Raises UserError if there are fewer.
    """
    rows = map(json.loads, file.read_text("utf-8").splitlines())
    asked = sorted({row.get("question") or row["turns"][0] for row in rows}, key=digest)
    if len(asked) < count:
        raise UserError(f"{file}: {count} questions are needed, and it holds {len(asked)}.")
    return asked[:count]


def trials(candidates: int, prompts: int) -> int:
    """Count the texts that a `Tuner` decodes.

    >>> trials(12, 24), trials(1, 24)
    (138, 0)
    """
    rounds, texts = min(prompts, (candidates - 1).bit_length()), 0
    for number in range(rounds):
        texts += candidates * len(range(number, prompts, rounds))
        candidates = -(-candidates // 2)
    return texts


class Table:
    """The measurements of a target with a head, kept in a folder."""

    def __init__(self, options: argparse.Namespace):
        self.options, target = options, options.target
        (self.target,) = load_models([target], "cpu", options.dtype)
        self.head = HeadDraft(load_head(options.head, self.target))
        exports = sorted(options.selector.iterdir()) if options.selector else []
        exports.sort(key=lambda each: each.name != "traversal")  # the first rule is the main one
        self.selectors = {each.name: Selector.from_pretrained(each) for each in exports}
        self.prompts, self.tuning = list[Prompt](), list[list[int]]()
        tokenizer = load_tokenizer(target)
        template = ChatTemplate(tokenizer, "TARGET")
        learned = set[str]()
        if options.dialogues:
            dialogues, _ = read_dialogues(DialogueConfig(source=str(options.dialogues)), 0)
            learned = {own["content"] for each in dialogues for own in each.messages}
        files = {kind: options.data / name for kind, name in FILES.items()} | {"self-made": OWN}
        for kind, file in files.items():
            prompts = []
            for question in first(file, options.prompts + options.tuning):
                if question in learned:
                    raise UserError(f"{options.dialogues} holds {question!r}.")
                turns = [{"role": USER, "content": question}]
                text = template.render(turns, add_generation_prompt=True)
                prompts.append(make_prompt(kind, text, True, digest(question)))
            prompts = encode_prompts(prompts, tokenizer, special=True)
            self.prompts += prompts[: options.prompts]
            self.tuning += [prompt.tokens for prompt in prompts[options.prompts :]]

    def file(self, name: str, temperature: float) -> Path:
        """Return the place of a measurement."""
        return self.options.out / f"{name}-{self.options.dtype}-{temperature:g}.json"

    def bench(self, temperature: float) -> Bench:
        """Make the parts of the methods; the head drafts for all."""
        rules = [*self.selectors] or ["traversal"]
        return Bench(
            target=self.target,
            draft=self.head,
            setting=SamplingSetting(temperature),
            tune=Tuner(self.file("tuned", temperature), self.options.new_tokens, self.tuning),
            ngrams=decode.TUNED,
            rules=rules,
            selectors={n: own for n, own in self.selectors.items() if temperature or n == rules[0]},
        )

    def minutes(self, temperature: float) -> float:
        """Estimate the CPU time of all texts by one of plain decoding."""
        bench, count = self.bench(temperature), len(self.prompts)
        grids = [len(method.grid) for name in METHODS for method in GROUPS[name](bench)]
        texts = sum(count + trials(size, len(self.tuning)) for size in (1, 1, *grids))
        texts += count * len(grids) * self.compares(temperature)
        plain = plan_methods(replace(bench, tune=Tuner(Path(), SHORT, [])), set()).methods[BASELINE]
        plain(Task(self.tuning[0]))
        began = time.process_time()
        plain(Task(self.tuning[0]))
        return texts * (time.process_time() - began) / 60 * self.options.new_tokens / SHORT

    def compares(self, temperature: float) -> bool:
        """Tell whether texts are compared with transformers' own."""
        return temperature == 0 and self.options.dtype == "float32"

    def measure(self, temperature: float) -> tuple[list[list], list[str]]:
        """Decode what is not there yet; return rows of the table, and notes."""
        bench, file = self.bench(temperature), self.file("records", temperature)
        plan = plan_methods(bench, {*METHODS})
        blocks = [(prompt.id, prompt.kind, prompt.tokens) for prompt in self.prompts]
        run_benchmark(plan.methods, blocks, bench.setting, file, seed=0)
        records = [*read_records(file)]
        rows, notes = decode.rows(records)
        notes += [*compared(plan, records), self.prices(bench), ended(records), *doubts(records)]
        if self.compares(temperature):
            notes.append(self.equal(plan))
        return rows, notes

    def prices(self, bench: Bench) -> str:
        """Tell what drafted levels and passes over trees take, measured once."""
        file, setting = self.file("prices", bench.setting.temperature), bench.setting
        if not file.exists():
            text = [*chain(*self.tuning)]
            asked = self.target, self.head, text, [PRICED], [bench.main], 3, [setting]
            measure_latency(*asked).save(file)
        table = LatencyTable.load(file)
        (plain,), (level, *_), (start,) = table.autoregressive, table.draft[0], table.first
        passes = ", ".join(f"{seconds / plain:.2f}" for seconds in table.target[0])
        return (
            f"{setting}, in steps of plain decoding ({1e3 * plain:.1f} ms): the first level of a"
            f" draft takes {start / plain:.3f}, a further one {level / plain:.3f}, the target's"
            f" pass over {', '.join(map(str, table.nodes))} nodes {passes}."
        )

    def equal(self, plan: Plan) -> str:
        """Count the texts of our methods that equal transformers' `generate`."""
        ours = {name: own for name, own in plan.methods.items() if isinstance(own, Speculative)}
        file = self.file("equal", 0)
        found = read_json(file, dict[str, dict[str, bool]]) if file.exists() else {}
        for prompt in self.prompts:
            if found.get(prompt.id, {}).keys() != ours.keys():
                most, tokens = self.options.new_tokens, prompt.tokens
                text = generated(self.target, tokens, SamplingSetting(0.0), most)[0].tolist()
                wanted = up_to_end(text[len(tokens) :], self.target.ends)
                streams = {name: own.blocks(tokens, 0) for name, own in ours.items()}
                found[prompt.id] = {
                    name: [*chain(*(block.tokens for block in stream))] == wanted
                    for name, stream in streams.items()
                }
                write_json(file, found)
        counts = {name: sum(found[prompt.id][name] for prompt in self.prompts) for name in ours}
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        return f"Texts equal to transformers', of {len(self.prompts)}: {listed}."


def ended(records: list[Record]) -> str:
    """Count in words plain decoding's texts that ended by themselves."""
    plain = [record.ended for record in records if record.method == BASELINE]
    return f"{sum(plain)} of {len(plain)} texts of plain decoding ended by themselves."


def compared(plan: Plan, records: list[Record]) -> Iterator[str]:
    """Compare all methods with the head's best static tree, and tell speed-ups by kind."""
    ((setting, methods),) = by_setting(records).items()
    tree = plan.titles.roles[HEAD_TREE].method
    ratios = {name: shown(speed_ratio(own, methods[tree])) for name, own in methods.items()}
    listed = (f"{name} {ratio}" for name, ratio in ratios.items() if name != tree)
    yield f"{setting}, over {tree}: {', '.join(listed)}."
    kinds, by_method = dict.fromkeys(one.kind for one in records), dict[str, list[str]]()
    for kind in kinds:
        for row in tabulate(one for one in records if one.kind == kind)[setting]:
            by_method.setdefault(row.method, []).append(f"{row.speedup[0]:.2f}")
    listed = (f"{name} {' / '.join(ratios)}" for name, ratios in by_method.items())
    if kinds:
        yield f"{setting}, over plain decoding, {' / '.join(kinds)}: {'; '.join(listed)}."


def main() -> None:
    """Read the command line, and measure."""
    parser = parser_of(__doc__)
    parser.add_argument("target")
    for name in ("head", "out", "--selector", "--dialogues", "--page"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--data", type=Path, required=True)
    counts = {"--prompts": 15, "--tuning": 3, "--new-tokens": 128, "--threads": 1}
    for name, count in counts.items():
        parser.add_argument(name, type=int, default=count)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--beside", nargs="+", default=[], help="lines for the page")
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    table = Table(options)
    minutes = sum(map(table.minutes, options.temperatures))
    print(f"all takes about {minutes:.0f} minutes of CPU time here; less where texts end")
    if options.estimate:
        return
    rows, notes = list[list](), list[str]()
    for temperature in options.temperatures:
        measured, said = table.measure(temperature)
        rows += measured
        notes += said
    kinds = {prompt.question: prompt.kind for prompt in table.prompts}
    name = f"smollm2_{options.dtype}"
    about = (
        f"{options.dtype}; {len(kinds)} prompts, up to {options.new_tokens} tokens, one pass; the"
        f" head drafts all trees. SHA-256 of the questions: {name}.json."
    )
    notes = [*filter(None, (about, *options.beside, *notes))]
    report(name, decode.COLUMNS, rows, notes, options.page, prompts=kinds)


if __name__ == "__main__":
    main()
