"""Parts of at most eight minutes on a GPU: `python -m benchmarks.gpu --part pair`, then the others.

It needs torch, transformers and safetensors alone, no hub and no data set: the text is the Python
standard library's. Each part prints a table, and writes it to benchmarks/results/gpu_PART.md and
.json (--results: another folder).

- pair: trains a target of some 100 M parameters and distils a two-layer draft from it. `--minutes`
  cuts the training; started again, it goes on where it stopped.
- traces: the target's texts, super-trees and labels; roots/s, and how much of that time kernels
  run.
- decode: plain decoding, an A/A control, trees with and without static shapes (CUDA graphs), and
  one tree in float32. tokens/s, the time of a step outside kernels and how often the host waits for
  the device, by torch's profiler; peak memory.
- heads: steps/s and peak memory of a draft head's training with the losses of TALF, HASS and EAGLE.
- attention: one layer's attention of a tree's rows, under one mask over text and tree and in two
  parts, by context and rows. The context from which on two parts are faster is `OPEN` of
  `nde_talf.decoding.forward.attention`. It needs no pair.

`--size small --device cpu` rehearses all of it on a CPU in a minute. There a kernel is an operator
of torch, nothing waits and no memory is counted.
"""

import argparse
import math
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import timing
from benchmarks.timing import doubts, rate, report
from nde_talf.data.engines.transformers import TransformersEngine
from nde_talf.data.text.prompts import Prompt
from nde_talf.data.text.tokenizer import pack, train_tokenizer
from nde_talf.data.traces.settings import TracesConfig
from nde_talf.data.traces.trace import trace_trajectories
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.bootstrap import shown
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.micro_batch import MicroBatch
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.forward import attention as attended
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.registry import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.decoding.static import MARGIN, StaticShapes
from nde_talf.draft_training.head import EagleHead
from nde_talf.draft_training.losses import HeadReadout, tree_loss
from nde_talf.draft_training.settings import EagleLoss, HassLoss, TalfLoss
from nde_talf.draft_training.target_trees import TreeSpec, chains, target_beam, target_features
from nde_talf.evaluation.benchmark import read_records, run_benchmark
from nde_talf.evaluation.loops import Speculative
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.evaluation.speed import speed_ratio

PARTS = ("pair", "traces", "decode", "heads", "attention")
SETTING = SamplingSetting(0.6)
TREES = (
    ("traversal", Action(1, 0, 7)),
    ("specinfer", Action(3, 0, 5)),
    ("specinfer", Action(3, 2, 4)),
)
ROWS = max(tree.nodes for _, tree in TREES)
"""Of static shapes. No more, since every size of a pass is compiled."""
LENGTH, SAVE_SECONDS = 256, 60.0


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
    "full": Size(8192, (768, 12, 12, 2048), (384, 2, 6, 1024), 2000, 64, 2000, 16, 128, 4, 20),
    "small": Size(512, (64, 2, 2, 128), (32, 1, 2, 64), 20, 4, 4, 2, 12, 2, 2),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("checkpoints/gpu"),
        help="of the pair that part pair trains",
    )
    parser.add_argument(
        "--results", type=Path, default=timing.RESULTS, help="where tables are written"
    )
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="of training, after which part pair stops"
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "--device cuda: torch sees no GPU here. --device cpu --size small rehearses on the CPU."
        )
    timing.RESULTS = options.results
    size, device = SIZES[options.size], torch.device(options.device)
    try:
        parts = {
            "pair": pair,
            "traces": traces,
            "decode": decode,
            "heads": heads,
            "attention": attention,
        }
        parts[options.part](options, size, device)
    except UserError as error:
        raise SystemExit(str(error)) from error


