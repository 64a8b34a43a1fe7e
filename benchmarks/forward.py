"""Forward passes with few rows.

`python -m benchmarks.forward [rows|far|level|branches ...]`, on one thread or
`--threads`:

- rows: a pass of 1 to 32 rows with all logits, of a model in `--model`, or of one of random weights
  with the configuration in `--shape` or as wide as Qwen2.5-0.5B; by transformers and by the native
  pass with each way to multiply, beside the time in which memory of the weights' size is read.
- far: such a pass through four layers, without logits, after long texts.
- level: what a drafted level costs beside its pass, a row of 152,064 logits warped and drawn from.
- branches: the target's part of a step (pass, commit, replay of what was accepted) for models whose
  trees are scored branch by branch, against plain decoding, in CPU time. Drafts cost nothing here.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryDirectory

from nde_talf.pipelines.commands.quiet import quiet  # isort: skip (before torch)

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from benchmarks.timing import interleaved, report
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.forward.cpu_products import MANY, ROWS, fastest
from nde_talf.decoding.models.forward.onednn import has_onednn
from nde_talf.decoding.models.loading import architecture
from nde_talf.decoding.models.tree_session import TreeSession
from nde_talf.decoding.sampling.rng import Rng, SamplingSetting, warp
from nde_talf.evaluation.protocol import trusted
from tests.decoding.test_causal_registry import SMALL, tiny

FAR = (128, 4096, 16384)
WIDE = {
    "vocab_size": 152064,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
"""The sizes of Qwen2.5-0.5B, which has 24 layers."""
SETTINGS = (
    SamplingSetting(1.0),
    SamplingSetting(0.6),
    SamplingSetting(1.0, top_p=0.95),
    SamplingSetting(0.6, top_k=50),
)
HYBRIDS = ("llama", "lfm2", "qwen3_5_text", "falcon_h1", "mamba2", "mamba", "bloom", "mpt")
TREES = ((1, 0, 4), (2, 2, 2), (4, 0, 4))


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


def written(options: argparse.Namespace, folder: Path, layers: int, dtype: str) -> Path:
    """Write a model of the asked or of WIDE sizes with random weights, unless it is there."""
    where = folder / f"{Path(options.shape or 'wide').name}-{layers}-{dtype}"
    if not where.exists():
        torch.manual_seed(0)
        config = (
            AutoConfig.from_pretrained(options.shape)
            if options.shape
            else Qwen2Config(num_hidden_layers=layers, **WIDE)
        )
        module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        module.save_pretrained(where)
    return where


def loaded(where: Path | str, dtype: str, ways: Sequence[str]) -> dict[str, CausalModel]:
    """The model in each way to run it."""
    models = {}
    for way in ways:
        forward, products = ("transformers", "auto") if way == "transformers" else ("native", way)
        models[way] = CausalModel.load(where, dtype=dtype, forward=forward, products=products)
    return models


def reading(model: CausalModel) -> Callable[[], Tensor]:
    """Read memory of the size of the model's matrices once."""
    matrices = {id(each): each.nbytes for each in model.module.parameters() if each.dim() == 2}
    much = torch.ones(sum(matrices.values()) // 4)
    return much.sum


def chain(
    model: CausalModel, session: TreeSession, count: int, logits: bool
) -> Callable[[], Tensor]:
    """A pass over a path of so many rows."""

    def run() -> Tensor:
        hidden = session.grow(list(range(count)), list(range(-1, count - 1)))
        session.commit([])
        return model.logits(hidden) if logits else hidden

    return run


def by_rows(
    name: str, models: dict[str, CausalModel], contexts: Sequence[int], logits: bool, repeats: int
) -> tuple[list[list], list[str]]:
    """Rows of a table and its notes: passes by context and number of rows."""
    table, notes, read = [], [], reading(models["plain"])
    chosen = fastest(models["plain"].module, packs=True)
    several = chosen.removesuffix(MANY)
    for context in contexts:
        one = 0.0
        sessions = {way: session_after(model, context, 32) for way, model in models.items()}
        for rows in ROWS:
            tasks = {
                way: chain(model, sessions[way], rows, logits) for way, model in models.items()
            }
            times = interleaved({**tasks, "reading": read}, repeats)
            took = times.seconds["plain" if rows == 1 and several != chosen else several]
            one = one or took
            ratios = [took / times.seconds[k] for k in ("plain", "reading")] + [took / one]
            table.append([name, context, rows, *(1e3 * t for t in times.seconds.values()), *ratios])
            doubtful = not all(map(trusted, times.control.values()))
            if doubtful or rows == 1:
                notes.append(times.note(f" ({name}, {context} tokens, {rows} rows)"))
    return table, [*notes, f"{name}: chosen is {chosen}."]


def passes_by_rows(options: argparse.Namespace, logits: bool = True) -> None:
    table: list[list] = []
    notes: list[str] = []
    ways = ["plain", *(["onednn", "packed"] if has_onednn() else [])]
    ways = ["transformers", *ways] if logits else ways
    with TemporaryDirectory() as folder:
        for dtype in options.dtypes:
            place = Path(folder) if options.cache is None else options.cache
            where = options.model or written(options, place, 24 if logits else 4, dtype)
            contexts = (128,) if logits else options.far
            more, said = by_rows(
                dtype, loaded(where, dtype, ways), contexts, logits, options.repeats
            )
            table += more
            notes += said
    notes.append(f"Peak resident memory {getrusage(RUSAGE_SELF).ru_maxrss >> 10} MiB, all models.")
    columns = ["type", "tokens of context", "rows", *(f"{way}, ms" for way in (*ways, "reading"))]
    ratios = ["chosen over plain", "over reading", "over its one row"]
    report("rows" if logits else "far", [*columns, *ratios], table, notes)


def level(options: argparse.Namespace) -> None:
    """Time the warp of a drafted row and a draw of four children."""
    size = WIDE["vocab_size"]
    logits, rng, table, notes = 3 * torch.randn(1, size), Rng.seeded(0), [], []
    for setting in SETTINGS:
        q = warp(logits, setting)
        tasks: dict[str, Callable[[], object]] = {
            "warp": partial(warp, logits, setting),
            "draw": partial(rng.categorical, q, [0] * 4),
        }
        times = interleaved(tasks, options.repeats)
        table.append([str(setting), *(1e3 * each for each in times.seconds.values())])
        notes.append(times.note(f" ({setting})"))
    report("level", ["setting", "warp, ms", "draw of 4, ms"], table, notes)


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


PARTS = {
    "rows": passes_by_rows,
    "far": partial(passes_by_rows, logits=False),
    "level": level,
    "branches": branches,
}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", help="folder or hub name")
    parser.add_argument("--shape", help="folder or hub name of a configuration")
    parser.add_argument("--cache", type=Path, help="folder that keeps the models of random weights")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--far", type=int, nargs="+", default=FAR, help="contexts of `far`")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(options.threads)
    for part in options.parts:
        PARTS[part](options)


if __name__ == "__main__":
    main()
