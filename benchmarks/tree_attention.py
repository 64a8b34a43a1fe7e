"""Tree attention in training against running branches one by one: seconds and peak memory of a
forward and a backward pass of a head over the trees after every token of one row.

`python -m benchmarks.tree_attention` (about three minutes; L = 2048, k = 4, depth 3, a small head).

- trees: `EagleHead.tree_features`, all nodes of a depth and all roots together.
- one path at a time: the path to every node on its own, all roots together; what is shared between
  paths is computed again. With full score matrices, as HASS computes its sequences, and in the same
  small parts as `trees`.
- one root at a time: every path of every root as one plain causal sequence with its prefix. Run at
  a few roots, spread evenly, and extrapolated to all of them.

None of them holds a mask of [L·N, L·N]; its size is given for comparison. Memory is a process's
peak minus what it held before the pass.
"""

import argparse
import json
import resource
import subprocess
import sys

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.timing import interleaved, report
from nde_talf.data.traces.budget import size
from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training import tree_attention
from nde_talf.draft_training.head import EagleHead
from nde_talf.draft_training.tree_attention import TreeLevel

METHODS = (
    "trees",
    "one path at a time, full scores",
    "one path at a time, in parts",
    "one root at a time",
)
PARTS = tree_attention.QUERIES


class Case:
    """One row of random tokens with random trees after every token; the loss is a random weighting
    of all node outputs.
    """

    def __init__(self, length: int, k: int, depth: int, hidden: int, some: int):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=2 * length,
        )  # fmt: skip
        self.head = EagleHead(CausalModel(LlamaForCausalLM(config), "random"))
        self.tokens, self.features = torch.randint(256, (1, length)), torch.randn(1, length, hidden)
        self.roots, self.k = torch.arange(1, length), k
        shape = (1, length - 1, k)
        self.levels = [
            TreeLevel(torch.randint(256, shape), torch.randint(k if d else 1, shape))
            for d in range(depth - 1)
        ]
        self.weights = [torch.randn(1, length - 1, k, hidden) for _ in self.levels]
        self.some = self.roots[:: max(1, len(self.roots) // some)]

    def path(self, depth: int, node: int) -> list[Tensor]:
        """Tokens [R] from depth 1 down to node `node` at `depth`, for all roots."""
        tokens, at = [], torch.full((1, len(self.roots), 1), node)
        for level in reversed(self.levels[:depth]):
            tokens.append(level.tokens.gather(2, at)[..., 0])
            at = level.parents.gather(2, at)
        return tokens[::-1]

    def run(self, method: str) -> None:
        """One forward and backward pass; the gradients stay on the head."""
        self.head.zero_grad()
        if method == METHODS[0]:
            outputs = self.head.tree_features(self.tokens, self.features, self.roots, self.levels)[
                1:
            ]
            sum(
                (output * weight).sum()
                for output, weight in zip(outputs, self.weights, strict=True)
            ).backward()
        elif method in METHODS[1:3]:
            tree_attention.QUERIES = {"cpu": 1 << 30} if method == METHODS[1] else PARTS
            for depth, node in self.nodes():
                chain = [
                    TreeLevel(t[..., None], torch.zeros_like(t)[..., None])
                    for t in self.path(depth, node)
                ]
                output = self.head.tree_features(self.tokens, self.features, self.roots, chain)[-1]
                (output[:, :, 0] * self.weights[depth - 1][:, :, node]).sum().backward()
            tree_attention.QUERIES = PARTS
        else:
            for depth, node in self.nodes():
                path = torch.stack(self.path(depth, node), -1)[0]
                for root in self.some.tolist():
                    output = self.plain(root, path[root - 1])
                    (output * self.weights[depth - 1][0, root - 1, node]).sum().backward()

    def nodes(self) -> list[tuple[int, int]]:
        return [(depth, node) for depth in range(1, len(self.levels) + 1) for node in range(self.k)]

    def plain(self, root: int, path: Tensor) -> Tensor:
        """The head's output [H] after `path` [depth] after token `root`: a causal pass for the
        prefix and for each token.
        """
        tokens, inputs = torch.cat([self.tokens[0, 1 : root + 1], path]), self.features[0, :root]
        while True:
            count = len(inputs)
            outputs = self.head(
                tokens[None, :count], torch.arange(count)[None], None, None, inputs[None]
            )[0]
            if count == len(tokens):
                return outputs[-1]
            inputs = torch.cat([inputs, outputs[-1:]])


def peak(case: Case, method: str) -> int:
    """Bytes of this process's peak that one pass added."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    case.run(method)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--roots", type=int, default=4, help="at which one root at a time is run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--memory-of", choices=METHODS, help="print one method's peak memory and stop"
    )
    options = parser.parse_args()
    quiet()
    case = Case(options.length, options.k, options.depth, options.hidden, options.roots)
    if options.memory_of:
        print(json.dumps(peak(case, options.memory_of)))
        return
    arguments = [
        f"--{name}={getattr(options, name)}" for name in ("length", "k", "depth", "hidden", "roots")
    ]
    memory = {}
    for method in METHODS:
        command = [
            sys.executable,
            "-m",
            "benchmarks.tree_attention",
            *arguments,
            f"--memory-of={method}",
        ]
        memory[method] = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[
                -1
            ]
        )
    times = interleaved(
        {method: lambda method=method: case.run(method) for method in METHODS}, options.repeats
    )
    for clock in (times.seconds, times.cpu):
        clock[METHODS[3]] *= len(case.roots) / len(case.some)
    rows = [
        [method, times.seconds[method]]
        + [own[method] / own[METHODS[0]] for own in (times.seconds, times.cpu)]
        + [size(memory[method])]
        for method in METHODS
    ]
    mask = (options.length * (1 + options.k * (options.depth - 1))) ** 2 * 4
    rows.append(["(one [L·N, L·N] mask of floats)", "", "", "", size(mask)])
    columns = [
        "computation",
        "seconds, forward and backward",
        "times `trees`",
        "by CPU time",
        "peak memory",
    ]
    command = " ".join(["python -m benchmarks.tree_attention", *arguments])
    report("tree_attention", command, columns, rows, [times.note(f" ({METHODS[0]})")])


if __name__ == "__main__":
    main()
