"""What choosing a tree costs the decode loop: the selector's overhead in a step, and the same with
everything in cache.

`python -m benchmarks.selector_step [--run checkpoints/default]`, after `python -m pipelines.run`.
"""

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.timing import report
from nde_talf.data.text.pair import Pair
from nde_talf.data.traces.settings import SETTINGS
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.policy import NeuralPolicy
from nde_talf.selector.selector import Selector


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--selector", default="traversal")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--settings", nargs="+", default=["t0.6", "t1.0"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    pair = Pair(options.run / "pair")
    target, draft = pair.models("cpu", "float32")
    selector = Selector.from_pretrained(options.run / "selector" / "export" / options.selector)
    # Its overhead is measured also where the static tree was exported, which has none.
    selector.schema = replace(selector.schema, learned=(True,) * len(selector.schema.learned))
    policy = NeuralPolicy(selector, LatencyTable.load(options.run / "latency" / "table.json"))
    decoder = SpeculativeDecoder(target, LMDrafter(draft), policy, policy.verifier)
    prompts = [prompt.tokens for prompt in pair.prompts("test", options.prompts, "--prompts")]
    rows = []
    for name in options.settings:
        own, total = [], []
        decoder.generate(prompts[0], options.new_tokens, SETTINGS[name], Rng.seeded(0))  # warm-up
        for seed, prompt in enumerate(prompts):
            for step in decoder.generate(
                prompt, options.new_tokens, SETTINGS[name], Rng.seeded(seed)
            ).steps:
                own.append(step.seconds["policy"])
                total.append(sum(step.seconds.values()))
        warm = _in_cache(policy, decoder, prompts[0], SETTINGS[name])
        medians = (1e6 * statistics.median(x) for x in (own, warm, total))
        rows.append([str(SETTINGS[name]), len(own), *medians, sum(own) / sum(total)])
    columns = [
        "setting",
        "steps",
        "overhead in a step, µs",
        "the same, in cache, µs",
        "step, µs",
        "fraction of all steps' time",
    ]
    report(
        "selector_step", f"python -m benchmarks.selector_step --run {options.run}", columns, rows
    )


def _in_cache(
    policy: NeuralPolicy, decoder: SpeculativeDecoder, prompt: list[int], setting: SamplingSetting
) -> list[float]:
    """Seconds of choosing for one and the same root, again and again."""
    seen, choose = [], policy.choose

    def remember(*root):
        seen.append(root)
        return choose(*root)

    policy.choose = remember
    decoder.generate(prompt, 8, setting, Rng.seeded(0))
    policy.choose = choose
    seconds = []
    with torch.inference_mode():
        for _ in range(500):
            started = time.perf_counter()
            choose(*seen[-1])
            seconds.append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    main()
