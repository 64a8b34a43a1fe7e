"""Peak memory of speculative decoding over autoregressive decoding at 1,500 generated tokens
(DynaTree paper, Table 6).

`python -m benchmarks.memory [--run checkpoints/default]`. Every method runs in a process of its
own, which loads only the models it needs. Two figures: what the operating system says the process
held at most, interpreter and libraries included; and the tensors that stay, weights and caches of
both models.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import torch

from benchmarks.timing import report
from nde_talf.data.text.pair import Pair
from nde_talf.decoding.actions import Action
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.policies.delayed import Autoregressive, Delayed
from nde_talf.decoding.policies.dynatree import DynaTree
from nde_talf.decoding.policies.fixed import Shaped, fixed_shape
from nde_talf.decoding.rules import VERIFIERS
from nde_talf.decoding.sampling import Rng, SamplingSetting

METHODS = {
    "autoregressive": (Autoregressive, "greedy"),
    "linear, 5": (lambda: Shaped(fixed_shape(5, 1, 5), "top_k"), "greedy"),
    "fixed tree, 5 x 2": (lambda: Shaped(fixed_shape(5, 2, 64), "top_k"), "greedy"),
    "DynaTree": (DynaTree, "greedy"),
    "delayed (4, 2, 4), SpecInfer": (lambda: Delayed(Action(4, 2, 4)), "specinfer"),
}
PAPER = {"linear, 5": "+3.31 %", "fixed tree, 5 x 2": "+3.29 %", "DynaTree": "+3.32 %"}


def measure(run: Path, method: str, tokens: int) -> dict[str, float]:
    """Bytes of one method, in this process."""
    make, rule = METHODS[method]
    pair, policy = Pair(run / "pair"), make()
    target, draft = (
        (pair.target("cpu", "float32"), None)
        if policy.trees == "none"
        else pair.models("cpu", "float32")
    )
    drafter = LMDrafter(draft) if draft else None
    decoder = SpeculativeDecoder(target, drafter, policy, VERIFIERS[rule], SamplingSetting(0.5))
    prompt = pair.prompts("test", 1, "run")[0].tokens
    tokens = min(tokens, decoder.max_context - len(prompt))
    generation = decoder.generate(prompt, tokens, SamplingSetting(0.0), Rng.seeded(0))
    sessions = [decoder.session, *([decoder.drafting.session] if drafter else [])]
    return {
        "tokens": len(generation.tokens),
        "peak": generation.stats.peak_bytes,
        "weights": sum(
            w.nbytes for model in (target, draft) if model for w in model.module.parameters()
        ),
        "caches": sum(session.cache.bytes for session in sessions),
        "target_cache": decoder.session.cache.bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument(
        "--method", choices=list(METHODS), help="measure this one alone and print it as JSON"
    )
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    if options.method:
        print(json.dumps(measure(options.run, options.method, options.tokens)))
        return
    found = {}
    for method in METHODS:
        command = [
            sys.executable,
            "-m",
            "benchmarks.memory",
            "--run",
            str(options.run),
            "--method",
            method,
        ]
        done = subprocess.run(
            [*command, "--tokens", str(options.tokens)], capture_output=True, text=True, check=True
        )
        found[method] = json.loads(done.stdout.splitlines()[-1])
    plain = found["autoregressive"]

    def more(figures: dict[str, float], name: str) -> str:
        return f"{figures[name] / 1e6:.1f} ({100 * (figures[name] / plain[name] - 1):+.1f} %)"

    columns = [
        "method",
        "tokens",
        "peak of the process, MB",
        "target's cache, MB",
        "all caches, MB",
        "all weights, MB",
        "DynaTree paper",
    ]
    table = [
        [
            method,
            own["tokens"],
            *(more(own, name) for name in ("peak", "target_cache", "caches", "weights")),
            PAPER.get(method, "–"),
        ]
        for method, own in found.items()
    ]
    report(
        "memory",
        f"python -m benchmarks.memory --run checkpoints/{options.run.name}",
        columns,
        table,
    )


if __name__ == "__main__":
    main()
