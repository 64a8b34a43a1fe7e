"""What a pass over a tree takes: transformers' forward against the native one, by rows and by
tokens of context.

`python -m benchmarks.passes --run checkpoints/default` (ten minutes on a quiet machine).

The models are target and draft of a run, and a Llama with random weights whose eight query heads
share two heads of keys, for longer contexts. A pass runs a tree of so many rows (each row has two
children) after a text of so many tokens, from the call of the session to the hidden states. Three
ways are interleaved: transformers' forward, the native one with one mask over text and tree, and
the native one that attends to the text without a mask and merges
(`nde_talf.decoding.forward.attention`; its OPEN_FROM is the context from which on it does that).
Medians; the control is transformers' pass timed under two names.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.timing import interleaved, report
from nde_talf.data.text.pair import ROLES
from nde_talf.decoding.forward import attention
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.session import TreeSession

ROWS = (1, 4, 16, 64)
CONTEXTS = (128, 512, 1024, 2048)
LONG = (2048, 8192)
WAYS = {"transformers": None, "native, one mask": 1 << 30, "native, merged": 1}
"""By way, the OPEN_FROM that it runs with."""


def grouped(longest: int) -> LlamaForCausalLM:
    """A Llama of four layers with random weights and grouped query heads, for contexts up to
    `longest` tokens.
    """
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=512, num_hidden_layers=4, max_position_embeddings=longest, **sizes)
    )


def sessions(model: CausalModel, context: int, rows: int) -> dict[str, TreeSession]:
    """By way, a session that holds a text of `context` tokens and has room for so many rows after
    it.
    """
    theirs = CausalModel(model.module, model.name, "transformers")
    found = {}
    for way, merged in WAYS.items():
        own = theirs if merged is None else model
        session = found[way] = TreeSession(own.hidden, own.device, own.dtype, own.layers)
        session.reset(context + rows)
        session.append([7 * i % own.vocab_size for i in range(context)])
    return found


def pass_options(
    about: str | None, rows: Sequence[int], contexts: Sequence[int], repeats: int
) -> argparse.ArgumentParser:
    """The options of a benchmark of passes: a run, sizes of trees, lengths of text, repetitions."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--rows", type=int, nargs="+", default=rows)
    parser.add_argument("--contexts", type=int, nargs="+", default=contexts)
    parser.add_argument("--repeats", type=int, default=repeats)
    return parser


def binary_tree(rows: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree of so many rows, in which every row has two children."""
    return list(range(rows)), [(row - 1) // 2 if row else -1 for row in range(rows)]


def passing(session: TreeSession, way: str, rows: int) -> Callable[[], object]:
    """A pass over a tree of so many rows, which the session drops again."""
    tokens, parents = binary_tree(rows)

    def run() -> None:
        attention.OPEN_FROM = {session.device.type: WAYS[way] or 0}
        session.grow(tokens, parents)
        session.rollback()

    return run


@torch.inference_mode()
def main() -> None:
    parser = pass_options(__doc__, ROWS, CONTEXTS, 50)
    parser.add_argument(
        "--long",
        type=int,
        nargs="*",
        default=LONG,
        help="contexts of the Llama with random weights",
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(options.threads)
    models = [
        (role, CausalModel.load(options.run / "pair" / role, name=role), options.contexts)
        for role in ROLES
    ]
    if options.long:
        llama = CausalModel(grouped(max(options.long) + max(options.rows)), "grouped")
        models.append(("random Llama, 8 query heads, 2 of keys", llama, options.long))
    rows, controls, known = [], [], attention.OPEN_FROM
    try:
        for name, model, contexts in models:
            for context in contexts:
                held = sessions(model, context, max(options.rows))
                for count in options.rows:
                    tasks = {way: passing(session, way, count) for way, session in held.items()}
                    times = interleaved(tasks, options.repeats)
                    own = [times.seconds[way] for way in WAYS]
                    cpu = min(times.cpu[way] for way in list(WAYS)[1:])
                    faster = [own[0] / min(own[1:]), times.cpu["transformers"] / cpu]
                    rows.append(
                        [name, context, count, *(1e6 * seconds for seconds in own), *faster]
                    )
                    controls.append(times.note(f" ({name}, {context} tokens, {count} rows)"))
    finally:
        attention.OPEN_FROM = known
    columns = [
        "model",
        "tokens of context",
        "rows",
        *(f"{way}, µs" for way in WAYS),
        "times as fast",
        "by CPU time",
    ]
    arguments = (
        f"--rows {' '.join(map(str, options.rows))} --contexts"
        f" {' '.join(map(str, options.contexts))}"
    )
    arguments += (
        f" --long {' '.join(map(str, options.long))} --repeats {options.repeats} --threads"
        f" {options.threads}"
    )
    wrong = [line for line in controls if not line.endswith(".")]
    notes = [
        f"*Times as fast*: transformers over the faster native way. {len(controls) - len(wrong)} of"
        f" {len(controls)} A/A "
    ]
    notes[0] += "controls hold 1." + ("" if not wrong else " The others:")
    report("passes", f"python -m benchmarks.passes {arguments}", columns, rows, [*notes, *wrong])


if __name__ == "__main__":
    main()
