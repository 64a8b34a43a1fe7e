"""A hub on this machine, as far as uploads, downloads and `hf` ask it."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "f" * 40


class _Hub(BaseHTTPRequestHandler):
    """Repositories are the folders ORG/NAME under `root`; each has one commit."""

    root: Path

    def do_GET(self):
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts[:2] != ["api", "models"]:  # ORG/NAME/resolve/REVISION/FILE
            return self._file(self.root / "/".join(parts[:2]) / "/".join(parts[4:]))
        folder = self.root / "/".join(parts[2:4])
        files = sorted(folder.iterdir()) if folder.is_dir() else None
        if files is None:
            return self._answer(b"", 404, {"X-Error-Code": "RepoNotFound"})
        if "tree" in parts:
            return self._json([_entry(file) for file in files])
        siblings = [{"rfilename": file.name} for file in files]
        name = "/".join(parts[2:4])
        return self._json({"id": name, "sha": COMMIT, "siblings": siblings, "private": False})

    do_HEAD = do_GET

    def do_POST(self):
        body = self._body()
        where = urlsplit(self.path).path
        name = "/".join(where.split("/")[3:5])
        if "/preupload/" in where:
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        if "/commit/" in where:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    file = self.root / name / line["value"]["path"]
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(base64.b64decode(line["value"]["content"]))
            url = f"{self._endpoint}/{name}/commit/{COMMIT}"
            return self._json({"commitUrl": url, "commitOid": COMMIT})
        if where == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            (self.root / name).mkdir(parents=True, exist_ok=True)
            return self._json({"url": f"{self._endpoint}/{name}"})
        return self._json({})  # the check of a card's head

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _file(self, file: Path):
        if not file.is_file():
            return self._answer(b"", 404, {"X-Error-Code": "EntryNotFound"})
        content = file.read_bytes()
        tag = sha256(content).hexdigest()
        return self._answer(content, 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"'})

    def _json(self, answer):
        content = json.dumps(answer).encode()
        return self._answer(content, 200, {"Content-Type": "application/json"})

    def _answer(self, content: bytes, status: int, headers: dict[str, str]):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    @property
    def _endpoint(self) -> str:
        return "http://{}:{}".format(*self.server.server_address)

    def log_message(self, *_):
        pass


def _entry(file: Path) -> dict:
    return {"type": "file", "path": file.name, "oid": "0" * 40, "size": file.stat().st_size}


@contextmanager
def local_hub(folder: Path) -> Iterator[str]:
    """Serve `folder`/hub, with `folder`/cache for downloads, and yield its endpoint."""
    handler = type("Hub", (_Hub,), {"root": folder / "hub"})
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        Thread(target=partial(server.serve_forever, 0.05), daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        # huggingface_hub has read the environment by now
        patch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield endpoint
        server.shutdown()
