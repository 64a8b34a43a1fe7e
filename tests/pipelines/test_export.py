"""`nde export` lays out what one uploads, whole and once."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from nde_talf.data.text.shipped import SHIPPED
from nde_talf.decoding.common.checksums import check_checksums
from nde_talf.decoding.models.causal_model import CausalModel
from nde_talf.draft_training.export.head_format import load_head
from nde_talf.pipelines.commands.export import ExportConfig, export
from nde_talf.pipelines.runs.finished import Run
from nde_talf.selector.network import Selector
from tests.local_hub import local_hub
from tests.refusal import refusal


def test_every_export_of_a_run_is_laid_out_with_its_card(tmp_path, capsys):
    config = ExportConfig(run="small", to=str(tmp_path / "out"))
    export(config)
    made = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert {*made} == {"head", *(f"selector-{name}" for name in Run("small", "").selectors())}
    assert all(check_checksums(path) and (path / "README.md").is_file() for path in made.values())
    assert "hf upload YOUR_NAME/small-head" in capsys.readouterr().out
    with refusal("there already"):
        export(config)


def test_a_run_without_exports_says_how_to_make_them(tmp_path):
    pair = tmp_path / "new" / "pair"
    pair.mkdir(parents=True)
    (pair / "pair.json").write_text("{}")
    with refusal("stage=draft"):
        export(ExportConfig(run="new", paths={"checkpoints": str(tmp_path)}))


@pytest.mark.slow
def test_head_and_selector_load_from_the_hub_that_they_were_uploaded_to(
    tmp_path, capsys, monkeypatch
):
    """The head by the command that export prints, the selector by the call that cards name."""
    monkeypatch.chdir(tmp_path)
    export(ExportConfig(run="small", to="out"))
    command = re.search("hf (upload YOUR_NAME/small-head .+)", capsys.readouterr().out)
    hf = [str(Path(sys.executable).with_name("hf")), *command[1].replace("YOUR_NAME", "me").split()]
    with local_hub(tmp_path) as endpoint:
        asked = {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_any", "HF_HUB_OFFLINE": "0"}
        asked |= {"HF_HUB_DISABLE_UPDATE_CHECK": "1"}
        subprocess.run(hf, env=os.environ | asked, check=True, capture_output=True)
        api, name = HfApi(endpoint, token="hf_any"), "me/small-selector-traversal"
        api.create_repo(name)
        api.upload_folder(repo_id=name, folder_path="out/selector-traversal")
        head = load_head("me/small-head", CausalModel.load(f"{SHIPPED}/pair/target"))
        assert head.layers and Selector.from_pretrained(name).table
    for folder in ("head", "selector-traversal"):
        uploaded = {path.name for path in Path(f"hub/me/small-{folder}").iterdir()}
        assert uploaded == {path.name for path in Path("out", folder).iterdir()}
