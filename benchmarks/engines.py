"""Ways to speculate inside vLLM, greedily, at 1, 4 and 16 requests at a time.

`python -m benchmarks.engines [--run checkpoints/small]`, after `nde run` or with the shipped pair,
where vLLM is. Compared are vLLM without speculation, with the run's exported head, with its own
draft_model and ngram, and with our proposer. An engine is a process, one at a time, and engines
take turns, round by round; the A/A control is plain vLLM in two of them. All methods of our
proposer share one engine. So many requests are always under way: the next is sent when one has
ended.
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

from benchmarks.lossless import ngram_method
from benchmarks.timing import CLOCKS, Timings, parser_of, report
from nde_talf.data.engines.vllm import open_llm, sampling_params, stops_of
from nde_talf.data.engines.vllm_speculation import draft_method, head_method
from nde_talf.data.text.pair import Pair
from nde_talf.decoding.common.bootstrap import interval, samples, shown
from nde_talf.decoding.sampling.rng import SamplingSetting
from nde_talf.integrations.vllm import KEY, for_vllm

AT_ONCE, DRAFTED, ROOM, ROUNDS = (1, 4, 16), 4, 9, 3
PLAIN, OURS = "vLLM, no speculation", "our proposer"
CONTROL = f"{PLAIN} (A/A control)"


def engines(run: Path) -> dict[str, dict[str, dict]]:
    """By engine, and by method that it runs, the arguments of `vllm.LLM`.

    The engine opens with the last ones.
    """
    pair = Pair(run / "pair")
    draft, head = pair.where("draft"), str(run / "draft" / "export")
    methods = {
        f"our head {DRAFTED}": head_method(head, DRAFTED),
        f"our head {DRAFTED // 2}": head_method(head, DRAFTED // 2),
        f"vLLM's draft_model {DRAFTED}": draft_method(draft, DRAFTED),
        f"vLLM's ngram {DRAFTED}": ngram_method(DRAFTED),
    }
    found: dict[str, dict[str, dict]] = {PLAIN: {PLAIN: {}}, CONTROL: {CONTROL: {}}}
    found |= {name: {name: {"speculative_config": method}} for name, method in methods.items()}
    found[OURS] = {
        f"{OURS}, n-grams up to {DRAFTED}": for_vllm("ngram", tokens=DRAFTED),
        f"{OURS}, fixed {DRAFTED}": for_vllm(draft, tokens=DRAFTED),
    }
    return found


def work(file: Path) -> None:
    """A process: one engine and its methods; writes what it found to the file it was given."""
    given = json.loads(file.read_text())
    methods, prompts = given["methods"], given["prompts"]
    longest, ends = max(map(len, prompts)) + given["new_tokens"] + ROOM, stops_of(given["target"])
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

    def timed(name: str, at_once: int, prompts: list[list[int]]) -> dict[str, Any]:
        if name in makers:
            (proposer,) = llm.collective_rpc(lambda worker: worker.model_runner.drafter)
            proposer.proposals = makers[name]
        before = counts(llm)
        texts, seconds = served(llm.llm_engine, prompts, at_once, given["new_tokens"], ends)
        counted = [b - a for a, b in zip(before, counts(llm), strict=True)]
        return {"texts": texts, "seconds": seconds, "counts": counted}

    for name in methods:  # what is compiled late
        for at_once in AT_ONCE:
            timed(name, at_once, prompts[:at_once])
    order = np.random.default_rng(given["turn"])
    found = {
        f"{name}|{at_once}": timed(name, at_once, prompts)
        for at_once in AT_ONCE
        for name in order.permutation(list(methods)).tolist()
    }
    file.write_text(json.dumps(found))


def served(
    engine: Any, prompts: list[list[int]], at_once: int, new_tokens: int, ends: list[int]
) -> tuple[list[list[int]], list[list[float]]]:
    """Continue prompts, `at_once` of them at any time: texts, and [wall, CPU] seconds of each.

    A step's time is shared by the requests that were under way, so that all add up to the whole.
    """
    params = sampling_params(SamplingSetting(0.0), new_tokens, None, stop_token_ids=ends)
    texts, seconds = [list[int]() for _ in prompts], np.zeros((len(prompts), 2))
    waiting, running = list(range(len(prompts)))[::-1], list[int]()
    clock = np.array([time.perf_counter(), time.process_time()])
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(waiting.pop())
            asked = {"prompt_token_ids": prompts[running[-1]]}
            engine.add_request(str(running[-1]), asked, params)
        ended = [output for output in engine.step() if output.finished]
        now = np.array([time.perf_counter(), time.process_time()])
        seconds[running] += (now - clock) / len(running)
        clock = now
        for output in ended:
            running.remove(number := int(output.request_id))
            texts[number] = list(output.outputs[0].token_ids)
    return texts, seconds.tolist()


def proposals(llm: Any, asked: dict) -> Any:
    """Return what our proposer drafts under the arguments `asked`, in an engine that has one."""
    (proposer,) = llm.collective_rpc(lambda worker: worker.model_runner.drafter)
    draft, most = proposer.draft, proposer.max_tokens
    proposer.draft = asked["additional_config"][KEY]
    proposer.max_tokens = asked["speculative_config"]["num_speculative_tokens"]
    proposer.load_model(None)
    proposer.draft, proposer.max_tokens = draft, most
    return proposer.proposals


def counts(llm: Any) -> list[int]:
    """So far: drafted tokens and accepted ones."""
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    return [
        sum(metric.value for metric in llm.get_metrics() if metric.name == name) for name in names
    ]


def run_engine(given: dict) -> dict[str, dict]:
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
        return json.loads(file.read_text())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--run", type=Path, default=Path("checkpoints/small"))
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work)
    pair = Pair(options.run / "pair")
    given = {"target": pair.where("target"), "new_tokens": options.new_tokens}
    found = pair.prompts("test", options.prompts, "--prompts")
    given["prompts"] = [prompt.tokens for prompt in found]
    rounds = list[dict[str, dict]]()
    for turn in range(ROUNDS):
        rounds.append({})
        for methods in engines(options.run).values():
            rounds[-1] |= run_engine({**given, "methods": methods, "turn": turn})
    columns = ["method", "at once", "tokens a step", "drafted a step", "tokens/s"]
    columns += ["speedup", "speedup, CPU time", "same text"]
    rows, controls = rows_of(rounds)
    report("engines", columns, rows, controls)


def rows_of(rounds: list[dict[str, dict]]) -> tuple[list[list], list[str]]:
    """A row for each method and load, and what the A/A control says.

    Texts and counts are from the first round.
    """
    rows, notes = [], []
    times = {key: np.array([turn[key]["seconds"] for turn in rounds]) for key in rounds[0]}
    for key in sorted(times, key=lambda key: int(key.split("|")[1])):
        one, (name, load) = rounds[0][key], key.split("|")
        base = f"{PLAIN}|{load}"
        ratios = [speedup(times[base][..., clock], times[key][..., clock]) for clock in (0, 1)]
        if name == CONTROL:
            control = dict(zip(CLOCKS, ratios, strict=True))
            notes.append(Timings({}, {}, control).note(f" at {load} at once"))
            continue
        texts, (drafted, accepted) = one["texts"], one["counts"]
        written = sum(map(len, texts))
        steps = written - accepted
        counted = f"{written / steps:.2f}", f"{drafted / steps:.2f}"
        speed = f"{written / times[key][..., 0].sum(1).mean():.0f}"
        same = np.mean([a == b for a, b in zip(texts, rounds[0][base]["texts"], strict=True)])
        rows.append([name, load, *counted, speed, *map(shown, ratios), f"{same:.0%}"])
    return rows, notes


def speedup(base: np.ndarray, other: np.ndarray) -> list[float]:
    """Divide two methods' seconds [rounds, prompts]: [ratio, low, high].

    Rounds are resampled, since a process differs from the next, and prompts.
    """
    turns, count = base.shape
    rounds, prompts = samples(turns, 1).T, samples(count)
    sums = [
        np.take_along_axis(each[:, prompts].sum(-1), rounds, 0).sum(0) for each in (base, other)
    ]
    return interval(base.sum() / other.sum(), sums[0] / sums[1], count)


if __name__ == "__main__":
    main()
