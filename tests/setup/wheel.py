"""Wheels written by hand, for tests and for the tiny project's own build."""

import base64
import hashlib
import zipfile
from pathlib import Path


def write_wheel(folder, name, version, files, metadata=()):
    """Write a wheel of text files; returns its file name."""
    info = f"{name}-{version}.dist-info"
    texts = dict(files)
    texts[f"{info}/METADATA"] = "\n".join(
        [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *metadata, ""]
    )
    texts[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = ""
    for path, text in texts.items():
        digest = (
            base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        )
        record += f"{path},sha256={digest},{len(text.encode())}\n"
    texts[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    wheel = f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(Path(folder, wheel), "w") as archive:
        for path, text in texts.items():
            archive.writestr(path, text)
    return wheel
