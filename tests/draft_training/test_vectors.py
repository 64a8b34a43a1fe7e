"""Test vectors of heads: a head gives them again, another one does not; heads by a hub's name."""

import json
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch
from huggingface_hub import constants

from nde_talf.decoding.common.checksums import write_checksums
from nde_talf.draft_training.export.head_format import load_head, save_head
from nde_talf.draft_training.export.vectors import VECTORS
from tests.draft_training.heads import random_eagle3, random_head, same, tiny_target
from tests.refusal import refusal


@pytest.mark.parametrize("make", [random_head, random_eagle3])
def test_a_head_gives_its_vectors_again_and_another_one_is_refused(make, tmp_path):
    target = tiny_target(layers=6)
    folder = save_head(make(target), tmp_path / "head")
    assert load_head(folder, target).kind
    vectors = json.loads((folder / VECTORS).read_text())
    assert len(vectors["tokens"]) == 1 + len(vectors["features"]) == 1 + len(vectors["best"])
    vectors["logits"][1][0] += 1.0
    (folder / VECTORS).write_text(json.dumps(vectors))
    write_checksums(folder)
    with refusal("other logits than it was exported with"):
        load_head(folder, target)


def test_another_reader_needs_the_file_and_the_weights_alone(tmp_path):
    """A head of EAGLE's wiring by its formula: one layer over fc([embedding; feature])."""
    target = tiny_target()
    head = random_head(target)
    vectors = json.loads((save_head(head, tmp_path / "head") / VECTORS).read_text())
    tokens, features = (torch.tensor(vectors[name]) for name in ("tokens", "features"))
    with torch.inference_mode():
        entries = head.fc(torch.cat([head.embed(tokens[1:]), features], -1))[None]
        positions = torch.arange(len(features))[None]
        mask = torch.full((len(features), len(features)), -torch.inf).triu(1)[None, None]
        attended, _ = head.layers[0].self_attn(
            entries, head.angles(entries, positions), mask, None, position_ids=positions
        )
        logits = target.logits(head.finish(entries, attended)[0])
    known = torch.tensor(vectors["logits"])
    torch.testing.assert_close(logits.gather(-1, torch.tensor(vectors["best"])), known)


class _Hub(SimpleHTTPRequestHandler):
    """The few answers of a hub that a download asks for."""

    files: tuple[str, ...] = ()

    def do_GET(self):
        name = self.path.partition("?")[0].split("/resolve/main/")[-1]
        if "/tree/" in self.path:
            sizes = {each: (self.folder / each).stat().st_size for each in self.files}
            tree = [
                {"type": "file", "path": each, "oid": "0" * 40, "size": size}
                for each, size in sizes.items()
            ]
            return self._answer(json.dumps(tree).encode(), "application/json")
        if "/api/models/" in self.path:
            siblings = [{"rfilename": each} for each in self.files]
            answer = {"id": "me/head", "sha": "f" * 40, "siblings": siblings, "private": False}
            return self._answer(json.dumps(answer).encode(), "application/json")
        return self._answer((self.folder / name.split("/")[-1]).read_bytes(), "text/plain")

    do_HEAD = do_GET

    def _answer(self, content, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", "f" * 40)
        self.send_header("ETag", f'"{hash(content) & 0xFFFFFFFF:x}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on this machine: a function that gives it a folder as me/head."""
    handler = type("Hub", (_Hub,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=partial(server.serve_forever, 0.05), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def serve(folder):
        handler.folder, handler.files = folder, tuple(path.name for path in folder.iterdir())

    yield serve
    server.shutdown()


@pytest.mark.slow
def test_a_head_loads_by_its_name_on_a_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = tiny_target()
    head = random_head(target)
    hub(save_head(head, tmp_path / "export"))
    loaded = load_head("me/head", target)
    assert same(loaded, head)
