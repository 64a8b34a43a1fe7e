"""Parts of at most eight minutes on a GPU: `python -m benchmarks.gpu --part pair`, then the others.

It needs torch, transformers and safetensors alone, no hub and no data set: the text is the Python
standard library's. Each part prints a table, and writes it to benchmarks/results/gpu_PART.md and
.json (--results: another folder).

- pair: trains a target of some 100 M parameters and distils a two-layer draft from it. `--minutes`
  cuts the training; started again, it goes on where it stopped.
- traces: the target's texts, super-trees and labels; roots/s, and how much of that time kernels
  run.
- decode: plain decoding, an A/A control, trees with and without static shapes (CUDA graphs).
  tokens/s, the time of a step outside kernels and how often the host waits for the device, by
  torch's profiler; peak memory.
- heads: steps/s and peak memory of a draft head's training with the losses of TALF, HASS and EAGLE.
- attention: one layer's attention of a tree's rows, under one mask over text and tree and in two
  parts, by context and rows. The context from which on two parts are faster is `OPEN` of
  `nde_talf.decoding.models.forward.attention`. It needs no pair.

`--size small --device cpu` rehearses all of it on a CPU in a minute. There a kernel is an operator
of torch, nothing waits and no memory is counted.
"""

import argparse
import math
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from benchmarks import timing
from benchmarks.timing import doubts, report
from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.text.tokenizer import pack, train_tokenizer
from nde_talf.data.traces.settings import TracesConfig
from nde_talf.data.traces.trace import trace_trajectories
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.bootstrap import shown
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import write_atomically
from nde_talf.decoding.common.micro_batch import MicroBatch
from nde_talf.decoding.drafters.lm import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.decoding.models.forward import attention as attended
from nde_talf.decoding.models.static_shapes import MARGIN, StaticShapes
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling.rng import Rng, SamplingSetting
from nde_talf.draft_training.model.head import EagleHead
from nde_talf.draft_training.model.tree_attention import tree_features
from nde_talf.draft_training.targets.target_trees import chains, target_beam, target_features
from nde_talf.draft_training.training.losses import HeadReadout, tree_loss
from nde_talf.draft_training.training_settings import EagleLoss, HassLoss, TalfLoss
from nde_talf.evaluation.benchmark import read_records, run_benchmark
from nde_talf.evaluation.loops import Speculative
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.table import by_setting, row

SETTING = SamplingSetting(0.6)
TREES = (
    ("traversal", Action(1, 0, 7)),
    ("specinfer", Action(3, 0, 5)),
    ("specinfer", Action(3, 2, 4)),
)
ROWS = max(tree.nodes for _, tree in TREES)
"""Rows of static shapes. No more, since every size of a pass is compiled."""
LENGTH, SAVE_SECONDS = 256, 60.0
PROFILED_TOKENS = 16
"""Tokens of a generation under the profiler."""


@dataclass(frozen=True)
class Size:
    """Sizes of the pair, and how much of everything is run.

    Models are (hidden, layers, heads, intermediate).
    """

    vocab: int
    target: tuple[int, int, int, int]
    draft: tuple[int, int, int, int]
    files: int
    batch: int
    steps: int
    prompts: int
    new_tokens: int
    samples: int
    head_steps: int


SIZES = {
    "full": Size(8192, (768, 12, 12, 2048), (384, 2, 6, 1024), 2000, 64, 1200, 12, 128, 4, 20),
    "small": Size(512, (64, 2, 2, 128), (32, 1, 2, 64), 20, 4, 4, 2, 12, 2, 2),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/gpu"), help="of the pair")
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder of the tables")
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="of training, after which part pair stops"
    )
    options = parser.parse_args(arguments)
    if options.device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "--device cuda: torch sees no GPU here. --device cpu --size small rehearses on the CPU."
        )
    timing.RESULTS = options.results
    try:
        PARTS[options.part](options, SIZES[options.size])
    except UserError as error:
        raise SystemExit(str(error)) from error


