"""Flip one bit at a time in every file of a finished run, and say whether a load or the next
command notices.

`python -m benchmarks.flips [--bits 2] [--run FOLDER]`: makes its own small run in a temporary
folder, or takes a copy of one that tests.pipelines.micro made. Every flip is in a copy of the run.
First everything that was exported is loaded, then `stage=all` is run again; for what a killed stage
resumes from, the stage is first made unfinished. What nobody notices is compared with the untouched
run: a flip may leave every value as it was (white space in JSON, say).
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from nde_talf.pipelines.cli import settled
from nde_talf.pipelines.config import Config

from nde_talf.pipelines.quiet import quiet  # isort: skip (before torch)

import hydra
import torch
from transformers import AutoTokenizer

import nde_talf.pipelines.run
from benchmarks.timing import report
from nde_talf.data.text.pair import Pair
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.files import read_json
from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.head_drafter import EagleDrafter
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.network import Selector
from tests.pipelines import micro

RESUMED = re.compile(r"(last|best|before)\.ckpt|result\.json|labels/")
UNREAD = re.compile(r"(curves|wandb)/|begun\.json|hparams\.yaml")
STAGES = {"report": "evaluate"}
NOTICES = re.compile(r"damaged|changed since|not as it was|made again|is missing|cannot be read")
SECONDS = 240


def digest(value: object) -> str:
    if isinstance(value, dict):
        value = [(str(key), digest(part)) for key, part in value.items()]
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().numpy().tobytes()
    elif hasattr(value, "tobytes"):
        value = value.tobytes() if value.dtype != object else value.tolist()
    return hashlib.sha256(value if isinstance(value, bytes) else repr(value).encode()).hexdigest()


def view(run: Path) -> dict[str, str]:
    """What a person gets from a run: everything loaded, and the rest as it reads."""
    pair = Pair(run / "pair")
    found = {"where": digest([pair.where("target")[-6:], pair.where("draft")[-6:]])}
    for role in ("target", "draft"):
        model = CausalModel.load(run / "pair" / role)
        found[role] = digest(dict(model.module.state_dict())) + digest(
            {**model.config.to_dict(), "_name_or_path": ""}
        )
        tokenizer = AutoTokenizer.from_pretrained(run / "pair" / role)
        text = Path(__file__).read_text()
        ids = tokenizer(text)["input_ids"]
        vocabulary = sorted(tokenizer.get_vocab().items())
        found[f"{role}'s tokenizer"] = digest(
            [ids, vocabulary, tokenizer.decode(ids), tokenizer.eos_token]
        )
    found["prompts"] = digest([str(prompt) for prompt in pair.every_prompt()])
    found["rows"] = digest([digest(pair.rows(name)) for name in ("train", "held_out")])
    found["table"] = digest([LatencyTable.load(run / "latency/table.json")])
    for split in ("train", "validation"):
        found[f"traces {split}"] = digest(TraceStore(run / "traces").read(split))
    for export in sorted((run / "selector/export").iterdir()):
        selector = Selector.from_pretrained(export)
        found[f"selector {export.name}"] = digest(dict(selector.state_dict())) + digest(
            [selector.schema]
        )
    head = EagleDrafter.from_pretrained(
        run / "draft/export", CausalModel.load(run / "pair/target")
    ).head
    found["head"] = digest(dict(head.state_dict()))
    for path in sorted(run.rglob("*.json*")):
        if path.parent.name == "report" or path.name in ("offline.json", "held_out.json"):
            found[str(path.relative_to(run))] = digest(_values(path))
    for path in sorted((run / "report").iterdir()):
        if path.suffix in (".html", ".png", ".md"):
            found[path.name] = digest(path.read_bytes())
    for path in sorted(run.glob("*/manifest.json")):
        found[str(path.relative_to(run))] = digest(
            [read_json(path).get(key) for key in ("settings", "metrics", "seconds")]
        )
    return found


def _values(path: Path) -> object:
    """What stands in a JSON file, or its bytes where it is none any more."""
    try:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        return [json.loads(line) for line in lines]
    except ValueError:
        return path.read_bytes()


def exports(run: Path) -> dict[str, str]:
    """Checksums of the weights that a resumed stage ends with."""
    weights = [path for path in sorted(run.rglob("*.safetensors")) if "training" not in path.parts]
    return {str(path.relative_to(run)): digest(path.read_bytes()) for path in weights}


def manifests(run: Path) -> dict[str, int]:
    """When every stage was finished, in nanoseconds."""
    return {path.parent.name: path.stat().st_mtime_ns for path in run.glob("*/manifest.json")}


def unfinish(run: Path, stage: str) -> None:
    """Take away what a stage made, but for what it resumes from."""
    for name in ("manifest.json", "export", "target", "draft"):
        path = run / stage / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def child(folder: Path, file: str, answer: Path, corpus: Path) -> None:
    """In a process of its own: look at one flipped run, and write what was noticed."""
    sink = os.open(answer.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(sink, number)
    os.environ.update(micro.environment())
    run, resumed = folder / "checkpoints/default", bool(RESUMED.search(file))
    try:
        if not resumed:
            seen = view(run)
        words = micro.command(folder, "tracking=disabled", f"data.source={corpus}")[3:]
        if resumed:
            unfinish(run, file.split("/")[0])
            words += [f"stage={STAGES.get(file.split('/')[0], file.split('/')[0])}"]
        with hydra.initialize_config_dir(str(micro.ROOT / "configs"), version_base=None):
            config = settled(hydra.compose("config", words), Config)
        nde_talf.pipelines.run.run(config)
        result = {"how": "", "seen": exports(run) if resumed else seen}
    except UserError as error:
        result = {"how": "refused", "text": str(error)}
    except BaseException as error:
        result = {"how": "crash", "text": f"{type(error).__name__}: {error}"}
    answer.write_text(json.dumps(result))


def look(folder: Path, file: str, untouched: dict[str, dict], corpus: Path) -> str:
    """What becomes of a run with a flipped file, in a word or two."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    before = manifests(folder / "checkpoints/default")
    process = multiprocessing.get_context("fork").Process(
        target=child, args=(folder, file, answer, corpus)
    )
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        return "hangs"
    result = json.loads(answer.read_text()) if answer.exists() else {"how": "crash"}
    printed = answer.with_suffix(".out").read_text()
    after = manifests(folder / "checkpoints/default")
    again = {stage for stage in before if after.get(stage) != before[stage]}
    if result["how"]:
        return result["how"] + (
            ", finished work removed" if again and not RESUMED.search(file) else ""
        )
    if again and not RESUMED.search(file):
        return (
            "made again, the old one kept"
            if "kept in" in printed
            else "finished work removed and made again"
        )
    if NOTICES.search(" ".join(printed.split())):
        return "told"
    same = result["seen"] == untouched["exports" if RESUMED.search(file) else "view"]
    return "nothing changed" if same else "changed in silence"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--bits", type=int, default=1, help="flips a file, each in a copy of its own"
    )
    parser.add_argument(
        "--run",
        type=Path,
        help="the folder of a finished micro run (with its corpus); default: make one",
    )
    parser.add_argument("--only", default="", help="a regular expression for the files' names")
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    rng, rows, counts = random.Random(0), [], Counter()
    with tempfile.TemporaryDirectory() as name:
        pristine, folder = Path(name) / "pristine", Path(name) / "flipped"
        if options.run:
            shutil.copytree(options.run, pristine)
        else:
            pristine.mkdir()
            done = micro.run(pristine, "tracking=disabled")
            assert done.returncode == 0, done.stdout + done.stderr
        run = pristine / "checkpoints/default"
        untouched = {"view": view(run), "exports": exports(run)}
        files = [
            str(p.relative_to(run))
            for p in sorted(run.rglob("*"))
            if p.is_file() and p.stat().st_size
        ]
        files = [
            file for file in files if not UNREAD.search(file) and re.search(options.only, file)
        ]
        corpus = (
            options.run.resolve() / "corpus.jsonl" if options.run else pristine / "corpus.jsonl"
        )
        for file in ["no file", *(file for file in files for _ in range(options.bits))]:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(pristine, folder)
            path, where = folder / "checkpoints/default" / file, "nothing"
            if path.exists():
                content = bytearray(path.read_bytes())
                place, bit = rng.randrange(len(content)), rng.randrange(8)
                content[place] ^= 1 << bit
                path.write_bytes(content)
                where = f"{place}, bit {bit}"
            found = look(folder, file, untouched, corpus)
            if where == "nothing":
                assert found == "nothing changed", f"an untouched run: {found}"
                continue
            counts[found] += 1
            rows.append([file, where, found])
            print(*rows[-1], file=sys.stderr, flush=True)
    rows += [["in all", count, what] for what, count in counts.most_common()]
    report(
        "flips",
        f"python -m benchmarks.flips --bits {options.bits}",
        ["file", "flipped", "found"],
        rows,
    )


if __name__ == "__main__":
    main()
