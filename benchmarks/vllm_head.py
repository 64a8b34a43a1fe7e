"""The exported head inside vLLM, greedily, against vLLM's own ways to speculate (n-gram, draft
model) and vLLM without any; and against our loop with the same head and the same chain.

Each in a process of its own; requests one at a time; the processes take turns, round by round.

`python -m benchmarks.vllm_head [--run checkpoints/default]`, after `python -m pipelines.run`; about
six minutes on two cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from benchmarks.timing import report
from nde_talf.data.engines.vllm_speculation import (
    Speculated,
    SpeculatingLLM,
    draft_method,
    head_method,
    ngram_method,
)
from nde_talf.data.text.pair import Pair, check_prompts
from nde_talf.decoding.common.bootstrap import interval, samples, shown
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.evaluation.protocol import NOT_TRUSTED

GREEDY = SamplingSetting(0.0)
PLAIN, HEAD, LOOP = "vLLM, no speculation", "vLLM, our head", "our loop, our head"
AGAIN = f"{PLAIN} (A/A control)"


def tasks(run: Path, drafted: int) -> dict[str, dict]:
    """What each process does: `method` is vLLM's (None: no speculation), or "loop" for ours."""
    pair = Pair(run / "pair")
    models = {
        "target": pair.where("target"),
        "head": str(run / "draft" / "export"),
        "drafted": drafted,
    }
    methods = {
        PLAIN: None,
        AGAIN: None,
        HEAD: head_method(models["head"], drafted),
        "vLLM, n-gram": ngram_method(drafted),
        "vLLM, draft model": draft_method(pair.where("draft"), drafted),
        LOOP: "loop",
    }
    return {name: {**models, "method": method} for name, method in methods.items()}


class Loop:
    """Our loop with the head, one path of `drafted` tokens, measured as `SpeculatingLLM` is."""

    def __init__(self, target: str, head: str, drafted: int):
        from nde_talf.decoding.actions import Action
        from nde_talf.decoding.loop import SpeculativeDecoder
        from nde_talf.decoding.model import CausalModel
        from nde_talf.decoding.policies.delayed import Delayed
        from nde_talf.decoding.registry import VERIFIERS
        from nde_talf.decoding.sampling import Rng
        from nde_talf.draft_training.head_drafter import EagleDrafter

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        model = CausalModel.load(target)
        drafter = EagleDrafter.from_pretrained(head, model)
        self.decoder = SpeculativeDecoder(
            model, drafter, Delayed(Action(1, 0, drafted)), VERIFIERS["naive"]
        )
        self.drafted, self.rng = drafted, Rng.seeded(0)

    def generate(
        self, prompts: list[list[int]], new_tokens: int, setting: SamplingSetting
    ) -> list[Speculated]:
        found = []
        for prompt in prompts:
            started = time.perf_counter()
            generation = self.decoder.generate(prompt, new_tokens, setting, self.rng)
            seconds = time.perf_counter() - started
            accepted = [sum(step.tau > i for step in generation.steps) for i in range(self.drafted)]
            found.append(
                Speculated(
                    generation.tokens,
                    len(generation.steps),
                    len(generation.steps),
                    accepted,
                    seconds,
                )
            )
        return found


