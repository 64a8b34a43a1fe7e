"""`nde export` lays out what one uploads, whole and once."""

from nde_talf.decoding.common.checksums import check_checksums
from nde_talf.pipelines.commands.export import ExportConfig, export
from nde_talf.pipelines.runs.finished import Run
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
