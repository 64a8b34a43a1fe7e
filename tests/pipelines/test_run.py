"""The command line, really run: the whole pipeline, skipping, resuming after kills, and what bad
input is told.
"""

import json
import os
import re
import signal
import time
from unittest.mock import Mock

import pytest

import nde_talf.pipelines.commands.recommend
from nde_talf import CausalModel, EagleDrafter, Selector
from nde_talf.decoding.common.checksums import file_digest
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from nde_talf.pipelines.commands.recommend import RecommendConfig
from nde_talf.pipelines.config.command_line import composed
from tests.pipelines.launch import finish, printed_by, said, start
from tests.pipelines.micro import command
from tests.pipelines.refusals import refused

pytestmark = pytest.mark.slow

EXPORTS = (
    "pair/target/model.safetensors",
    "pair/draft/model.safetensors",
    "pair/prompts.jsonl",
    "draft/export",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, printed_by(folder)


def digests(path):
    """Checksums of a file, or of a folder's files by name."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): file_digest(file) for file in files}


def test_one_command_makes_everything(finished):
    folder, printed = finished
    out = folder / "checkpoints/default"
    results = json.loads((out / "report/results.json").read_text())
    assert list(results["tables"]) == ["T=0.6", "T=1"]
    for setting, rows in results["tables"].items():
        methods, same = [row["method"] for row in rows], results["titles"][setting]["same"]
        assert methods[:2] == [BASELINE, CONTROL] and len(methods) + len(same) == 9
        assert sum("selector" in name for name in (*methods, *same)) == 2
        assert any("TALF" in name for name in methods)
    page = (out / "report/index.html").read_text()
    assert "<img src=" in page and "How it was measured" in page
    assert not re.search(r'(src|href)="http', page)
    assert "index.html" in printed and "speed-up" in printed
    offline = json.loads((out / "selector/offline.json").read_text())
    assert len(offline["traversal"]["measured"]["settings"]) == 2
    for name in ("traversal", "specinfer"):
        Selector.from_pretrained(out / "selector/export" / name)
    EagleDrafter.from_pretrained(out / "draft/export", CausalModel.load(out / "pair/target"))
    assert len(list((out / "wandb").glob("offline-run-*"))) == 6


@pytest.mark.parametrize("policy,drafter", [("traversal", "lm"), (None, "head")])
def test_a_finished_run_streams_text(finished, policy, drafter):
    folder, _ = finished
    prompt = "def it's(x): # {a: [1]}, b=2, ${run} \\"
    here = ["run=default", f"paths.checkpoints={folder}/checkpoints"]
    asked = [f"prompt={prompt}", f"drafter={drafter}", "new_tokens=20", *here]
    asked.append(f"policy={policy}" if policy else "compare=true")
    done = finish("nde_talf.cli", ["generate", *asked])
    assert done.returncode == 0, said(done)
    assert done.stdout.startswith(prompt) and "tokens a target pass" in done.stdout
    assert policy or "times as fast as autoregressive decoding" in done.stdout
    again = finish("nde_talf.cli", ["generate", *asked, "model.static_shapes=true"])
    assert done.stdout.split("\n\n")[0] in again.stdout  # the same text, of static shapes too


def test_a_finished_run_recommends_what_engines_without_a_selector_take(finished):
    folder, _ = finished
    here = f"paths.checkpoints={folder}/checkpoints"
    config = composed(RecommendConfig, here, config="recommend")
    nde_talf.pipelines.commands.recommend.recommend(config)
    out = folder / "checkpoints/default/recommend"
    recommended = json.loads((out / "recommend.json").read_text())
    assert recommended["settings"] == ["t0.6", "t1.0"] and "tree" in recommended
    if recommended["vllm"] is None:
        assert not (out / "vllm.json").exists()
    else:
        engine = json.loads((out / "vllm.json").read_text())
        assert engine == recommended["vllm"] and engine["model"] == str(
            folder / "checkpoints/default/pair/draft"
        )


def test_a_head_learns_from_dialogues(finished, tmp_path):
    folder, _ = finished
    chats = tmp_path / "chats.jsonl"
    turns = (
        [("user", f"def number_{i}(self):"), ("assistant", f"return {i}\n")] for i in range(120)
    )
    rows = (
        {"messages": [{"role": role, "content": content} for role, content in turn]}
        for turn in turns
    )
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        "dialogues=[plain,file]",
        f"dialogues.source={chats}",
        "dialogues.length=64",
        "dialogues.held_out=0.2",
    ]
    printed = printed_by(folder, "run=chat", "base=default", "stage=draft", *arguments)
    assert "first dialogue: what counts" in printed and "120 dialogues" in printed
    out = folder / "checkpoints/chat/draft"
    assert json.loads((out / "held_out.json").read_text())["roots"] > 0
    EagleDrafter.from_pretrained(
        out / "export", CausalModel.load(folder / "checkpoints/default/pair/target")
    )


def kill_when(folder, marker, sign):
    """Start the run, send `sign` as soon as `marker` matches a file; the exit code."""
    process = start("nde_talf.pipelines.run", command(folder)[3:])
    deadline = time.monotonic() + 120
    while not list((folder / "checkpoints/default").glob(marker)):
        assert process.exitcode is None and time.monotonic() < deadline, f"{marker} never came"
        time.sleep(0.02)
    os.kill(process.pid, sign)
    process.join(60)
    return process.exitcode


@pytest.mark.long
def test_killed_in_every_stage_the_run_ends_as_if_undisturbed(finished, tmp_path):
    folder, _ = finished
    markers = {
        "pair/training/draft/last.ckpt": signal.SIGKILL,
        "latency/table.json": signal.SIGINT,
        "traces/*.parquet": signal.SIGKILL,
        "selector/training/*/fold-0.json": signal.SIGKILL,
        "draft/training/last.ckpt": signal.SIGTERM,
        "report/records.jsonl": signal.SIGKILL,
    }
    (tmp_path / "corpus.jsonl").write_bytes((folder / "corpus.jsonl").read_bytes())
    for marker, sign in markers.items():
        code = kill_when(tmp_path, marker, sign)
        assert code == (-9 if sign is signal.SIGKILL else 128 + sign), (marker, code)
    printed_by(tmp_path)
    ours, undisturbed = tmp_path / "checkpoints/default", folder / "checkpoints/default"
    for name in EXPORTS:
        assert digests(ours / name) == digests(undisturbed / name), name
    shards = [json.loads((out / "traces/shards.json").read_text()) for out in (ours, undisturbed)]
    assert shards[0] == shards[1]
    records = (ours / "report/records.jsonl").open()
    keys = [(r["setting"], r["prompt"], r["pass"], r["method"]) for r in map(json.loads, records)]
    decoded = json.loads((ours / "report/results.json").read_text())["tables"].values()
    assert len(keys) == len(set(keys)) == 2 * sum(map(len, decoded))


def test_a_damaged_shard_is_named_and_only_it_is_made_again(finished):
    folder, _ = finished
    traces = folder / "checkpoints/default/traces"
    shards = sorted(traces.glob("*.parquet"))
    before = {shard: (file_digest(shard), shard.stat().st_mtime_ns) for shard in shards}
    shards[0].write_bytes(shards[0].read_bytes()[:1000])
    assert shards[0].name in refused(
        folder, "run=third", "base=default", "stage=selector", "selector.lr=0.002"
    )
    assert shards[0].name in printed_by(folder, "stage=traces")
    assert file_digest(shards[0]) == before[shards[0]][0]
    assert all(shard.stat().st_mtime_ns == before[shard][1] for shard in shards[1:])
    # what came of the same traces stays
    assert "selector: finished" in printed_by(folder, "stage=selector")


@pytest.mark.long
def test_own_models_and_prompts_go_through_the_whole_pipeline(finished, tmp_path):
    folder, _ = finished
    pair, prompts = folder / "checkpoints/default/pair", tmp_path / "prompts.jsonl"
    turns = [{"turns": [f"def number_{i}(self):", "and then?"]} for i in range(30)]
    prompts.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    printed = printed_by(
        folder,
        "run=own",
        "model.static_shapes=true",
        f"model.target={pair}/target",
        f"model.draft={pair}/draft",
        "data=[text,file]",
        f"data.sets.file.source={prompts}",
        "data.sets.file.template='{turns}'",
        "data.sets.file.kind=chat",
        "traces.verifiers=[nss,spectr,khisti,gbv]",
        "selector={verifiers: [gbv]}",
        "evaluation.methods=[rules,selector,head,policies]",
        "evaluation.settings=[t1.0,t0]",
        "evaluation.policies={beam: {k: 2, depth: 2, nodes: 4}, dyspec: {nodes: 4}}",
    )
    assert (folder / "checkpoints/own/report/index.html").exists()
    assert not (folder / "checkpoints/own/pair/target").exists()
    results = json.loads((folder / "checkpoints/own/report/results.json").read_text())
    names = [row["method"] for row in results["tables"]["T=1"]] + list(
        results["titles"]["T=1"]["same"]
    )
    methods = {re.split(r" \(|:", name)[0] for name in names}
    rules = {"NSS", "SpecTr", "Khisti", "GBV", "GBV + selector"}
    assert methods >= rules | {"Beam", "DySpec"} and "SpecInfer" not in methods
    greedy = {row["method"] for row in results["tables"]["T=0"]}
    assert {name.split(" (")[0] for name in greedy} >= {"autoregressive", "Beam", "DySpec"}
    assert not any("SpecTr" in name for name in greedy)
    assert "t0 not traced, so no rules, selector there" in results["measured"]
    written = [json.loads(line) for line in (folder / "checkpoints/own/pair/prompts.jsonl").open()]
    assert {p["text"] for p in written} == {turn["turns"][0] for turn in turns} and {
        p["kind"] for p in written
    } == {"chat"}
    assert "first prompt: chat" in printed


def test_traces_that_the_disk_cannot_hold_are_refused_with_the_numbers(finished, monkeypatch):
    folder, _ = finished
    monkeypatch.setattr("shutil.disk_usage", lambda _: Mock(free=10**5))
    told = refused(folder, "run=full", "base=default", "stage=traces", "traces.samples=3")
    assert "the traces need about" in told and "its disk has 100.0 kB" in told
    assert not list((folder / "checkpoints/full/traces").glob("*.parquet"))
