"""Ways to speculate inside vLLM, greedily, at one request and at four at a time.

`python -m benchmarks.engines [--run checkpoints/default]`, after `nde run` with a
selector of draft features (docs/serving.md). Compared are vLLM without speculation, with its own
draft_model and ngram, with the run's exported head, and with our proposer: lengths by a selector,
fixed ones and n-grams. An engine is a process, one at a time, and engines take turns, round by
round. All methods of our proposer share one engine, where they take turns by group of prompts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import CLOCKS, Timings, report
from nde_talf.data.engines.vllm import open_llm, sampling_params
from nde_talf.data.engines.vllm_speculation import draft_method, head_method, ngram_method
from nde_talf.data.text.pair import Pair, check_prompts
from nde_talf.decoding.common.bootstrap import ratio_of_totals, shown
from nde_talf.decoding.sampling import SamplingSetting
from nde_talf.in_vllm import KEY, Options, for_vllm
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.network import Selector

GREEDY, GROUP, LENGTHS, DRAFTED = SamplingSetting(0.0), 4, (2, 4, 8), 4
PLAIN, OURS = "vLLM, no speculation", "our proposer"
FIXED = f"{OURS}, fixed {DRAFTED}"
CONTROL = f"{FIXED} (A/A control)"
AT_ONCE = (1, GROUP)


def engines(run: Path, selector: Path, overhead_ms: float) -> dict[str, dict[str, dict]]:
    """By engine, and by method that it runs, the arguments of `vllm.LLM`.

    The engine opens with the last ones.
    """
    pair = Pair(run / "pair")
    draft = pair.where("draft")
    own = {f"{OURS}, fixed {length}": for_vllm(draft, tokens=length) for length in LENGTHS}
    own |= {
        CONTROL: own[FIXED],
        f"{OURS}, n-grams up to {DRAFTED}": for_vllm("ngram", tokens=DRAFTED),
    }
    own[f"{OURS}, selector, step overhead {overhead_ms:.1f} ms"] = for_vllm(
        draft, selector, 8, overhead_ms=overhead_ms
    )
    own[f"{OURS}, selector"] = for_vllm(draft, selector, 8)
    theirs = {"draft_model": draft_method(draft, DRAFTED), "ngram": ngram_method(DRAFTED)}
    alone = {
        f"vLLM's {name} {DRAFTED}": {"speculative_config": method}
        for name, method in theirs.items()
    }
    if (head := run / "draft" / "export").is_dir():
        alone[f"our head {DRAFTED}"] = {"speculative_config": head_method(str(head), DRAFTED)}
    return {
        PLAIN: {PLAIN: {}},
        OURS: own,
        **{name: {name: method} for name, method in alone.items()},
    }


def work(file: Path) -> None:
    """A process: one engine and its methods; writes what it found to the file it was given."""
    given = json.loads(file.read_text())
    methods, groups = given["methods"], given["groups"]
    longest = max(len(prompt) for group in groups for prompt in group) + given["new_tokens"] + 9
    options = {
        "disable_log_stats": False,
        "enable_prefix_caching": False,
        **list(methods.values())[-1],
    }
    llm = open_llm(given["target"], "float32", longest, **options)
    makers = {
        name: proposals(llm, asked)
        for name, asked in methods.items()
        if KEY in asked.get("additional_config", {})
    }

    def timed(name: str, group: list[list[int]], at_once: int) -> dict[str, Any]:
        if name in makers:
            (proposer,) = llm.collective_rpc(lambda worker: worker.model_runner.drafter)
            proposer.proposals = makers[name]
        before, wall, cpu, texts = counts(llm), time.perf_counter(), time.process_time(), []
        for start in range(0, len(group), at_once):
            asked = [{"prompt_token_ids": prompt} for prompt in group[start : start + at_once]]
            outputs = llm.generate(
                asked, sampling_params(GREEDY, given["new_tokens"], None), use_tqdm=False
            )
            texts += [list(output.outputs[0].token_ids) for output in outputs]
        seconds = [time.perf_counter() - wall, time.process_time() - cpu]
        return {
            "texts": texts,
            "seconds": seconds,
            "counts": [b - a for a, b in zip(before, counts(llm), strict=True)],
        }

    for name in methods:  # what is compiled late, and the prices of a selector
        for at_once in AT_ONCE:
            timed(name, groups[0], at_once)
    order, found = np.random.default_rng(given["turn"]), {}
    for number, group in enumerate(groups):
        for at_once in AT_ONCE:
            for name in order.permutation(list(methods)).tolist():
                found.setdefault(f"{name}|{at_once}", {})[number] = timed(name, group, at_once)
    file.write_text(json.dumps(found))


def proposals(llm: Any, asked: dict) -> Any:
    """Return what our proposer drafts under the arguments `asked`, in an engine that has one."""
    (proposer,) = llm.collective_rpc(lambda worker: worker.model_runner.drafter)
    options, most = proposer.options, proposer.max_tokens
    proposer.options = Options.read(asked["additional_config"][KEY])
    proposer.max_tokens = asked["speculative_config"]["num_speculative_tokens"]
    proposer.load_model(None)
    proposer.options, proposer.max_tokens = options, most
    return proposer.proposals


def counts(llm: Any) -> list[int]:
    """So far: drafted tokens and accepted ones."""
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    return [
        sum(metric.value for metric in llm.get_metrics() if metric.name == name) for name in names
    ]


def run_engine(given: dict) -> dict[str, dict[int, dict]]:
    """Return the result of `work`, run in another process."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "task.json"
        file.write_text(json.dumps(given))
        command = [sys.executable, "-m", "benchmarks.engines", "--work", str(file)]
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(
                f"{', '.join(given['methods'])} ended with status"
                f" {done.returncode}:\n{done.stderr[-3000:]}"
            )
        return {
            name: {int(g): one for g, one in own.items()}
            for name, own in json.loads(file.read_text()).items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("checkpoints/default"))
    parser.add_argument(
        "--selector", type=Path, default=Path("checkpoints/served/selector/export/traversal")
    )
    parser.add_argument("--prompts", type=int, default=16, help=f"a multiple of {GROUP}")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work)
    pair, selector = Pair(options.run / "pair"), options.selector
    found = pair.prompts("test", options.prompts // GROUP * GROUP, "--prompts")
    check_prompts(
        found, target := pair.target("cpu", "float32"), options.new_tokens + 9, target.max_context
    )
    tokens = [prompt.tokens for prompt in found]
    given = {"target": pair.where("target"), "new_tokens": options.new_tokens}
    given["groups"] = [tokens[start : start + GROUP] for start in range(0, len(tokens), GROUP)]
    table = Selector.from_pretrained(selector).table
    overhead, rounds = 0.0, list[dict[str, dict[int, dict]]]()
    for turn in range(options.rounds):
        rounds.append({})
        for engine in engines(options.run, selector, 0.0):
            methods = engines(options.run, selector, overhead)[engine]
            rounds[-1] |= run_engine({**given, "methods": methods, "turn": turn})
            if engine == PLAIN and not turn and table is not None:
                overhead = step_overhead(rounds[0][f"{PLAIN}|1"], table)
    columns = ["method", "at once", "tokens a step", "drafted a step", "tokens/s"]
    columns += ["speedup", "speedup, CPU time", "same text"]
    rows, notes = rows_of(rounds)
    notes.append(
        f"Without speculation a step of vLLM takes {overhead:.1f} ms more than the latency table's"
        " pass over one token."
    )
    report("engines", columns, rows, notes)


def step_overhead(plain: dict[int, dict], table: LatencyTable) -> float:
    """Milliseconds of a step of plain decoding, one request at a time, beyond the target's pass."""
    seconds = sum(one["seconds"][0] for one in plain.values())
    tokens = sum(len(text) for one in plain.values() for text in one["texts"])
    return max(0.0, 1000 * (seconds / tokens - table.target[0][0]))


def rows_of(rounds: list[dict[str, dict[int, dict]]]) -> tuple[list[list], list[str]]:
    """A row for each method and concurrency, and what the A/A control says.

    Seconds are medians over the rounds of a group of prompts; texts and counts are those of the
    first round.
    """
    rows, notes = [], []
    times = {
        name: np.median([[one["seconds"] for one in turn[name].values()] for turn in rounds], 0)
        for name in rounds[0]
    }  # [groups, 2]
    for key, groups in rounds[0].items():
        name, at_once = key.split("|")
        texts = [text for one in groups.values() for text in one["texts"]]
        drafted, accepted = np.sum([one["counts"] for one in groups.values()], 0)
        written, base = sum(map(len, texts)), f"{PLAIN}|{at_once}"
        steps = written - accepted
        ratios = [shown(speedup(times, base, key, clock)) for clock in (0, 1)]
        plain = [text for one in rounds[0][base].values() for text in one["texts"]]
        same = np.mean([a == b for a, b in zip(texts, plain, strict=True)])
        speed = f"{written / times[key][:, 0].sum():.0f}"
        counted = f"{written / steps:.2f}", f"{drafted / steps:.2f}"
        rows.append([name, at_once, *counted, speed, *ratios, f"{same:.0%}"])
    for at_once in AT_ONCE:
        same = f"{FIXED}|{at_once}", f"{CONTROL}|{at_once}"
        control = {name: speedup(times, *same, clock) for clock, name in enumerate(CLOCKS)}
        notes.append(Timings({}, {}, control).note(f" at {at_once} at once"))
    return rows, notes


def speedup(times: dict[str, np.ndarray], base: str, name: str, clock: int) -> list[float]:
    """Divide the seconds of two methods over the same groups: [ratio, low, high]."""
    ones = np.ones(len(times[base]))
    return ratio_of_totals(np.stack([times[base][:, clock], ones, times[name][:, clock], ones], 1))


if __name__ == "__main__":
    main()
