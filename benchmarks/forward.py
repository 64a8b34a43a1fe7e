"""Forward passes over trees, and products with few rows.

`python -m benchmarks.forward [passes|products|branches ...] [--run checkpoints/default]`, on one
thread; passes after stage pair.

- passes: a pass over a tree whose rows have two children each, after a text, from the session's
  call to the hidden states. Interleaved: transformers' forward, the native one with one mask over
  text and tree, and the native one that attends to the text without a mask and merges
  (`nde_talf.decoding.forward.attention`; OPEN_FROM is the context from which on it does that).
- products: a few rows times a large matrix in float32, by MKL and by oneDNN, in CPU time.
- branches: the target's part of a step (pass, commit, replay of what was accepted) for models whose
  trees are scored branch by branch, against plain decoding, in CPU time. Drafts cost nothing here.

The models are the run's, a Llama with random weights and grouped query heads for long texts, and
tiny ones of several families.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.timing import interleaved, report
from nde_talf.data.text.pair import ROLES
from nde_talf.decoding.forward import attention, product
from nde_talf.decoding.loading import architecture
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.session import TreeSession
from tests.decoding.test_causal_registry import SMALL, tiny

ROWS, CONTEXTS, LONG = (1, 4, 16, 64), (128, 512, 1024, 2048), (2048, 8192)
WAYS = {"transformers": 0, "native, one mask": 1 << 30, "native, merged": 1}
"""By way, the OPEN_FROM that it runs with."""
SHAPES = ((896, 1152), (896, 9728), (2048, 2048), (4096, 4096))
PRODUCT_ROWS = (1, 2, 4, 8, 16, 33)
HYBRIDS = ("llama", "lfm2", "qwen3_5_text", "falcon_h1", "mamba2", "mamba", "bloom", "mpt")
TREES = ((1, 0, 4), (2, 2, 2), (4, 0, 4))


def grouped(longest: int) -> CausalModel:
    """A Llama of four layers with random weights, whose eight query heads share two of keys."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=512, max_position_embeddings=longest, **sizes, **heads)
    return CausalModel(LlamaForCausalLM(config), "random Llama, 8 query heads, 2 of keys")


def hybrids() -> list[CausalModel]:
    """Tiny models of families with a state, ALiBi or neither, then a wide hybrid of four layers."""
    SMALL["sizes"]["max_position_embeddings"] = 1024
    configs = [tiny(name) for name in HYBRIDS]
    wide = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4}
    configs.append(AutoConfig.for_model("qwen3_5_text", vocab_size=32000, **wide))
    models = []
    for config in configs:
        torch.manual_seed(0)
        auto, attention = architecture(config)
        name = f"{config.model_type}, {config.hidden_size} x {config.num_hidden_layers}"
        models.append(CausalModel(auto.from_config(config, attn_implementation=attention), name))
    return models


def session_after(model: CausalModel, context: int, room: int) -> TreeSession:
    """A session that holds `context` tokens, and has room for so many rows after them."""
    session = model.session()
    session.reset(context + room)
    session.append([7 * i % model.vocab_size for i in range(context)])
    return session


