"""One step on a GPU, in parts of at most eight minutes: `python -m benchmarks.gpu_step --part a`.

- a: right? In bfloat16 a recorded pass equals the eager one, greedy tokens of recorded steps are
  plain decoding's (or the gap of the logits where they part), top-p and draws over 152k tokens are
  the CPU's, four tokens have the law of plain decoding, and no kernel of attention makes a NaN,
  with windows and without.
- b: µs of a launch, a wait, an upload and a replay; ms of a pass over new lengths, with cuDNN's
  attention and without.
- c: µs of a recorded step's parts at the shapes of Llama-3.1-8B with a head's layer and of Qwen3-8B
  with its 0.6B, by context and top-p, with graphs and without. Weights are random.
- d: tokens/s of a plain loop and of a chain of 4, written as gpt-fast does but for tokens on the
  host, beside this package's.

Each figure is written to benchmarks/results/gpu_step.json when it is there, and not measured again.
`--size small --device cpu` rehearses all of it. It needs torch and transformers alone.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.timing import RESULTS
from nde_talf import (
    Action,
    Autoregressive,
    CausalModel,
    Delayed,
    LMDrafter,
    Rng,
    SamplingSetting,
    SpeculativeDecoder,
    StaticShapes,
)
from nde_talf.decoding.device import upload
from nde_talf.decoding.recorded_step import SCALARS, SHAPES, RecordedShapes
from nde_talf.decoding.sampling.device_rng import inverse_cdf
from nde_talf.decoding.sampling.rng import warp

# transformers' classes; hidden and intermediate size, heads, vocabulary, layers
LLAMA, QWEN = (LlamaConfig, LlamaForCausalLM), (Qwen3Config, Qwen3ForCausalLM)
MODELS = {
    "Llama-3.1-8B": (*LLAMA, 4096, 14336, 32, 128256, 32),
    "one layer of it, as a head": (*LLAMA, 4096, 14336, 32, 128256, 1),
    "Qwen3-8B": (*QWEN, 4096, 12288, 32, 151936, 36),
    "Qwen3-0.6B": (*QWEN, 1024, 3072, 16, 151936, 28),
}
PAIRS = (("Llama-3.1-8B", "one layer of it, as a head"), ("Qwen3-8B", "Qwen3-0.6B"))
BACKENDS = (
    SDPBackend.MATH,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)
GREEDY, HALF = SamplingSetting(0.0), SamplingSetting(0.6)
PROMPT = list(range(2, 18))
Figures = Iterator[tuple[str, Callable[[], Any]]]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.small = options.size == "small"
    file = options.results / "gpu_step.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    until = time.monotonic() + 450
    for name, measure in PARTS[options.part](options):
        key = f"{options.part}: {name}"
        if key in found:
            continue
        if time.monotonic() > until:
            raise SystemExit(f"part {options.part} goes on when it is started again")
        with torch.inference_mode():
            found[key] = measure()
        print(key, found[key], flush=True)
        file.write_text(json.dumps(found, indent=1))


def model(options: argparse.Namespace, name: str, seed: int = 0, **more: Any) -> CausalModel:
    """A model of random weights, made on the device."""
    config, kind, hidden, inner, heads, vocabulary, layers = MODELS[name]
    if options.small:
        hidden, inner, heads, vocabulary, layers = 64, 64, 4, 64, 2
    torch.manual_seed(seed)
    made = config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=min(8, heads),
        head_dim=16 if options.small else 128,
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        max_position_embeddings=16384,
        **more,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(options.device):
            return CausalModel(kind(made), name)
    finally:
        torch.set_default_dtype(torch.float32)


def wait(options: argparse.Namespace) -> None:
    if options.device.startswith("cuda"):
        torch.cuda.synchronize()


def micros(options: argparse.Namespace, task: Callable[[], object], repeats: int = 50) -> float:
    """Median µs of a call, with a wait for its end."""
    times = []
    for _ in range(repeats):
        wait(options)
        started = time.perf_counter()
        task()
        wait(options)
        times.append(1e6 * (time.perf_counter() - started))
    return round(sorted(times[2:])[len(times[2:]) // 2], 1)


def shapes(context: int, how: str, rows: int = 32) -> StaticShapes | None:
    return None if how == "eager" else SHAPES[how](context, rows)


def decoder_of(
    target: CausalModel, draft: CausalModel, policy: Any, static: StaticShapes | None, rule: str
) -> SpeculativeDecoder:
    if policy is None:
        return SpeculativeDecoder(target, None, Autoregressive(), "nss", static=static)
    return SpeculativeDecoder(target, LMDrafter(draft, static), policy, rule, static=static)


def right(options: argparse.Namespace) -> Figures:
    target, draft = model(options, "Qwen3-0.6B"), model(options, "Qwen3-0.6B", 1)
    path, tree = Delayed(Action(1, 0, 4)), Delayed(Action(4, 0, 3))

    def hidden(how: str) -> torch.Tensor:
        session = target.session((), shapes(512, how))
        session.append(PROMPT)
        return session.grow([3, 4, 5, 6], [-1, 0, 0, 1]).float()

    def text(policy: Any, how: str, setting: SamplingSetting, seed: int, count: int) -> list[int]:
        decoder = decoder_of(target, draft, policy, shapes(512, how), "traversal")
        return decoder.generate(PROMPT, count, setting, Rng.seeded(seed)).tokens

    def parted(policy: Any, how: str) -> Any:
        ours, plain = text(policy, how, GREEDY, 0, 64), text(None, "eager", GREEDY, 0, 64)
        if ours == plain:
            return "the same 64 tokens"
        at = next(at for at in range(64) if ours[at] != plain[at])
        session = target.session()
        logits = target.logits(session.append([*PROMPT, *plain[:at]])[-1:])[0]
        return [f"apart at token {at}, logits by", float(logits[plain[at]] - logits[ours[at]])]

    def apart() -> float:
        return float((hidden("recorded") - hidden("eager")).abs().max())

    yield "recorded pass less eager", apart
    for how, policy in product(("eager", "recorded"), (path, tree)):
        yield f"greedy {how} {tuple(policy.action)}", partial(parted, policy, how)

    def far(setting: SamplingSetting) -> float:
        logits = 3 * torch.randn(8, 152_064, generator=torch.Generator().manual_seed(0))
        uniforms = torch.rand(8, 64, generator=torch.Generator().manual_seed(1)).double()
        here = warp(logits, setting)
        there = warp(logits.to(options.device), setting)
        drawn = inverse_cdf(there, uniforms.to(options.device)).cpu() != inverse_cdf(here, uniforms)
        return float((there.cpu() - here).abs().max()) + float(drawn.float().mean())

    for top_p in (1.0, 0.9):
        setting = SamplingSetting(0.6, top_p)
        yield f"top-p {top_p} at 152k: error plus share of other draws", partial(far, setting)

    def chi_square(how: str) -> float:
        """Chi-square per degree of freedom of the second token's last two bits."""
        counts = [
            Counter(
                text(policy, how, HALF, seed, 2)[1] % 4
                for seed in range(8 if options.small else 400)
            )
            for policy in (None, tree)
        ]
        both = [(counts[0][token], counts[1][token]) for token in range(4)]
        return sum((one - two) ** 2 / max(one + two, 1) for one, two in both) / 3

    for how in ("eager", "recorded"):
        yield f"chi-square of four classes, by 3 degrees, {how}", partial(chi_square, how)
    yield from finite_states(options)


