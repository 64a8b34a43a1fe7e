"""Your own models through the stages: a target without a draft model, and a target that no head can
be built for.
"""

import json
import time

import pytest

from nde_talf.data.text.tokenizer import train_tokenizer
from nde_talf.evaluation.protocol import BASELINE, CONTROL
from tests.decoding.families import FAMILIES, module
from tests.pipelines import micro
from tests.pipelines.launch import finish, printed_by, said, start
from tests.pipelines.refusals import refused

pytestmark = pytest.mark.long

QUICK = [
    "evaluation={prompts: 2, new_tokens: 12, calibration_prompts: 1, settings: [t0.6]}",
    "draft.steps=4",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with models of a tokenizer with 300 tokens."""
    made = tmp_path_factory.mktemp("own")
    micro.command(made)  # writes the corpus
    texts = [json.loads(line)["text"] for line in (made / "corpus.jsonl").open()]
    tokenizer = train_tokenizer(texts, 300)
    longer = {"max_position_embeddings": 256}
    llama = module("llama", longer | {"vocab_size": 304})
    opt = module(FAMILIES["opt"][0], FAMILIES["opt"][1] | longer | {"vocab_size": 300})
    qwen = module("qwen3", longer | {"vocab_size": 304})
    for name, model in (("llama", llama), ("opt", opt), ("qwen3", qwen)):
        model.save_pretrained(made / name)
        tokenizer.save_pretrained(made / name)
    return made


def methods(folder, name):
    """What the report of a run compares."""
    results = json.loads((folder / "checkpoints" / name / "report/results.json").read_text())
    (rows,) = results["tables"].values()
    return [row["method"] for row in rows]


@pytest.fixture(scope="module")
def alone(folder):
    """A target's run in one command, which is killed after the head and given again."""
    asked = ("run=alone", f"model.target={folder}/qwen3", "selector.fallback=false", *QUICK)
    dry = printed_by(folder, *asked, "dry_run=true")
    places = [dry.index(f"stage={name}: to do") for name in ("pair", "draft", "latency", "traces")]
    assert places == sorted(places)
    run, head = folder / "checkpoints/alone", "draft/export/model.safetensors"
    process = start("nde_talf.pipelines.run", micro.command(folder, *asked)[3:])
    while process.is_alive() and not (run / "latency/begun.json").exists():
        time.sleep(0.01)
    process.kill()
    process.join()
    assert not (run / "traces").exists()
    trained = (run / head).stat().st_mtime_ns
    assert "✓ draft: finished" in printed_by(folder, *asked)
    assert (run / head).stat().st_mtime_ns == trained
    dry = printed_by(folder, *asked, "seed=5", "dry_run=true")
    assert "stage=pair: finished with other settings (seed: 0 recorded" in dry
    return ["run=alone", f"paths.checkpoints={folder}/checkpoints"]


def test_a_target_without_a_draft_model_gets_a_head_and_a_selector_for_it(folder, alone):
    names = methods(folder, "alone")
    assert names[:2] == [BASELINE, CONTROL] and names[-1] == "n-gram"
    for rule in ("Traversal", "SpecInfer"):
        assert any(name.startswith(f"{rule}, TALF head (") for name in names)
        assert f"{rule} + selector (NDE)" in names


@pytest.mark.parametrize(
    "command, told",
    [
        ("generate prompt=x", "NDE selector"),
        ("generate prompt=x temperature=0", "rule greedy; T = 0; drafter head"),
        ("generate prompt=x drafter=lm", "this run has no draft model"),
        ("generate prompt=x drafter=ngram", "drafter ngram"),
        ("check texts=8 new_tokens=16", "follow the target's law"),
        ("recommend", "Figures:"),
    ],
)
def test_a_run_of_a_target_alone_is_used_like_another(alone, command, told):
    name, *asked = command.split()
    assert told in said(finish(f"nde_talf.pipelines.commands.{name}", [*alone, *asked]))


def test_a_target_that_can_have_no_head_is_evaluated_without_one(folder):
    alone = ("run=opt", f"model.target={folder}/opt", *QUICK)
    printed = printed_by(folder, *alone)
    assert "draft: skipped" in printed and "of type opt" in printed
    assert "latency: skipped" in printed and "selector: skipped" in printed
    assert methods(folder, "opt") == [BASELINE, CONTROL, "n-gram"]
    told = refused(folder, *alone, "stage=draft")
    assert (
        "no draft head can be built for a model of type opt" in told
        and "evaluation.methods" in told
    )