def pair(options: argparse.Namespace, size: Size, device: torch.device) -> None:
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
    held_out, rows = rows[::50], rows[torch.arange(len(rows)) % 50 > 0]
    torch.save(held_out, options.folder / "held_out.pt")
    found = []
    teacher: nn.Module | None = None
    for role in ("target", "draft"):
        model, seconds, steps = _train(
            options.folder / role, size, role, teacher, rows.to(device), until
        )
        teacher = model
        with torch.inference_mode():
            nats = [
                float(_loss(model, batch.to(device)))
                for batch in held_out[: 4 * size.batch].split(size.batch)
            ]
        count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        found.append(
            [
                role,
                count,
                f"{steps} of {size.steps}",
                seconds,
                steps * size.batch * LENGTH / seconds,
                sum(nats) / len(nats),
            ]
        )
    report(
        "gpu_pair",
        ["model", "M parameters", "steps", "s", "tokens/s", "held-out nats a token"],
        found,
        [_machine(device)],
    )


def _train(
    folder: Path, size: Size, role: str, teacher: nn.Module | None, rows: Tensor, until: float
) -> tuple[nn.Module, float, int]:
    """Train the model of `folder` until the time is over: it, seconds and steps so far."""
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
    step, seconds, state = 0, 0.0, folder / "training.pt"
    folder.mkdir(exist_ok=True)
    if state.exists():
        kept = torch.load(state, map_location=rows.device, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step, seconds = kept["step"], kept["seconds"]
    started = saved = time.monotonic()
    while step < size.steps and time.monotonic() < until:
        rate_now = 6e-4 * min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / size.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate_now
        index = torch.randint(
            len(rows), (size.batch,), generator=torch.Generator().manual_seed(step)
        ).to(rows.device)
        with torch.autocast(rows.device.type, torch.bfloat16):
            loss = _loss(model, rows[index], teacher)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if time.monotonic() - saved > SAVE_SECONDS or step == size.steps:
            saved = time.monotonic()
            _save(state, model, optimizer, step, seconds + saved - started)
    if time.monotonic() >= until and step < size.steps:
        _save(state, model, optimizer, step, seconds + time.monotonic() - started)
        raise SystemExit(
            f"{folder.name}: {step} of {size.steps} steps, and the time is over. Start the part"
            " again to go on."
        )
    model.save_pretrained(folder)
    return model.eval(), torch.load(state, map_location="cpu", weights_only=True)["seconds"], step


def _save(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, seconds: float
) -> None:
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "seconds": seconds,
    }
    torch.save(content, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def _loss(model: nn.Module, tokens: Tensor, teacher: nn.Module | None = None) -> Tensor:
    """Nats a token: of the text, or of the teacher's distributions."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
    if teacher is None:
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    with torch.no_grad():
        p = teacher(input_ids=tokens[:, :-1], use_cache=False).logits.float().softmax(-1)
    return F.cross_entropy(logits.flatten(0, 1), p.flatten(0, 1))


def traces(options: argparse.Namespace, size: Size, device: torch.device) -> None:
    target, draft = _load(options, device)
    starts = _prompts(options, size)
    started = time.perf_counter()
    texts = TransformersEngine(target).sample(starts, SETTING, size.new_tokens, 0)
    _wait(device)
    sampling = time.perf_counter() - started
    config = TracesConfig(
        new_tokens=size.new_tokens, samples=size.samples, verifiers=["specinfer", "traversal"]
    )
    prompts = [Prompt(str(i), "code", "", tokens) for i, tokens in enumerate(starts)]

    def trace(some: slice) -> int:
        columns = trace_trajectories(
            target, draft, prompts[some], texts[some], [SETTING], config, MicroBatch(256), 0
        )
        return len(columns["prompt_id"])

    trace(slice(1))  # warm-up
    started = time.perf_counter()
    roots = trace(slice(None))
    _wait(device)
    seconds = time.perf_counter() - started
    with _profiled(device) as seen:
        trace(slice(1))
    columns = ["what", "s", "a second", "kernels run", "peak GiB"]
    tokens = sum(map(len, texts)) - sum(map(len, starts))
    found = [["texts of the target (tokens)", sampling, tokens / sampling, "–", ""]]
    found.append(
        [
            f"roots, {size.samples} super-trees each",
            seconds,
            roots / seconds,
            f"{seen.busy:.0%}",
            _peak(device),
        ]
    )
    report("gpu_traces", columns, found, [_machine(device)])


def decode(options: argparse.Namespace, size: Size, device: torch.device) -> None:
    target, draft = _load(options, device)
    wide = _load(options, device, "float32")
    prompts = [(str(i), "code", tokens) for i, tokens in enumerate(_prompts(options, size))]
    context = max(len(tokens) for *_, tokens in prompts) + size.new_tokens + MARGIN
    fixed = StaticShapes(context, ROWS)
    made: dict[str, Speculative] = {}

    def add(
        name: str,
        models: tuple[CausalModel, CausalModel],
        tree: Action | None,
        rule: str,
        static: StaticShapes | None,
    ) -> None:
        drafter, policy = (
            (None, Autoregressive())
            if tree is None
            else (LMDrafter(models[1], static), Delayed(tree))
        )
        decoder = SpeculativeDecoder(models[0], drafter, policy, rule, static=static)
        made[name] = Speculative(name, decoder, SETTING, size.new_tokens)

    for name in (BASELINE, CONTROL):
        add(name, (target, draft), None, "nss", None)
    add(f"{BASELINE}, static", (target, draft), None, "nss", fixed)
    for rule, tree in TREES:
        title = f"{VERIFIERS[rule].name} {tuple(tree)}"
        add(title, (target, draft), tree, rule, None)
        add(f"{title}, static", (target, draft), tree, rule, fixed)
    rule, tree = TREES[0]
    add(f"{VERIFIERS[rule].name} {tuple(tree)}, float32", wide, tree, rule, None)
    _decoded("decode", made, prompts, options, size, device)


def _decoded(
    part: str,
    made: dict[str, Speculative],
    prompts: list[tuple[str, str, list[int]]],
    options: argparse.Namespace,
    size: Size,
    device: torch.device,
) -> None:
    """Run all methods, interleaved, and report them. Where it was stopped, it goes on."""
    records = options.folder / f"{part}-{options.size}.jsonl"
    run_benchmark(dict(made), prompts, SETTING, records, seed=0)
    by_method: dict[str, list] = {name: [] for name in made}
    for record in read_records(records):
        by_method[record.method].append(record)
    found = []
    for name, own in by_method.items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with _profiled(device) as seen:
            generation = made[name].decoder.generate(
                prompts[0][2], size.new_tokens, SETTING, Rng.seeded(0)
            )
        ratio = speed_ratio(own, by_method[BASELINE])
        tokens, step = (
            rate(own, "tokens", "steps"),
            sum(r.seconds for r in own) / sum(r.steps for r in own),
        )
        found.append(
            [
                name,
                shown(tokens),
                sum(r.tokens for r in own) / sum(r.seconds for r in own),
                shown(ratio) if ratio else "–",
                1e3 * step,
                f"{1 - seen.busy:.0%}",
                seen.waits / max(1, len(generation.steps)),
                _peak(device),
            ]
        )
    columns = [
        "method",
        "tokens a step",
        "tokens/s",
        "over autoregressive",
        "ms a step",
        "no kernel runs",
        "waits a step",
        "peak GiB",
    ]
    notes = [
        _machine(device),
        (
            "A generation's steps and its prefill count for the last three columns, under the"
            " profiler."
        ),
    ]
    report(
        f"gpu_{part}",
        columns,
        found,
        notes + doubts([record for own in by_method.values() for record in own]),
    )
    records.unlink()


def heads(options: argparse.Namespace, size: Size, device: torch.device) -> None:
    target, _ = _load(options, device)
    rows = torch.load(options.folder / "held_out.pt", weights_only=True)
    batch = rows[torch.arange(min(8, size.batch)) % len(rows)].to(device)
    found = []
    for loss in (TalfLoss(), HassLoss(), EagleLoss()):
        torch.manual_seed(0)
        head = EagleHead(target)
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
        found.append(
            [
                loss.name,
                getattr(loss, "depth", 1),
                1 / seconds,
                batch.numel() / seconds,
                f"{seen.busy:.0%}",
                _peak(device),
            ]
        )
    columns = ["loss", "depth", "steps/s", "tokens/s", "kernels run", "peak GiB"]
    note = (
        f"{len(batch)} rows of {batch.shape[1]} tokens a step, labels made in the step, all tokens"
        " are roots."
    )
    report("gpu_heads", columns, found, [_machine(device), note])


def _head_step(
    head: EagleHead,
    tokens: Tensor,
    loss: TalfLoss | HassLoss | EagleLoss,
    optimizer: torch.optim.Optimizer,
) -> None:
    target, length, depth = head.target, tokens.shape[1], getattr(loss, "depth", 1)
    roots = torch.arange(1, length - depth, device=tokens.device).expand(len(tokens), -1)
    with torch.no_grad():
        if loss.target_trees:
            trees = target_beam(target, tokens, TreeSpec(loss.k, depth), roots, None)
        else:
            trees = chains(tokens, target_features(target, tokens, None)[0], roots, depth)
    outputs = head.tree_features(
        trees.tokens, trees.features, trees.roots, trees.levels, loss.detach_features, None
    )
    outputs = [head.read(level) for level in outputs]
    outputs[0] = outputs[0].flatten(0, 1)[:, None]
    along = [trees.along[:, 1:].flatten(0, 1)[:, None], *trees.labels]
    every = torch.full((len(outputs[0]),), 1 / len(outputs[0]), device=tokens.device)
    weights = [every] + [torch.full(roots.shape, 1 / roots.numel(), device=tokens.device)] * (
        len(outputs) - 1
    )
    tree_loss(outputs, along, HeadReadout.of(head), loss, weights)[0].backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.inference_mode()
def attention(options: argparse.Namespace, size: Size, device: torch.device) -> None:
    full, dtype, found = options.size == "full", torch.bfloat16, []
    heads, shared, width = (32, 8, 128) if full else (4, 2, 32)  # of Llama-3-8B
    for context, rows in product((256, 1024, 4096, 16384) if full else (64, 256), (1, 8, 64)):
        query, keys, values = (
            torch.randn(1, count, slots, width, dtype=dtype, device=device)
            for count, slots in ((heads, rows), (shared, context + rows), (shared, context + rows))
        )
        small = torch.full(
            (1, 1, rows, rows), torch.finfo(dtype).min, dtype=dtype, device=device
        ).triu_(1)
        own = small.repeat(1, 1, heads // shared, 1)
        wide = F.pad(own, (context, -(context + rows) % 8))[..., : context + rows]
        ways = (attended.Seen(0, context, context, wide), attended.Seen(0, 0, context, own))
        times = [
            _milliseconds(device, partial(attended.attend, query, keys, values, seen, width**-0.5))
            for seen in ways
        ]
        found.append([context, rows, *times, times[0] / times[1]])
    columns = ["context", "rows", "one mask, ms", "two parts, ms", "one mask over two parts"]
    note = (
        f"{heads} query heads, {shared} of keys, head size {width}, bfloat16; calls one after the"
        " other, launches included."
    )
    report("gpu_attention", columns, found, [_machine(device), note])


def _milliseconds(device: torch.device, call: Callable[[], object], calls: int = 50) -> float:
    """Time a call: the median over five rounds of its mean in `calls` of them."""
    rounds = []
    for _ in range(6):
        _wait(device)
        started = time.perf_counter()
        for _ in range(calls):
            call()
        _wait(device)
        rounds.append(1e3 * (time.perf_counter() - started) / calls)
    return statistics.median(rounds[1:])


@dataclass
class Seen:
    """A profile: fraction of the time in which a kernel ran, and waits of the host."""

    busy: float = 0.0
    waits: int = 0


@contextmanager
def _profiled(device: torch.device) -> Iterator[Seen]:
    from torch.profiler import ProfilerActivity, profile

    seen, on_gpu = Seen(), device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
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


def _load(
    options: argparse.Namespace, device: torch.device, dtype: str = "bfloat16"
) -> tuple[CausalModel, CausalModel]:
    if not (options.folder / "draft" / "config.json").exists():
        raise UserError(f"--folder {options.folder}: there is no pair; run --part pair first.")
    target, draft = (
        CausalModel.load(options.folder / role, str(device), dtype, role)
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
