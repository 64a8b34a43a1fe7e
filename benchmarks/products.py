"""What a few rows cost with a large weight matrix, by MKL and by oneDNN, and what a target's pass
then takes.

`python -m benchmarks.products` (five minutes). float32, one thread. Shapes are those of
Qwen2.5-0.5B and of larger models; the pass is that of a Qwen 2 of eight layers of 896 with random
weights, 96 tokens of context, from tokens to logits. Both libraries are interleaved; medians of CPU
time, in units of one row by MKL.
"""

import argparse

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import torch
from torch.nn import functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.timing import interleaved, report
from nde_talf.decoding.forward import product as room
from nde_talf.decoding.model import CausalModel
from nde_talf.decoding.session import TreeSession

SHAPES = ((896, 1152), (896, 9728), (2048, 2048), (4096, 4096))
ROWS = (1, 2, 4, 8, 16, 33)
CONTEXT = 96


def qwen() -> CausalModel:
    """A Qwen 2 of eight layers, as wide as Qwen2.5-0.5B, with random weights."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    }
    return CausalModel(
        Qwen2ForCausalLM(Qwen2Config(vocab_size=32000, num_hidden_layers=8, **sizes)), "Qwen 2"
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    if not room.has_onednn():
        parser.error("this torch has no oneDNN.")
    rows, notes = [], []
    for width, height in SHAPES:
        weight = torch.randn(height, width)

        def both(count: int, weight=weight, width=width) -> dict:
            states = torch.randn(count, width)
            onednn = torch.ops.mkldnn._linear_pointwise
            return {
                "MKL": lambda: F.linear(states, weight),
                "oneDNN": lambda: onednn(states, weight, None, "none", [], ""),
            }

        rows += measured(f"{width} x {height}", both, options.repeats, notes)
    model = qwen()
    session = TreeSession(model.hidden, model.device, model.dtype, model.layers)
    session.reset(CONTEXT + max(ROWS))
    session.append([7 * i % model.vocab_size for i in range(CONTEXT)])

    def passes(count: int) -> dict:
        def run(onednn: bool) -> None:
            room.ONEDNN = onednn
            model.logits(session.grow(list(range(count)), list(range(-1, count - 1))))
            session.rollback()

        return {"MKL": lambda: run(False), "oneDNN": lambda: run(True)}

    rows += measured("a pass of 8 layers of 896", passes, options.repeats, notes)
    columns = [
        "product",
        "rows",
        "MKL, ms",
        "oneDNN, ms",
        "oneDNN over MKL",
        "MKL, of one row",
        "oneDNN, of one row by MKL",
    ]
    report("products", "python -m benchmarks.products", columns, rows, notes)


def measured(name: str, tasks, repeats: int, notes: list[str]) -> list[list]:
    """A row of the table for each number of rows; the control of the largest goes to `notes`."""
    found = []
    for count in ROWS:
        timings = interleaved(tasks(count), repeats)
        mkl, onednn = (1e3 * timings.cpu[way] for way in ("MKL", "oneDNN"))
        one = mkl if count == 1 else found[0][2]
        found.append([name, count, mkl, onednn, onednn / mkl, mkl / one, onednn / one])
    notes.append(timings.note(f" ({name}, {ROWS[-1]} rows)"))
    return found


if __name__ == "__main__":
    main()
