"""Tokens a step of a greedy target by the draft's temperature: static delayed trees, and the
papers' policies.

`python -m benchmarks.draft_temperature [--run checkpoints/default]`. Counts of tokens, which other
work on the machine does not change; the setting AUTO of `nde_talf.decoding.setting` was chosen with
this table.
"""

import argparse
from pathlib import Path

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import torch

from benchmarks.timing import RESULTS
from nde_talf.data.text.pair import Pair
from nde_talf.decoding.actions import Action
from nde_talf.decoding.common.progress import console, track
from nde_talf.decoding.drafter import LMDrafter
from nde_talf.decoding.loop import SpeculativeDecoder
from nde_talf.decoding.policies.base import TreePolicy
from nde_talf.decoding.policies.delayed import Delayed
from nde_talf.decoding.sampling import Rng, SamplingSetting
from nde_talf.decoding.setting import AUTO, drafted_under
from nde_talf.evaluation.text import markdown
from nde_talf.pipelines.policy_table import POLICIES, make_policy

TREES = [
    Action(*tree)
    for tree in ((1, 0, 4), (1, 0, 8), (2, 0, 4), (4, 0, 4), (4, 0, 2), (2, 2, 2), (3, 0, 8))
]
NAMES = ("beam", "salf", "dynatree", "dyspec", "sequoia")
GREEDY = SamplingSetting(0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.3, 0.6, 1.0], help="of the draft"
    )
    parser.add_argument(
        "--name", default="draft_temperature", help="of the file in benchmarks/results"
    )
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    pair = Pair(options.run / "pair")
    target, draft = pair.models("cpu", "float32")
    prompts = [prompt.tokens for prompt in pair.prompts("test", options.prompts, "--prompts")]

    def figure(policy: TreePolicy, rule: str, temperature: float) -> str:
        decoder = SpeculativeDecoder(target, LMDrafter(draft), policy, rule, temperature)
        steps = [
            step
            for prompt in prompts
            for step in decoder.generate(prompt, options.new_tokens, GREEDY, Rng.seeded(0)).steps
        ]
        tokens, nodes = sum(len(step.tokens) for step in steps), sum(step.nodes for step in steps)
        return f"{tokens / len(steps):.2f} ({nodes / len(steps):.0f})"

    methods = {str(tuple(tree)): (Delayed(tree), "traversal") for tree in TREES}
    methods |= {name: (make_policy(name, {}), POLICIES[name].verifier) for name in NAMES}
    rows = [
        [
            name,
            *(figure(policy, rule, temperature) for temperature in options.temperatures),
            f"{drafted_under(AUTO, GREEDY, policy.trees).temperature:g}",
        ]
        for name, (policy, rule) in track(methods.items(), "greedy", len(methods), "method")
    ]
    header = [
        "method",
        *(f"draft at {temperature:g}" for temperature in options.temperatures),
        "auto",
    ]
    parts = [
        (
            f"`python -m benchmarks.draft_temperature --run checkpoints/{options.run.name}"
            f" --prompts {options.prompts} --new-tokens {options.new_tokens} --name {options.name}`"
        ),
        f"Tokens a step (nodes a tree) under a greedy target, {options.prompts} held-out prompts.",
        markdown(header, rows),
    ]
    (RESULTS / f"{options.name}.md").write_text("\n\n".join(parts).strip() + "\n")
    console.print("\n\n".join(parts))


if __name__ == "__main__":
    main()
