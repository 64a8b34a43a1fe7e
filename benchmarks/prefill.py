"""How long the first token takes, and how much memory, by length of the prompt and by chunks that
it is run in.

`python -m benchmarks.prefill --run checkpoints/default` (five minutes).

A prompt goes through the native forward of the target in one pass, as the decode loop runs it, or
in chunks, each after the text that the cache holds (`TreeSession.append`), up to the logits of its
last token. The models are target of a run, up to its context, and the Llama of `benchmarks.passes`
whose query heads share keys. Chunked and full prompts have the same hidden state at the end to
1e-4. *Memory*: what a process's peak rises by, the cache included, each case in a process of its
own.
"""

import argparse
import resource
import tempfile
import time
from functools import partial
from pathlib import Path

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import numpy as np
import torch
from torch import Tensor

from benchmarks.forked import forked
from benchmarks.passes import grouped
from benchmarks.timing import CONTROL, report
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.session import TreeSession

LENGTHS = (128, 512, 2048, 8192)
CHUNKS = (0, 256, 512, 2048)


def prefilled(model: CausalModel, length: int, chunk: int) -> Tensor:
    """The hidden state [H] of a prompt's last token; its logits are made too. chunk: 0 for one
    pass.
    """
    session = TreeSession(model.hidden, model.device, model.dtype, model.layers)
    session.reset(length)
    tokens, step = [7 * i % model.vocab_size for i in range(length)], chunk or length
    for start in range(0, length, step):
        hidden = session.append(tokens[start : start + step])
    model.logits(hidden[-1])
    return hidden[-1]


@torch.inference_mode()
def measured(model: CausalModel, length: int, chunk: int) -> int:
    """Bytes by which a first prompt raises the peak of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    prefilled(model, length, chunk)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=CHUNKS, help="0: the prompt in one pass"
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    models = {"target": CausalModel.load(options.run / "pair" / "target", name="target")}
    models["random Llama, 8 query heads, 2 of keys"] = CausalModel(
        grouped(max(options.lengths)), "grouped"
    )
    memory: dict[tuple, int] = {}
    rows, ratios = [], []
    cases = [
        (name, length)
        for name, model in models.items()
        for length in options.lengths
        if length <= model.max_context
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, length in cases:  # before anything else makes this process large
            for chunk in (own for own in options.chunks if own < length):
                outcome = forked(
                    partial(measured, models[name], length, chunk), Path(folder) / "out", 300
                )
                if outcome.what != "returned":
                    raise SystemExit(
                        f"{name}, {length} tokens, chunks of {chunk}:"
                        f" {outcome.what}\n{outcome.text}"
                    )
                memory[name, length, chunk] = outcome.value
                print(name, length, chunk, f"{outcome.value / 2**20:.0f} MiB", flush=True)
    for name, length in cases:
        model, chunks = models[name], [own for own in options.chunks if own < length]
        seconds: dict[int | str, list[float]] = {chunk: [] for chunk in (*chunks, CONTROL)}
        full = prefilled(model, length, 0)
        for _ in range(options.repeats):
            for chunk, own in seconds.items():
                started = time.process_time()
                hidden = prefilled(model, length, 0 if isinstance(chunk, str) else chunk)
                own.append(time.process_time() - started)
                torch.testing.assert_close(hidden, full, atol=1e-4, rtol=1e-4)
        median = {chunk: float(np.median(own)) for chunk, own in seconds.items()}
        print(
            name,
            length,
            {chunk: f"{1e3 * own:.0f} ms" for chunk, own in median.items()},
            flush=True,
        )
        ratios.append(median[CONTROL] / median[chunks[0]])
        rows += [
            [
                name,
                length,
                c or "none",
                1e3 * median[c],
                median[c] / median[chunks[0]],
                memory[name, length, c] / 2**20,
            ]
            for c in chunks
        ]
    columns = [
        "model",
        "tokens of the prompt",
        "chunk",
        "first token, ms",
        "of the first chunk size",
        "memory, MiB",
    ]
    command = f"python -m benchmarks.prefill --lengths {' '.join(map(str, options.lengths))} "
    command += f"--chunks {' '.join(map(str, options.chunks))} --repeats {options.repeats}"
    note = (
        f"CPU time, medians. A/A control, the first chunk size over itself: {min(ratios):.2f} to"
        f" {max(ratios):.2f}."
    )
    report("prefill", command, columns, rows, [note])


if __name__ == "__main__":
    main()