def finite_states(options: argparse.Namespace) -> Figures:
    def finite(window: int | None, how: str, backend: SDPBackend) -> Any:
        """Tell if states after a text longer than the window are numbers."""
        more = {"use_sliding_window": window is not None, "sliding_window": window}
        made = model(options, "Qwen3-0.6B", max_window_layers=0, **more)
        session = made.session((), shapes(512, how))
        session.append(8 * PROMPT)
        try:
            with sdpa_kernel(backend):
                states = [session.grow([3] * rows, [-1] * rows) for rows in (1, 5)]
        except RuntimeError as error:
            return f"does not run: {str(error).splitlines()[0]}"
        return bool(torch.cat(states).isfinite().all())

    for window, how, backend in product((None, 64), ("eager", "recorded"), BACKENDS):
        name = f"states are finite, window {window}, {how}, {backend.name}"
        yield name, partial(finite, window, how, backend)


def costs(options: argparse.Namespace) -> Figures:
    one, host = torch.ones(1, device=options.device), torch.ones(64)
    time_of = partial(micros, options)
    yield "µs, wait alone", lambda: time_of(lambda: None)
    yield "µs, 100 launches", lambda: time_of(lambda: [one.add_(1) for _ in range(100)])
    yield "µs, read of a number", lambda: time_of(lambda: float(one))
    yield "µs, upload", lambda: time_of(lambda: upload(host, one.device))
    target = model(options, "Qwen3-0.6B")
    for how, context in product(("eager", "recorded"), (512, 2048, 8192)):
        for rows in (1, 16, 32):
            yield (
                f"µs, {how} pass, {rows} rows at {context}",
                partial(one_pass, options, target, how, context, rows),
            )

    def lengths(cudnn: bool) -> float:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        session = target.session()
        session.append(PROMPT)
        passes = iter(range(60))
        return micros(options, lambda: session.append([next(passes) + 1] * 3), 22)

    for cudnn in (True, False):
        yield f"µs, eager pass over a new length, cuDNN {cudnn}", partial(lengths, cudnn)


def one_pass(
    options: argparse.Namespace, target: CausalModel, how: str, context: int, rows: int
) -> float:
    """µs of a pass of `rows` siblings after a text."""
    text = context - 64
    session = target.session((), shapes(context, how))
    session.append([1 + i % 60 for i in range(min(text, 96) if options.small else text)])

    def task() -> None:
        target.logits(session.grow([2] * rows, [-1] * rows))
        session.commit([])

    return micros(options, task, 10)


