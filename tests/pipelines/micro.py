"""The smallest real run of the whole pipeline, from the command line, for tests."""

import os
import subprocess
import sys

from tests import ROOT

LM = (
    "{hidden: 32, layers: %d, heads: 2, intermediate: 64, steps: %d, batch: 4, checkpoint_seconds:"
    " 0.5}"
)
MICRO = [
    "model=tiny3",
    "tracking=offline",
    "model.vocab_size=300",
    "model.length=64",
    "model.threads=1",
    f"model.target_lm={LM % (2, 30)}",
    f"model.draft_lm={LM % (1, 30)}",
    "data=text",
    "data.prompt_count=30",
    "data.prompt_tokens=[16, 24]",
    "data.held_out=0.3",
    (
        "traces={settings: [t0.6, t1.0], train_prompts: 6, validation_prompts: 3, new_tokens: 32,"
        " samples: 2, shard_prompts: 3}"
    ),
    "selector={epochs: 5, folds: 2}",
    "latency={contexts: [32], repeats: 2, accept_noise: true}",
    "draft.steps=30",
    "draft.checkpoint_seconds=0.5",
    "evaluation={prompts: 2, new_tokens: 16, calibration_prompts: 1}",
]


def command(folder, *overrides):
    """The command line of a micro run whose corpus and checkpoints live in `folder`."""
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        write_corpus(corpus)
    here = [f"data.source={corpus}", f"paths.checkpoints={folder}/checkpoints"]
    return [sys.executable, "-m", "pipelines.run", *MICRO, *here, *overrides]


def environment():
    ours = {"COLUMNS": "200", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {
        **os.environ,
        **ours,
        "WANDB_X_SAVE_REQUIREMENTS": "false",
    }  # reading the list of packages takes seconds


def run(folder, *overrides):
    """A micro run as a user starts it; launch.run is faster."""
    asked, env = command(folder, *overrides), environment()
    return subprocess.run(asked, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


def write_corpus(path):
    """Real text: modules of this project, one document each."""
    import json

    files = sorted(ROOT.glob("d*/**/*.py")) + sorted(ROOT.glob("selector/*.py"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(
            json.dumps({"name": str(f.relative_to(ROOT)), "text": f.read_text()}) + "\n"
            for f in files
        )
    )
