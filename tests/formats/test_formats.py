"""Every format there has been is read, and gives what today's gives; one from before checksums says
so.
"""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nde_talf.data.text.pair
import nde_talf.data.traces.store
import nde_talf.draft_training.export
import nde_talf.pipelines.manifest
import nde_talf.saved
import nde_talf.selector.latency
import nde_talf.selector.selector
from nde_talf.data.text.pair import Pair
from nde_talf.data.traces.store import TraceStore
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.formats import OldFormatWarning
from nde_talf.decoding.model import CausalModel
from nde_talf.draft_training.export import load_head
from nde_talf.pipelines.config import Config
from nde_talf.pipelines.manifest import identity, read_manifest
from nde_talf.pipelines.stage import Stage, run_stage
from nde_talf.selector.latency import LatencyTable
from nde_talf.selector.selector import Selector

HERE = Path(__file__).parent
FORMATS = {
    "pair": nde_talf.data.text.pair.FORMAT,
    "traces": nde_talf.data.traces.store.FORMAT,
    "head": nde_talf.draft_training.export.FORMAT,
    "manifest": nde_talf.pipelines.manifest.FORMAT,
    "latency": nde_talf.selector.latency.FORMAT,
    "selector": nde_talf.selector.selector.FORMAT,
    "speculation": nde_talf.saved.FORMAT,
}
EVERY = [
    (kind, number) for kind, form in FORMATS.items() for number in (*form.upgrades, form.number)
]


def load(kind: str, path: Path):
    """What an artefact holds, in values that can be compared."""
    if kind == "pair":
        pair = Pair(path)
        models = [model.module.state_dict() for model in pair.models("cpu", "float32")]
        return models, pair.every_prompt(), pair.rows("train"), pair.rows("held_out")
    if kind == "traces":
        return {split: TraceStore(path).read(split) for split in ("train", "validation")}
    if kind == "head":
        return load_head(path, CausalModel.load(HERE / "pair-1/target")).state_dict()
    if kind == "manifest":
        return [
            (m["settings"], m["artefacts"], m["metrics"], m["seconds"])
            for m in map(read_manifest, sorted(path.iterdir()))
        ]
    if kind == "latency":
        return LatencyTable.load(path)
    if kind == "speculation":
        own = nde_talf.saved.load(str(path))
        assert Path(own.draft) == path / "head"
        return (
            own.verifier,
            own.draft_temperature,
            own.forward,
            load("head", Path(own.draft)),
            load("selector", own.selector),
        )
    found = Selector.from_pretrained(path)
    return found.schema, found.state_dict()


def equal(one, other) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and not isinstance(one, str):
        return len(one) == len(other) and all(map(equal, one, other))
    found = one == other
    return bool(found.all()) if hasattr(found, "all") else found


def copy(kind: str, number: int, folder: Path) -> Path:
    name = f"{kind}-{number}" + (".json" if kind == "latency" else "")
    return Path(
        (shutil.copytree if (HERE / name).is_dir() else shutil.copy)(HERE / name, folder / name)
    )


@pytest.mark.parametrize("kind,number", EVERY)
def test_every_format_is_read_as_todays(tmp_path, kind, number):
    form = FORMATS[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error", OldFormatWarning)
        today = load(kind, copy(kind, form.number, tmp_path))
    (tmp_path / "old").mkdir()
    path = copy(kind, number, tmp_path / "old")
    if number < form.checked and kind not in (
        "pair",
        "manifest",
    ):  # a run's own are read many times
        with pytest.warns(OldFormatWarning, match="from before checksums"):
            found = load(kind, path)
    else:
        found = load(kind, path)
    assert equal(found, today)


def files(path: Path) -> list[Path]:
    """Those that a load reads: of a speculation neither card nor code."""
    found = sorted(
        file
        for file in path.rglob("*")
        if file.suffix in (".json", ".jsonl", ".safetensors", ".parquet")
    )
    return [path] if path.is_file() else found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "manifest"])
def test_a_flip_anywhere_in_an_export_is_noticed_by_its_load(tmp_path, kind):
    """Or it changes nothing: white space in JSON, or what no load reads."""
    path = copy(kind, FORMATS[kind].number, tmp_path)
    today, generator = load(kind, path), torch.Generator().manual_seed(0)
    noticed = tried = 0
    for file in files(path):
        good = file.read_bytes()
        for _ in range(6):
            flipped = bytearray(good)
            flipped[int(torch.randint(len(good), (), generator=generator))] ^= 1 << int(
                torch.randint(8, (), generator=generator)
            )
            file.write_bytes(flipped)
            tried += 1
            try:
                assert equal(load(kind, path), today), f"{file.name}: changed in silence"
            except UserError:
                noticed += 1
        file.write_bytes(good)
    assert noticed > 0.7 * tried


def test_eagle3_heads_of_both_names_of_their_layer_are_the_same():
    """Format 2 calls it layers.0, format 3 midlayer."""
    old, new = (load("head", HERE / f"eagle3-{number}") for number in (2, 3))
    assert equal(old, new) and "d2t" in new


@pytest.mark.parametrize("kind", ["head", "selector"])
def test_an_export_without_its_checksums_is_refused(tmp_path, kind):
    path = copy(kind, FORMATS[kind].number, tmp_path)
    (path / "checksums.json").unlink()
    with pytest.raises(UserError, match=r"has no checksums\.json"):
        load(kind, path)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_number_that_nobody_knows_is_refused(tmp_path, kind):
    form = replace(FORMATS[kind])
    for number in (form.number + 1, "2", None if form.absent is None else 0):
        with pytest.raises(UserError, match=f"no {form.what} that this version reads.*known are"):
            form.number_of({"format": number}, tmp_path / "file.json")
    with pytest.raises(UserError):
        form.number_of([], tmp_path / "file.json")


def test_an_old_run_is_finished_as_it_was_and_what_it_made_is_known(tmp_path):
    """Its later stage knows the earlier one by the bytes of its manifest."""
    run = copy("manifest", 1, tmp_path)

    def work(config, folders):
        raise AssertionError("nothing was to be made")

    def settings(config):
        return {"seed": 0, "data": {"held_out": 0.12}}

    stages = {
        "pair": Stage("pair", "pair", lambda config: (), settings, work),
        "latency": Stage("latency", "latency", lambda config: ("pair",), settings, work),
    }
    config = Config(run=run.name)
    config.paths.checkpoints = str(tmp_path)
    for stage in stages.values():
        run_stage(stage, config, stages, force=False)
    before = identity(read_manifest(run / "pair"))
    assert before == identity(read_manifest(HERE / "manifest-2/pair"))
    (run / "pair/made.txt").write_text("other")
    assert identity(read_manifest(run / "pair")) != before