def work(task: dict, prompts: list[list[int]], new_tokens: int) -> None:
    """A process: load, warm up, then one round of all prompts for every line of standard input.

    Answers in lines of JSON.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    try:
        if task["method"] == "loop":
            model = Loop(task["target"], task["head"], task["drafted"])
        else:
            model = SpeculatingLLM(
                task["target"],
                task["method"],
                max(map(len, prompts)) + new_tokens + task["drafted"] + 1,
            )
        for _ in range(2):  # the first request compiles what is compiled late
            model.generate(prompts[:2], new_tokens, GREEDY)
    except Exception as error:  # whatever keeps vLLM from running a method is that method's result
        why = next(iter(str(error).strip().splitlines()), "").replace("|", "/")[:200]
        answers.write(json.dumps({"failed": f"{type(error).__name__}: {why}"}) + "\n")
        return
    answers.write(json.dumps({"ready": True}) + "\n")
    for _ in sys.stdin:
        answers.write(
            json.dumps([asdict(one) for one in model.generate(prompts, new_tokens, GREEDY)]) + "\n"
        )


class Worker:
    """The process of one task. `failed`: why it does not run; None if it does."""

    def __init__(self, task: dict, file: Path, threads: int):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "NUMBA_NUM_THREADS": (
                "1"
            ),  # with several, vLLM's n-gram search took seconds a token on a busy machine
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
        }
        command = [
            sys.executable,
            "-m",
            "benchmarks.vllm_head",
            "--work",
            json.dumps(task),
            "--prompts-file",
            str(file),
        ]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        started = self._answer()
        self.failed = started.get("failed")

    def round(self) -> list[Speculated]:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return [Speculated(**one) for one in self._answer()]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def _answer(self):
        line = self.process.stdout.readline()
        return (
            json.loads(line)
            if line
            else {"failed": f"the process ended with status {self.process.wait()}"}
        )


def resampled(values: np.ndarray, figure) -> list[float]:
    """`figure` of values [prompts, ...], and its 95 % bootstrap interval over prompts."""
    return interval(
        figure(values), np.array([figure(values[draw]) for draw in samples(len(values))])
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--drafted", type=int, default=4, help="tokens drafted at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--prompts-file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        given = json.loads(options.prompts_file.read_text())
        return work(json.loads(options.work), given["prompts"], given["new_tokens"])
    if not (options.run / "draft" / "export").is_dir():
        parser.error(
            f"{options.run} has no trained head: run python -m pipelines.run first, or give another"
            " --run"
        )
    compare(options)


def compare(options: argparse.Namespace) -> None:
    pair = Pair(options.run / "pair")
    found = pair.prompts("test", options.prompts, "--prompts")
    target = pair.target("cpu", "float32")
    check_prompts(found, target, options.new_tokens + options.drafted + 1, target.max_context)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.json"
        file.write_text(
            json.dumps({"prompts": [one.tokens for one in found], "new_tokens": options.new_tokens})
        )
        workers = {
            name: Worker(task, file, options.threads)
            for name, task in tasks(options.run, options.drafted).items()
        }
        running = {name: worker for name, worker in workers.items() if not worker.failed}
        rounds = {name: [] for name in running}
        for turn in range(options.rounds):
            order = list(running)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                rounds[name].append(running[name].round())
        for worker in workers.values():
            worker.close()
    failed = {name: worker.failed for name, worker in workers.items() if worker.failed}
    rows = table(rounds, failed, options.drafted)
    sizes = ("prompts", "new_tokens", "drafted", "rounds", "threads")
    given = " ".join(f"--{name.replace('_', '-')} {getattr(options, name)}" for name in sizes)
    command = f"python -m benchmarks.vllm_head {given}"
    torch.set_num_threads(options.threads)  # as the processes had
    positions = [f"accepted at {i + 1}" for i in range(options.drafted)]
    doubt = (
        []
        if trusted(rounds)
        else [f"The A/A control's interval leaves 1: {NOT_TRUSTED}, and no speedup is claimed."]
    )
    report(
        "vllm_head",
        command,
        ["method", "tokens a pass", *positions, "tokens/s", "speedup", "same text"],
        rows,
        doubt,
    )


def speedup(rounds: dict[str, list[list[Speculated]]], name: str) -> list[float]:
    """[ratio, low, high] of plain decoding's seconds to those of `name`: medians over the rounds of
    a prompt, summed over the prompts, which are resampled.
    """
    seconds = [
        np.median([[one.seconds for one in turn] for turn in rounds[own]], 0)
        for own in (PLAIN, name)
    ]
    return resampled(np.stack(seconds, 1), lambda s: s[:, 0].sum() / s[:, 1].sum())


def trusted(rounds: dict[str, list[list[Speculated]]]) -> bool:
    """Whether plain decoding, timed under two names, is as fast as itself."""
    _, low, high = speedup(rounds, AGAIN)
    return low <= 1 <= high


def table(
    rounds: dict[str, list[list[Speculated]]], failed: dict[str, str], drafted: int
) -> list[list]:
    """A row a method.

    Counts are of the first round (all rounds are alike); seconds the median over the rounds of a
    prompt.
    """
    seconds = {
        name: np.median([[one.seconds for one in turn] for turn in turns], 0)
        for name, turns in rounds.items()
    }
    texts = {name: [one.tokens for one in turns[0]] for name, turns in rounds.items()}
    rows = []
    for name, turns in rounds.items():
        first = turns[0]
        counts = np.array(
            [[one.passes, one.drafts, *(one.accepted or [0] * drafted)] for one in first], float
        )
        written = np.array([len(one.tokens) for one in first], float)
        passes = resampled(counts, lambda c: 1 + c[:, 2:].sum() / c[:, 0].sum())
        accepted = ["–"] * drafted
        if counts[:, 1].any():
            accepted = [
                f"{counts[:, 2 + i].sum() / counts[:, 1].sum():.3f}" for i in range(drafted)
            ]
        speed = written.sum() / seconds[name].sum()
        ratio = speedup(rounds, name)
        same = statistics.fmean(
            text == other for text, other in zip(texts[name], texts[PLAIN], strict=True)
        )
        rows.append([name, shown(passes), *accepted, f"{speed:.0f}", shown(ratio), f"{same:.0%}"])
    return rows + [
        [name, f"does not run: {why}", *["–"] * drafted, "–", "–", "–"]
        for name, why in failed.items()
    ]


if __name__ == "__main__":
    main()