def large(options: argparse.Namespace) -> Figures:
    cases = product((512, 2048, 8192), (1.0, 0.9), (True, False))
    for names in PAIRS:
        made: list[CausalModel] = []

        def measure(names: tuple[str, str], made: list[CausalModel], *case: Any) -> Any:
            if not made:
                made.extend(model(options, name) for name in names)
            return parts_of_a_step(options, *made, *case)

        for context, top_p, graphs in cases:
            name = f"µs, {names[0]} with {names[1]} at {context}, top-p {top_p}, graphs {graphs}"
            yield name, partial(measure, names, made, context, top_p, graphs)
        made.clear()


def parts_of_a_step(
    options: argparse.Namespace,
    target: CausalModel,
    draft: CausalModel,
    context: int,
    top_p: float,
    graphs: bool,
) -> dict[str, float]:
    """µs of the parts of a recorded step of (4, 0, 3); all three tokens count as accepted."""
    action, rng, static = Action(4, 0, 3), Rng.seeded(0), RecordedShapes(context, 48)
    decoder = decoder_of(target, draft, Delayed(action), static, "traversal")
    text = [1 + i % 60 for i in range(96 if options.small else context - 64)]
    stream = decoder.stream(text, SamplingSetting(0.6, top_p), rng)
    next(stream), next(stream)
    (steps,) = static.steps.values()
    shown = static.shown(len(text) + 48)
    steps.whole[SCALARS, 1] = 3

    if not graphs:
        steps.graphs = lambda key, function: function()
    run = steps._run

    def level(width: int) -> None:
        steps.row.fill_(1 + width)
        run(steps.level, width, 4, shown)

    def verify() -> None:
        steps.row.fill_(1)
        decoder.verify(steps.drafted(action)[0], rng)

    parts = {
        "commit, draft and draw at the root": lambda: run(steps.advance, 4, 4, shown),
        "level of 1": lambda: level(1),
        "level of 4": lambda: level(4),
        "target, 16 rows": lambda: run(steps.score, 16, shown),
        "verify": verify,
    }
    return {name: micros(options, part, 10) for name, part in parts.items()}


def loops(options: argparse.Namespace) -> Figures:
    target = model(options, "Qwen3-8B")
    draft = model(options, "Qwen3-0.6B")
    count = 16 if options.small else 128

    def bare() -> float:
        """Greedy plain decoding, without anything that is not needed for it."""
        session, token = target.session((), shapes(512, "recorded")), 1
        session.append(PROMPT)
        started = time.perf_counter()
        for _ in range(count):
            token = int(target.logits(session.append([token])).argmax())
        return count / (time.perf_counter() - started)

    def chain() -> float:
        """Chains of 4 sampled tokens, without anything that is not needed for them."""
        both = [each.session((), shapes(512, "recorded")) for each in (target, draft)]
        for session in both:
            session.append(PROMPT)
        token, made, started = 1, 0, time.perf_counter()
        while made < count:
            tokens, rows = [token], []
            for at in range(5):  # the last is run for the cache alone
                rows.append((draft.logits(both[1].grow(tokens[at:], [at - 1])) / 0.6).softmax(-1))
                tokens.append(int(rows[-1].multinomial(1)))
            tokens.pop()
            p = (target.logits(both[0].grow(tokens, range(-1, 4))) / 0.6).softmax(-1)
            q, drafted = torch.cat(rows[:4]), torch.tensor(tokens[1:], device=p.device)[:, None]
            chance = p[:4].gather(1, drafted) / q.gather(1, drafted)
            kept = int((torch.rand_like(chance) < chance).long().cumprod(0).sum())
            rest = p[4] if kept == 4 else (p[kept] - q[kept]).clamp(min=0)
            token, made = int(rest.multinomial(1)), made + kept + 1
            for session in both:
                session.commit([*range(kept + 1)])
        return made / (time.perf_counter() - started)

    def ours(policy: Any, how: str, rule: str) -> list[float]:
        decoder = decoder_of(target, draft, policy, shapes(512, how), rule)
        decoder.generate(PROMPT, 8, HALF, Rng.seeded(0))
        started = time.perf_counter()
        made = decoder.generate(PROMPT, count, HALF, Rng.seeded(0))
        seconds = time.perf_counter() - started
        steps = sum(made.stats.nodes.values())
        return [round(len(made.tokens) / seconds, 1), round(1e3 * seconds / steps, 2)]

    yield "tokens/s, bare loop", bare
    yield "tokens/s, bare chain of 4", chain
    for how, rule in product(("eager", "recorded"), ("specinfer", "traversal")):
        yield f"tokens/s and ms a step, plain, {how}", partial(ours, None, how, "nss")
        for action in (Action(1, 0, 4), Action(4, 0, 3)):
            name = f"tokens/s and ms a step, {rule} {tuple(action)}, {how}"
            yield name, partial(ours, Delayed(action), how, rule)


PARTS = {"a": right, "b": costs, "c": large, "d": loops}

if __name__ == "__main__":
    main()
