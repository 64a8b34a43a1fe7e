"""A newcomer can read what one default step of the loop imports and runs in an afternoon.

It counts what the loop, a policy and a rule import, and every module that runs or is imported in a
step. What a model is checked with once, when it is wrapped, is not of a step.
`python -m tests.decoding.test_loop_imports` prints the modules with their sizes.
"""

import subprocess
import sys
import tokenize
from pathlib import Path

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
from nde_talf import Action, CausalModel, Delayed, LMDrafter, Rng, SamplingSetting
from nde_talf import VERIFIERS, SpeculativeDecoder

def files():
    modules = dict(sys.modules).items()
    return {module.__file__ for name, module in modules if name.startswith("nde_talf.")}

assert Delayed and LMDrafter and SpeculativeDecoder and VERIFIERS["specinfer"]
read = files()
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1)
target, draft = (
    CausalModel(LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))) for _ in range(2)
)
decoder = SpeculativeDecoder(target, LMDrafter(draft), Delayed(Action(2, 1, 1)), "specinfer")
before, ran = files(), set()
steps = decoder.stream([1, 2, 3], SamplingSetting(0.8), Rng.seeded(0))
sys.setprofile(lambda frame, event, argument: ran.add(frame.f_code.co_filename))
assert next(steps) and next(steps)
sys.setprofile(None)
print(*(read | (files() - before) | (files() & ran)))
"""


def tokens(file: Path) -> int:
    """Count the tokens of a file but for comments, layout and strings that stand alone."""
    count, alone = 0, True
    with file.open("rb") as opened:
        for token in tokenize.tokenize(opened.readline):
            count += token.type not in _LAYOUT and not (alone and token.type == tokenize.STRING)
            alone = token.type in _LAYOUT
    return count


def modules_of_a_step() -> dict[Path, int]:
    """Run one step in a process of its own; return the files of a step, with their tokens."""
    ran = subprocess.run([sys.executable, "-c", _STEP], capture_output=True, text=True, check=True)
    sizes = {Path(file): tokens(Path(file)) for file in ran.stdout.split()}
    return {file: size for file, size in sizes.items() if size}  # empty packages are no reading


def test_a_default_step_is_read_in_an_afternoon():
    sizes = modules_of_a_step()
    listed = "\n".join(f"{size:7,} {file}" for file, size in sizes.items())
    assert len(sizes) <= MODULES and sum(sizes.values()) <= TOKENS, listed


if __name__ == "__main__":
    found = modules_of_a_step()
    for file, size in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{size:7,} {file}")
    print(f"{sum(found.values()):7,} in {len(found)} modules")
