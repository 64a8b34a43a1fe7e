"""One step of the loop, with Traversal, imports few modules: a newcomer can read them in an afternoon.

The check of a model when it is loaded (`fitness`) is no part of a step.

`python -m tests.decoding.test_loop_imports` prints them with their sizes.
"""

import os
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

MODULES, TOKENS = 25, 20_000
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
_STEP = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from nde_talf import Action, CausalModel, Delayed, LMDrafter, Rng, SamplingSetting
from nde_talf import SpeculativeDecoder
sizes = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1)
target, draft = (
    CausalModel(LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))) for _ in range(2)
)
decoder = SpeculativeDecoder(target, LMDrafter(draft), Delayed(Action(2, 1, 1)), "traversal")
steps = decoder.stream([1, 2, 3], SamplingSetting(0.8), Rng.seeded(0))
assert next(steps) and next(steps)
here = {n: each.__file__ for n, each in sys.modules.items() if n.startswith("nde_talf.")}
del here["nde_talf.decoding.fitness"]
print(*here.values())
"""


def tokens(file):
    """Count the tokens of a file but for comments, layout and strings that stand alone."""
    count, alone = 0, True
    with file.open("rb") as opened:
        for token in tokenize.tokenize(opened.readline):
            count += token.type not in _LAYOUT and not (alone and token.type == tokenize.STRING)
            alone = token.type in _LAYOUT
    return count


def modules_of_a_step():
    """Run one step in a process of its own; the files that it imported, with their tokens."""
    code, single = [sys.executable, "-c", _STEP], {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(code, capture_output=True, text=True, check=True, env=single)
    sizes = {Path(file): tokens(Path(file)) for file in ran.stdout.split()}
    return {file: size for file, size in sizes.items() if size}  # empty packages are no reading


@pytest.mark.slow
def test_a_step_is_read_in_an_afternoon():
    sizes = modules_of_a_step()
    assert len(sizes) <= MODULES and sum(sizes.values()) <= TOKENS


if __name__ == "__main__":
    sizes = modules_of_a_step()
    for file, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{size:7,} {file}")