def tree_pass(session: TreeSession, rows: int, open_from: int) -> Callable[[], Tensor]:
    """A pass over a binary tree of so many rows, which the session drops again."""
    tokens, parents = list(range(rows)), [(row - 1) // 2 if row else -1 for row in range(rows)]

    def run() -> Tensor:
        attention.OPEN_FROM = {session.device.type: open_from}
        hidden = session.grow(tokens, parents)
        session.rollback()
        return hidden

    return run


def passes(options: argparse.Namespace) -> None:
    models = [CausalModel.load(options.run / "pair" / role, name=role) for role in ROLES]
    cases = [(model, context) for model in models for context in options.contexts]
    if options.long:
        llama = grouped(max(options.long) + max(options.rows))
        cases += [(llama, context) for context in options.long]
    table, notes, known = [], [], attention.OPEN_FROM
    for model, context in cases:
        theirs = CausalModel(model.module, model.name, "transformers")
        room = max(options.rows)
        sessions = {
            way: session_after(theirs if way == "transformers" else model, context, room)
            for way in WAYS
        }
        for rows in options.rows:
            tasks = {way: tree_pass(sessions[way], rows, WAYS[way]) for way in WAYS}
            times = interleaved(tasks, options.repeats)
            faster = [
                clock["transformers"] / min(clock[way] for way in list(WAYS)[1:])
                for clock in (times.seconds, times.cpu)
            ]
            micros = [1e6 * times.seconds[way] for way in WAYS]
            table.append([model.name, context, rows, *micros, *faster])
            notes.append(times.note(f" ({model.name}, {context} tokens, {rows} rows)"))
    attention.OPEN_FROM = known
    columns = ["model", "tokens of context", "rows", *(f"{way}, µs" for way in WAYS)]
    report("passes", [*columns, "times as fast", "by CPU time"], table, notes)


def products(options: argparse.Namespace) -> None:
    if not product.has_onednn():
        raise SystemExit("products: this torch has no oneDNN.")
    kinds = {f"{width} x {height}": partial(_products, width, height) for width, height in SHAPES}
    table, notes = [], []
    for name, tasks in kinds.items():
        one = 0.0
        for rows in PRODUCT_ROWS:
            times = interleaved(tasks(rows), options.repeats)
            mkl, onednn = (1e3 * times.cpu[way] for way in ("MKL", "oneDNN"))
            one = one or mkl
            table.append([name, rows, mkl, onednn, onednn / mkl, mkl / one, onednn / one])
        notes.append(times.note(f" ({name}, {rows} rows)"))
    columns = ["product", "rows", "MKL, ms", "oneDNN, ms", "oneDNN over MKL"]
    columns += ["MKL, of one row", "oneDNN, of one row by MKL"]
    report("products", columns, table, notes)


def _products(width: int, height: int, rows: int) -> dict[str, Callable[[], Tensor]]:
    weight, states = torch.randn(height, width), torch.randn(rows, width)
    onednn = torch.ops.mkldnn._linear_pointwise
    return {
        "MKL": lambda: F.linear(states, weight),
        "oneDNN": lambda: onednn(states, weight, None, "none", [], ""),
    }


def branches(options: argparse.Namespace) -> None:
    table, notes = [], []
    for model in hybrids():
        tasks = {"plain": step(model, (1, 0, 0), 0)}
        tasks |= {f"{tree}, {n} accepted": step(model, tree, n) for tree in TREES for n in (4, 2)}
        times = interleaved(tasks, options.repeats)
        plain, *steps = times.cpu.values()
        gains = [
            (1 + n) * plain / took for took, n in zip(steps, (4, 2) * len(TREES), strict=False)
        ]
        more = (steps[-2] - steps[0]) / 3
        table.append([model.name, model.form, 1e3 * plain, *gains, 1e3 * more, more / plain])
        notes.append(times.note(f" ({model.name})"))
    columns = ["model", "form", "plain step, ms", *list(tasks)[1:], "a branch of 4 more, ms"]
    report("branches", [*columns, "in plain steps"], table, notes)


def step(model: CausalModel, tree: tuple[int, int, int], accepted: int) -> Callable[[], None]:
    """The target's part of a step with a delayed tree (K, L1, L2); the text grows with each."""
    (k, l1, l2), session = tree, session_after(model, 64, 0)
    parents = list(range(-1, l1))
    for _ in range(k if l2 else 0):
        parents += [l1, *range(len(parents), len(parents) + l2 - 1)]
    tokens = [row % model.vocab_size for row in range(len(parents))]

    def run() -> None:
        model.logits(session.grow(tokens, parents))
        session.commit(list(range(1 + accepted)))

    return run


PARTS = {"passes": passes, "products": products, "branches": branches}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--long", type=int, nargs="*", default=LONG, help="of the random Llama")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    for part in options.parts:
        PARTS[part](options)


if __name__ == "__main__":
    main()