def pair(options: argparse.Namespace, size: Size) -> None:
    until = time.monotonic() + 60 * options.minutes
    options.folder.mkdir(parents=True, exist_ok=True)
    for records in options.folder.glob("*.jsonl"):  # of another pair
        records.unlink()
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))[: size.files]
    texts = [
        path.read_text(encoding="utf-8", errors="replace")
        for path in files
        if "site-packages" not in path.parts
    ]
    tokenizer = train_tokenizer(texts[:: max(1, len(texts) // 200)], size.vocab)
    rows = pack(tokenizer, texts, LENGTH)
    held_out, rows = rows[::50], rows[torch.arange(len(rows)) % 50 > 0].to(options.device)
    torch.save(held_out, options.folder / "held_out.pt")
    table = []
    teacher: nn.Module | None = None
    for role in ("target", "draft"):
        model, seconds = _train(options.folder / role, size, role, teacher, rows, until)
        teacher = model
        with torch.inference_mode():
            batches = held_out[: 4 * size.batch].to(options.device).split(size.batch)
            nats = [float(_loss(model, batch)) for batch in batches]
        count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        speed = size.steps * size.batch * LENGTH / seconds
        table.append([role, count, size.steps, seconds, speed, sum(nats) / len(nats)])
    columns = ["model", "M parameters", "steps", "s", "tokens/s", "held-out nats a token"]
    report("gpu_pair", columns, table, [_machine(options.device)])


def _train(
    folder: Path, size: Size, role: str, teacher: nn.Module | None, rows: Tensor, until: float
) -> tuple[nn.Module, float]:
    """Train the model of `folder`, and say in how many seconds; at `until` exit, to be resumed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, head_count, intermediate = getattr(size, role)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocab,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=head_count,
            intermediate_size=intermediate,
            max_position_embeddings=2048,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).to(rows.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    step, before, state = 0, 0.0, folder / "training.pt"
    folder.mkdir(exist_ok=True)
    if state.exists():
        kept = torch.load(state, map_location=rows.device, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step, before = kept["step"], kept["seconds"]
    started = saved = time.monotonic()
    while True:
        now, finished = time.monotonic(), step == size.steps
        if finished or now >= until or now - saved > SAVE_SECONDS:
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            content |= {"step": step, "seconds": before + now - started}
            write_atomically(state, partial(torch.save, content))
            saved = now
        if finished:
            break
        if now >= until:
            raise SystemExit(
                f"{folder.name}: {step} of {size.steps} steps, and the time is over. Start the part"
                " again to go on."
            )
        rate = 6e-4 * min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / size.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        generator = torch.Generator().manual_seed(step)
        index = torch.randint(len(rows), (size.batch,), generator=generator).to(rows.device)
        with torch.autocast(rows.device.type, torch.bfloat16):
            loss = _loss(model, rows[index], teacher)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    model.save_pretrained(folder)
    return model.eval(), before + now - started


def _loss(model: nn.Module, tokens: Tensor, teacher: nn.Module | None = None) -> Tensor:
    """Nats a token: of the text, or of the teacher's distributions."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
    if teacher is None:
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    with torch.no_grad():
        p = teacher(input_ids=tokens[:, :-1], use_cache=False).logits.float().softmax(-1)
    return F.cross_entropy(logits.flatten(0, 1), p.flatten(0, 1))


def traces(options: argparse.Namespace, size: Size) -> None:
    target, draft = _load(options)
    starts = _prompts(options, size)
    started = time.perf_counter()
    texts = TransformersEngine(target).sample(starts, SETTING, size.new_tokens, 0)
    _wait(options.device)
    sampling = time.perf_counter() - started
    config = TracesConfig(
        new_tokens=size.new_tokens, samples=size.samples, verifiers=["specinfer", "traversal"]
    )
    prompts = [Prompt(str(i), "code", "", tokens) for i, tokens in enumerate(starts)]

    def trace(some: slice) -> int:
        columns = trace_trajectories(
            target, draft, prompts[some], texts[some], SETTING, config, MicroBatch(256), 0
        )
        return len(columns["prompt_id"])

    trace(slice(1))  # warm-up
    started = time.perf_counter()
    roots = trace(slice(None))
    _wait(options.device)
    seconds = time.perf_counter() - started
    with _profiled(options.device) as seen:
        trace(slice(1))
    columns = ["what", "s", "a second", "kernels run", "peak GiB"]
    tokens = sum(map(len, texts)) - sum(map(len, starts))
    title, busy = f"roots, {size.samples} super-trees each", f"{seen.busy:.0%}"
    table = [
        ["texts of the target (tokens)", sampling, tokens / sampling, "–", ""],
        [title, seconds, roots / seconds, busy, _peak(options.device)],
    ]
    report("gpu_traces", columns, table, [_machine(options.device)])


def decode(options: argparse.Namespace, size: Size) -> None:
    """Run all methods, interleaved, and report them. Where it was stopped, it goes on."""
    models, device = _load(options), options.device
    prompts = [(str(i), "code", tokens) for i, tokens in enumerate(_prompts(options, size))]
    context = max(len(tokens) for *_, tokens in prompts) + size.new_tokens + MARGIN
    fixed = StaticShapes(context, ROWS)
    made: dict[str, Speculative] = {}

    def add(
        name: str,
        rule: str = "nss",
        tree: Action | None = None,
        static: StaticShapes | None = None,
    ) -> None:
        drafter = LMDrafter(models[1], static) if tree else None
        policy = Delayed(tree) if tree else Autoregressive()
        decoder = SpeculativeDecoder(models[0], drafter, policy, rule, static=static)
        made[name] = Speculative(name, decoder, SETTING, size.new_tokens)

    add(BASELINE)
    add(CONTROL)
    add(f"{BASELINE}, static", static=fixed)
    for rule, tree in TREES:
        title = f"{VERIFIERS[rule].name} {tuple(tree)}"
        add(title, rule, tree)
        add(f"{title}, static", rule, tree, fixed)
    records = options.folder / f"decode-{options.size}.jsonl"
    run_benchmark(dict(made), prompts, SETTING, records, seed=0)
    every, table = list(read_records(records)), []
    by_method = by_setting(every)[str(SETTING)]
    for name, method in made.items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with _profiled(device) as seen:
            generation = method.decoder.generate(
                prompts[0][2], PROFILED_TOKENS, SETTING, Rng.seeded(0)
            )
        line = row(name, by_method[name], by_method[BASELINE])
        tokens = line.block_efficiency
        table.append(
            [
                name,
                shown(tokens),
                line.tokens_per_second,
                shown(line.speedup),
                1e3 * tokens[0] / line.tokens_per_second,
                f"{1 - seen.busy:.0%}",
                seen.waits / max(1, len(generation.steps)),
                _peak(device),
            ]
        )
    columns = [
        *("method", "tokens a step", "tokens/s", "over autoregressive", "ms a step"),
        *("no kernel runs", "waits a step", "peak GiB"),
    ]
    note = "The last three columns are of one generation under the profiler, with its prefill."
    report("gpu_decode", columns, table, [_machine(device), note, *doubts(every)])
    records.unlink()


def heads(options: argparse.Namespace, size: Size) -> None:
    device, (target, _) = options.device, _load(options)
    target.native = None  # as a training has it
    rows = torch.load(options.folder / "held_out.pt", weights_only=True)
    batch = rows[torch.arange(min(8, size.batch)) % len(rows)].to(device)
    table = []
    for loss in (TalfLoss(), HassLoss(), EagleLoss()):
        torch.manual_seed(0)
        head = EagleHead(target, dtype=torch.float32)
        optimizer = torch.optim.AdamW(head.parameters(), lr=3e-4)
        step = partial(_head_step, head, batch, loss, optimizer)
        step()  # warm-up
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        for _ in range(size.head_steps):
            step()
        _wait(device)
        seconds = (time.perf_counter() - started) / size.head_steps
        with _profiled(device) as seen:
            step()
        speeds = [1 / seconds, batch.numel() / seconds, f"{seen.busy:.0%}", _peak(device)]
        table.append([loss.name, loss.depth, *speeds])
    columns = ["loss", "depth", "steps/s", "tokens/s", "kernels run", "peak GiB"]
    note = (
        f"{len(batch)} rows of {batch.shape[1]} tokens a step, labels made in the step, all tokens"
        " are roots."
    )
    report("gpu_heads", columns, table, [_machine(device), note])


def _head_step(
    head: EagleHead,
    tokens: Tensor,
    loss: TalfLoss | HassLoss | EagleLoss,
    optimizer: torch.optim.Optimizer,
) -> None:
    target, length, device = head.target, tokens.shape[1], tokens.device
    roots = torch.arange(1, length - loss.depth, device=device).expand(len(tokens), -1)
    with torch.autocast(device.type, torch.bfloat16):
        if loss.target_trees:
            trees = target_beam(target, tokens, loss.k, loss.depth, roots, None)
        else:
            along, _ = target_features(target, tokens, None)
            trees = chains(tokens, along, roots, loss.depth)
        outputs = tree_features(
            head,
            trees.tokens,
            trees.features,
            trees.roots,
            trees.levels,
            loss.detach_features,
            None,
        )
        outputs = [head.read(level) for level in outputs]
        outputs[0] = outputs[0].flatten(0, 1)[:, None]
        labels = [trees.along[:, 1:].flatten(0, 1)[:, None], *trees.labels]
        shapes = [level.shape[:-2] for level in outputs]
        weights = [torch.full(shape, 1 / shape.numel(), device=device) for shape in shapes]
        total, _ = tree_loss(outputs, labels, HeadReadout.of(head), loss, weights)
    total.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.inference_mode()
def attention(options: argparse.Namespace, size: Size) -> None:
    full, dtype, device = options.size == "full", torch.bfloat16, options.device
    heads, shared, width = (32, 8, 128) if full else (4, 2, 32)  # of Llama-3-8B
    table = []
    for context, rows in product((256, 1024, 4096, 16384) if full else (64, 256), (1, 8, 64)):
        query, keys, values = (
            torch.randn(1, count, slots, width, dtype=dtype, device=device)
            for count, slots in ((heads, rows), (shared, context + rows), (shared, context + rows))
        )
        small = torch.full(
            (1, 1, rows, rows), torch.finfo(dtype).min, dtype=dtype, device=device
        ).triu_(1)
        own, wide = (
            attended._repeated(F.pad(small, (text, 0)), heads // shared) for text in (0, context)
        )
        ways = (attended.Seen(mask=wide), attended.Seen(text=context, mask=own))
        times = []
        for seen in ways:
            call = partial(attended.attend, query, keys, values, seen, width**-0.5)
            timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
            times.append(1e3 * timer.blocked_autorange(min_run_time=0.2).median)
        table.append([context, rows, *times, times[0] / times[1]])
    columns = ["context", "rows", "one mask, ms", "two parts, ms", "one mask over two parts"]
    note = (
        f"{heads} query heads, {shared} of keys, head size {width}, bfloat16; calls one after the"
        " other, launches included."
    )
    report("gpu_attention", columns, table, [_machine(device), note])


PARTS = {"pair": pair, "traces": traces, "decode": decode, "heads": heads, "attention": attention}


@dataclass
class Seen:
    """A profile: fraction of the time in which a kernel ran, and waits of the host."""

    busy: float = 0.0
    waits: int = 0


@contextmanager
def _profiled(device: torch.device) -> Iterator[Seen]:
    from torch.profiler import profile

    seen, on_gpu = Seen(), device.type == "cuda"
    with profile() as profiler:
        _wait(device)
        started = time.perf_counter()
        yield seen
        _wait(device)
        seconds = time.perf_counter() - started
    events = profiler.key_averages()
    # operators have the time of their kernels too; the profiler itself waits for the full device
    if on_gpu:
        kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
        micros = sum(
            event.self_device_time_total for event in kernels if not event.is_user_annotation
        )
        seen.waits = sum(
            event.count
            for event in events
            if event.key.endswith(("StreamSynchronize", "EventSynchronize"))
        )
    else:
        micros = sum(event.self_cpu_time_total for event in events)
    seen.busy = min(1.0, micros / 1e6 / seconds)


def _load(options: argparse.Namespace) -> tuple[CausalModel, CausalModel]:
    if not (options.folder / "draft" / "config.json").exists():
        raise UserError(f"--folder {options.folder}: there is no pair; run --part pair first.")
    target, draft = (
        CausalModel.load(options.folder / role, str(options.device), "bfloat16", role)
        for role in ("target", "draft")
    )
    return target, draft


def _prompts(options: argparse.Namespace, size: Size) -> list[list[int]]:
    rows = torch.load(options.folder / "held_out.pt", weights_only=True)
    return [rows[i % len(rows)][: LENGTH // 4].tolist() for i in range(size.prompts)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> float | str:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else "–"


def _machine(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else "a CPU: a rehearsal, no figure of a GPU"
    )


if __name__ == "__main__":
    main()
